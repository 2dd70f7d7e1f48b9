"""Rank correlations over cells with their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats as sp

from satlens.analysis import stats
from satlens.analysis.statistics import correlation
from satlens.errors import AnalysisError


def cells(rng: np.random.Generator, n: int, noise: float = 0.2):
    """Sums of two related quantities over 12 cells in ``n`` documents, and their tokens."""
    truth = rng.random(12)
    n_tokens = np.ceil(rng.lognormal(5, 0.5, n))
    x = (truth + noise * rng.normal(size=(n, 12))) * n_tokens[:, None]
    y = (truth**2 + noise * rng.normal(size=(n, 12))) * n_tokens[:, None]
    return x, y, n_tokens


def test_the_estimate_is_scipys_of_the_two_ratios(rng):
    x, y, n_tokens = cells(rng, 40)
    own = n_tokens[:, None, None] * rng.integers(1, 3, (40, 3, 4))
    found = stats.rank_correlation_interval(
        (x.reshape(40, 3, 4), n_tokens), (y.reshape(40, 3, 4), own), n_resamples=199
    )
    expected = sp.spearmanr(x.sum(0) / n_tokens.sum(), y.sum(0) / own.sum(0).ravel()).statistic
    assert found.estimate == pytest.approx(expected, abs=1e-15)
    assert found.estimate.shape == found.low.shape == found.flags.shape == ()
    assert found.units == 40
    assert found.covers == "this checkpoint, other documents"


def test_the_interval_is_students_with_the_bootstrap_error_of_z(rng):
    x, y, n_tokens = cells(rng, 50, noise=1.0)
    found = stats.rank_correlation_interval((x, n_tokens), (y, n_tokens), n_resamples=999, seed=4)

    def z(drawn: np.ndarray) -> float:
        return np.arctanh(sp.spearmanr(x[drawn].sum(0), y[drawn].sum(0)).statistic)

    error = sp.bootstrap(
        (np.arange(50),), z, vectorized=False, n_resamples=999, rng=np.random.default_rng(4)
    ).standard_error
    half = sp.t.ppf(0.975, 49) * np.sqrt(50 / 49) * error
    middle = z(np.arange(50))
    assert found.low == pytest.approx(np.tanh(middle - half), rel=1e-9)
    assert found.high == pytest.approx(np.tanh(middle + half), rel=1e-9)


sides = hnp.arrays(np.float64, (3, 8), elements=st.integers(-3, 3).map(float) | st.just(np.nan))


@settings(deadline=None)
@given(sides, sides)
def test_spearman_by_rows_equals_scipy(x, y):
    ours = correlation.spearman(x, y)
    for got, first, second in zip(ours, x, y, strict=True):
        known = np.isfinite(first).all() and np.isfinite(second).all()
        if not known or np.ptp(first) == 0 or np.ptp(second) == 0:
            assert np.isnan(got)
        else:
            assert got == pytest.approx(sp.spearmanr(first, second).statistic, abs=1e-14)


def test_a_monotone_map_changes_nothing(rng):
    x, y, n_tokens = cells(rng, 30)
    once = stats.rank_correlation_interval((x, n_tokens), (y, n_tokens), n_resamples=99)
    mapped = stats.rank_correlation_interval((3 * x, n_tokens), (-y, n_tokens), n_resamples=99)
    assert mapped.estimate == pytest.approx(-once.estimate)
    assert (mapped.low, mapped.high) == pytest.approx((-once.high, -once.low))


def test_cells_without_a_ratio_are_left_out(rng):
    x, y, n_tokens = cells(rng, 30)
    own = np.repeat(n_tokens[:, None], 12, axis=1)
    own[:, [2, 7]] = 0
    found = stats.rank_correlation_interval((x, own), (y, n_tokens), n_resamples=99)
    kept = np.delete(np.arange(12), [2, 7])
    expected = stats.rank_correlation_interval(
        (x[:, kept], n_tokens), (y[:, kept], n_tokens), n_resamples=99
    )
    assert found.estimate == expected.estimate
    assert found.low == pytest.approx(expected.low)


@pytest.mark.parametrize(
    ("documents", "n_cells", "flag"),
    [(7, 12, "units<8"), (30, 2, "cells<3"), (30, 0, "undefined"), (8, 12, "few")],
)
def test_too_few_documents_or_cells_say_so(rng, documents, n_cells, flag):
    x, y, n_tokens = cells(rng, documents)
    found = stats.rank_correlation_interval(
        (x[:, :n_cells], n_tokens), (y[:, :n_cells], n_tokens), n_resamples=99
    )
    assert found.flags.item().split(";")[0] == flag
    assert np.isnan(found.low) == (flag != "few")


def test_constant_sides_and_perfect_orders(rng):
    x, _, n_tokens = cells(rng, 30)
    flat = stats.rank_correlation_interval((x, n_tokens), (0 * x, n_tokens), n_resamples=99)
    assert flat.flags == "undefined"
    same = stats.rank_correlation_interval((x, n_tokens), (-x, n_tokens), n_resamples=99)
    assert same.flags == "constant"
    assert same.low == same.high == same.estimate == -1
    clear = (np.arange(12.0) + rng.normal(size=(30, 12)), np.ones(30))
    perfect = stats.rank_correlation_interval(
        clear, (clear[0] + rng.normal(size=(30, 12)), np.ones(30)), n_resamples=999
    )
    assert perfect.estimate == perfect.high == 1
    assert 0.9 < perfect.low < 1


def test_noise_that_hides_an_order_is_flagged(rng):
    order = np.arange(100.0)
    n_tokens = np.ones(50)
    noisy = [(order + 200 * rng.normal(size=(50, 100)), n_tokens) for _ in range(2)]
    clear = [(order + rng.normal(size=(50, 100)), n_tokens) for _ in range(2)]
    assert stats.rank_correlation_interval(*noisy, n_resamples=499).flags == "attenuated"
    assert stats.rank_correlation_interval(*clear, n_resamples=499).estimate > 0.99


def test_sides_of_other_shapes_are_refused(rng):
    x, y, n_tokens = cells(rng, 30)
    with pytest.raises(AnalysisError, match="rank correlation"):
        stats.rank_correlation_interval((x, n_tokens), (y[:, :4], n_tokens))
