"""Sign-flip tests, against the enumeration of all sign patterns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats as sp

from satlens.analysis import stats
from satlens.errors import AnalysisError


def enumerated(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """p and max-T p over all sign patterns, one at a time with scipy's t."""

    def t(values: np.ndarray) -> np.ndarray:
        return np.abs(sp.ttest_1samp(values, 0).statistic)

    observed = t(differences)
    drawn = np.array(
        [
            t(differences * np.array(signs)[:, None])
            for signs in itertools.product([1, -1], repeat=len(differences))
        ]
    )
    above = drawn >= observed - 1e-9
    above_any = drawn.max(axis=1, keepdims=True) >= observed - 1e-9
    return above.mean(axis=0), above_any.mean(axis=0)


def test_sign_flips_of_six_documents_equal_the_enumeration(rng):
    differences = rng.normal(0.4, 1, (6, 5))
    test = stats.sign_flip_test(differences)
    p, adjusted = enumerated(differences)
    assert test.exact
    assert np.allclose(test.t, sp.ttest_1samp(differences, 0).statistic)
    assert np.allclose(test.p, p)
    assert np.allclose(test.p_adjusted, adjusted)
    assert (test.p_min == 2 / 2**6).all()


def test_the_attainable_minimum_is_attained():
    test = stats.sign_flip_test(np.arange(1.0, 7)[:, None])
    assert test.p == test.p_adjusted == test.p_min == 2 / 2**6


def test_drawn_patterns_approach_the_exact_p(rng):
    differences = rng.normal(0.5, 1, (12, 4))
    exact = stats.sign_flip_test(differences)
    drawn = stats.sign_flip_test(differences, n_resamples=4000)
    assert exact.exact
    assert not drawn.exact
    assert np.abs(drawn.p - exact.p).max() < 0.03
    assert np.abs(drawn.p_adjusted - exact.p_adjusted).max() < 0.03


def test_drawn_patterns_count_the_observed_one():
    test = stats.sign_flip_test(np.ones((40, 1)), n_resamples=99)
    assert test.p == test.p_adjusted == test.p_min == 1 / 100


def test_a_cell_of_zeros_has_p_one_and_hides_nothing(rng):
    differences = np.zeros((10, 2))
    differences[:, 1] = rng.normal(2, 1, 10)
    test = stats.sign_flip_test(differences)
    assert list(test.flags) == ["zero", ""]
    assert test.p[0] == test.p_adjusted[0] == test.p_min[0] == 1
    assert test.t[0] == 0
    assert test.p_adjusted[1] == stats.sign_flip_test(differences[:, 1:]).p_adjusted[0]
    assert (stats.sign_flip_test(np.zeros((10, 2))).p_adjusted == 1).all()


def test_documents_without_a_difference_are_left_out_of_their_cell(rng):
    differences = rng.normal(0.7, 1, (9, 3))
    differences[:3, 1] = np.nan
    differences[:, 2] = np.nan
    test = stats.sign_flip_test(differences)
    alone = stats.sign_flip_test(differences[3:, 1:2])
    assert test.p[1] == pytest.approx(alone.p[0])
    assert test.t[1] == pytest.approx(alone.t[0])
    assert list(test.units) == [9, 6, 0]
    assert test.flags[2] == "undefined"
    assert np.isnan([test.p[2], test.p_adjusted[2]]).all()


@pytest.mark.parametrize("adjustment", ["max_t", "benjamini_hochberg"])
def test_adjusted_p_are_never_smaller(rng, adjustment):
    differences = rng.normal(0.3, 1, (20, 3, 4))
    test = stats.sign_flip_test(differences, adjustment=adjustment, n_resamples=999)
    assert test.p_adjusted.shape == (3, 4)
    assert (test.p_adjusted >= test.p).all()
    if adjustment == "benjamini_hochberg":
        expected = sp.false_discovery_control(test.p.ravel()).reshape(3, 4)
        assert np.array_equal(test.p_adjusted, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_resamples": 0}, "n_resamples: must be at least 1, got 0"),
        ({"seed": -1}, "seed: must not be negative, got -1"),
    ],
)
def test_settings_that_draw_nothing_are_refused(rng, options, message):
    values = rng.normal(size=(9, 10))
    for made in (
        lambda: stats.sign_flip_test(values, **options),
        lambda: stats.mean_interval(values, np.ones(9), **options),
        lambda: stats.rank_correlation_interval(
            (values, np.ones((9, 10))), (values, np.ones((9, 10))), **options
        ),
    ):
        with pytest.raises(AnalysisError, match=message):
            made()
