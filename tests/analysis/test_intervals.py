"""Bootstrap intervals over documents, against scipy's one cell at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import documents, expanded_level
from scipy import stats as sp
from scipy.spatial import distance

from satlens.analysis import stats
from satlens.errors import AnalysisError


def scipys(values: np.ndarray, n_tokens: np.ndarray, seed: int):
    """BCa of one ratio at the expanded level, with 999 resamples."""
    total, tokens = values.sum(), n_tokens.sum()
    return sp.bootstrap(
        (values, n_tokens),
        lambda x, n, axis: x.sum(axis) / n.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=999,
        method="BCa",
        confidence_level=expanded_level([(total - values) / (tokens - n_tokens)]),
        rng=np.random.default_rng(seed),
    ).confidence_interval


def test_ratio_interval_equals_scipy_on_each_cell(rng):
    values, n_tokens = documents(rng, 40, 6)
    values[rng.random((40, 6)) < 0.6] = 0  # few documents carry the ratio
    values[:, 0] = n_tokens * rng.integers(0, 2, 40)
    values[:, 1] = n_tokens * np.pad([0.1, 0.2, 0.3], (0, 37))
    ours = stats.ratio_interval(values.reshape(40, 2, 3), n_tokens, n_resamples=999, seed=5)
    for cell in range(6):
        theirs = scipys(values[:, cell], n_tokens, seed=5)
        at = np.unravel_index(cell, (2, 3))
        assert ours.low[at] == pytest.approx(theirs.low, rel=1e-10)
        assert ours.high[at] == pytest.approx(theirs.high, rel=1e-10)
    assert np.allclose(ours.estimate.ravel(), values.sum(0) / n_tokens.sum())
    assert ours.covers == "this checkpoint, other documents"
    assert ours.protocol()["seed"] == 5
    assert (ours.flags == "").all()


def test_the_same_seed_gives_the_same_interval_whatever_the_chunks(rng, monkeypatch):
    values, n_tokens = documents(rng, 30, 20)
    whole = stats.ratio_interval(values, n_tokens, n_resamples=500)
    monkeypatch.setattr("satlens.analysis.statistics.resampling._CHUNK_ELEMENTS", 1500)
    monkeypatch.setattr("satlens.analysis.statistics.resampling._BATCH_ELEMENTS", 1000)
    parts = stats.ratio_interval(values, n_tokens, n_resamples=500)
    assert np.allclose(parts.low, whole.low, rtol=1e-12, atol=0)
    assert np.allclose(parts.high, whole.high, rtol=1e-12, atol=0)
    other = stats.ratio_interval(values, n_tokens, n_resamples=500, seed=1)
    assert not np.array_equal(other.low, whole.low)


@pytest.mark.parametrize("unit", [1e-120, 1e120])
def test_the_unit_of_measurement_is_of_no_consequence(rng, unit):
    values, n_tokens = documents(rng, 30, 1)
    once = stats.ratio_interval(values, n_tokens, n_resamples=199)
    scaled = stats.ratio_interval(values * unit, n_tokens, n_resamples=199)
    assert scaled.low == pytest.approx(once.low * unit, rel=1e-9)
    assert scaled.high == pytest.approx(once.high * unit, rel=1e-9)


def test_function_interval_of_a_ratio_is_the_ratio_interval(rng):
    values, n_tokens = documents(rng, 35, 4)
    ratio = stats.ratio_interval(values, n_tokens, n_resamples=500)
    general = stats.function_interval(
        lambda x, n: x / n[:, None], values, n_tokens, weights=n_tokens, n_resamples=500
    )
    assert np.allclose(general.estimate, ratio.estimate, rtol=1e-13)
    assert np.allclose(general.low, ratio.low, rtol=1e-12)
    assert np.allclose(general.high, ratio.high, rtol=1e-12)
    assert np.array_equal(general.units, ratio.units)


def test_divergence_of_averaged_routes_through_function_interval(rng):
    first, second = rng.dirichlet([5, 3, 2], (2, 60, 4)) * 100
    interval = stats.function_interval(
        stats.jensen_shannon, first, second, weights=np.full(60, 100.0), n_resamples=500
    )
    expected = distance.jensenshannon(first.sum(0), second.sum(0), axis=-1) ** 2
    assert interval.estimate.shape == (4,)
    assert interval.estimate == pytest.approx(expected)
    assert (interval.low <= interval.high).all()
    same = stats.function_interval(
        stats.jensen_shannon, first, first, weights=np.full(60, 100.0), n_resamples=100
    )
    assert (same.flags == "constant").all()
    assert (same.low == 0).all()


def test_mean_interval_is_the_paired_one(rng):
    clean, n_tokens = documents(rng, 50, 1)
    damaged = clean + 0.02 * n_tokens[:, None] + rng.normal(size=(50, 1))
    paired = stats.mean_interval(damaged - clean, n_tokens, n_resamples=999)
    assert paired.low < 0.02 + 0.01
    assert paired.high - paired.low < 0.01
    assert paired.estimate == pytest.approx((damaged - clean).sum() / n_tokens.sum())


def test_fewer_than_eight_units_have_no_interval_and_say_so(rng):
    values, n_tokens = documents(rng, 7, 2)
    interval = stats.ratio_interval(values, n_tokens, n_resamples=99)
    assert (interval.flags == "units<8").all()
    assert np.isnan(interval.low).all()
    assert np.isnan(interval.high).all()
    assert np.allclose(interval.estimate, values.sum(0) / n_tokens.sum())


@pytest.mark.parametrize(("n", "flag"), [(8, "few"), (29, "few"), (30, "")])
def test_fewer_than_thirty_units_are_flagged(rng, n, flag):
    values, n_tokens = documents(rng, n, 1)
    assert stats.ratio_interval(values, n_tokens, n_resamples=199).flags == [flag]


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -2.7])
def test_a_constant_sample_gives_a_point(rng, value):
    n_tokens = np.ceil(rng.lognormal(5, 0.5, 200))
    interval = stats.ratio_interval(value * n_tokens, n_tokens, n_resamples=199)
    assert interval.flags == "constant"
    assert interval.low == interval.high == interval.estimate
    assert interval.estimate == pytest.approx(value)


def test_undefined_cells_stay_undefined_and_are_counted(rng):
    values, n_tokens = documents(rng, 40, 3)
    bottom = np.repeat(n_tokens[:, None], 3, axis=1)
    bottom[:, 0], values[:, 0] = 0, 0
    values[4, 1] = np.nan
    interval = stats.ratio_interval(values, bottom, n_resamples=199)
    assert list(interval.flags) == ["undefined", "undefined", ""]
    assert np.isnan(interval.estimate[:2]).all()
    assert np.isnan(interval.low[:2]).all()
    assert interval.n_undefined == 2
    assert interval.units[0] == 0


def test_groups_without_tokens_are_no_units(rng):
    values, n_tokens = documents(rng, 40, 2)
    padded = np.insert(values, [3, 20], 0, axis=0)
    tokens = np.insert(n_tokens, [3, 20], 0)
    expected = stats.ratio_interval(values, n_tokens, n_resamples=199)
    interval = stats.ratio_interval(padded, tokens, n_resamples=199)
    assert np.array_equal(interval.low, expected.low)
    assert (interval.units == 40).all()


def test_resamples_without_a_token_of_the_cell_fall_back_to_the_percentile(rng):
    # 8 of 400 groups hold the category: some resamples draw none of them.
    bottom = np.zeros((400, 2))
    bottom[:, 0], bottom[:8, 1] = 10, 10
    interval = stats.ratio_interval(rng.random((400, 2)) * bottom, bottom, n_resamples=9999)
    assert list(interval.flags) == ["", "few;percentile"]
    assert interval.low[1] < interval.estimate[1] < interval.high[1]


def test_no_documents_at_all():
    interval = stats.ratio_interval(np.zeros((0, 3)), np.zeros(0), n_resamples=9)
    assert (interval.flags == "undefined").all()


def test_a_denominator_that_does_not_fit_is_refused():
    with pytest.raises(AnalysisError, match="shape"):
        stats.ratio_interval(np.ones((9, 2)), np.ones(8))
    with pytest.raises(AnalysisError, match="groups"):
        stats.function_interval(np.add, np.ones(9), np.ones(9), weights=np.ones(8))


@settings(deadline=None, max_examples=25)
@given(st.integers(8, 40), st.integers(0, 2**32 - 1))
def test_scaling_the_data_scales_the_interval(n, seed):
    values, n_tokens = documents(np.random.default_rng(seed), n, 2)
    once = stats.ratio_interval(values, n_tokens, n_resamples=99)
    twice = stats.ratio_interval(-2 * values, n_tokens, n_resamples=99)
    assert np.allclose(twice.estimate, -2 * once.estimate)
    assert (once.low <= once.high).all()
    assert (twice.low <= twice.high).all()
    assert np.array_equal(twice.units, once.units)
