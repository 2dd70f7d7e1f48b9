"""Intervals and tests over paired seeds."""

from __future__ import annotations

import numpy as np
import pytest
from samples import expanded_level
from scipy import stats as sp

from satlens.analysis import stats
from satlens.errors import AnalysisError


def test_seed_comparison_equals_scipy(rng):
    # Whole numbers: a resample of all six seeds ties with the mean in any order of summation.
    first, second = rng.integers(-50, 50, (2, 6, 3)).astype(float)
    ours = stats.seed_comparison(first, second, n_resamples=999, seed=3)
    t = sp.ttest_rel(first, second).confidence_interval()
    assert np.allclose([ours.t.low, ours.t.high], [t.low, t.high])
    for interval, method in ((ours.percentile, "percentile"), (ours.bca, "BCa")):
        theirs = sp.bootstrap(
            ((first - second).T,),
            np.mean,
            axis=1,
            n_resamples=999,
            method=method,
            rng=np.random.default_rng(3),
        ).confidence_interval
        assert np.allclose([interval.low, interval.high], [theirs.low, theirs.high])
        assert method in interval.method
        assert interval.covers == "other seeds"
    positive = (first > second).sum(axis=0)
    expected = [sp.binomtest(int(k), 6).pvalue for k in positive]
    assert np.allclose(ours.sign_p, expected)
    assert ours.sign_p_min == 2 / 2**6


def test_below_five_seeds_there_is_a_t_interval_and_no_bootstrap():
    ours = stats.seed_comparison(np.array([1.0, 1.2, 1.1]), np.zeros(3))
    assert ours.t.low < ours.t.estimate < ours.t.high
    assert ours.t.flags == ""
    assert ours.percentile.flags == ours.bca.flags == "seeds<5"
    assert np.isnan([ours.percentile.low, ours.bca.high]).all()
    assert ours.sign_p == ours.sign_p_min == 0.25


def test_one_seed_is_a_point():
    ours = stats.seed_comparison(np.array([1.5]), np.array([1.0]))
    assert ours.t.estimate == 0.5
    assert ours.t.flags == "seeds<2"
    assert np.isnan(ours.t.low)
    assert ours.sign_p == ours.sign_p_min == 1


def test_equal_arms_are_constant():
    ours = stats.seed_comparison(np.ones(5), np.ones(5), n_resamples=99)
    assert ours.t.flags == ours.bca.flags == "constant"
    assert ours.t.low == ours.bca.high == 0
    assert ours.sign_p == 1
    with pytest.raises(AnalysisError, match="paired seeds"):
        stats.seed_comparison(np.ones(5), np.ones(4))


def test_hierarchical_interval_has_the_variance_of_both_sources(rng):
    n_tokens = np.full((8, 100), 50.0)
    seeds, texts = rng.normal(size=(8, 1)), rng.normal(size=(1, 100))
    noise = 0.01 * rng.normal(size=(8, 100))

    def width(effects: np.ndarray) -> float:
        interval = stats.hierarchical_interval((effects + noise) * n_tokens, n_tokens)
        assert interval.flags == ""
        assert interval.covers == "other seeds, other documents"
        assert interval.estimate == pytest.approx((effects + noise).mean())
        return float(interval.high - interval.low)

    # Documents are shared by the seeds, so more seeds do not average their variance away.
    assert width(np.broadcast_to(texts, (8, 100))) == pytest.approx(
        2 * 1.96 * texts.std() / 10, rel=0.1
    )
    # Seeds are few, so the normal quantile gives way to Student's.
    alone = 2 * sp.t.ppf(0.975, 7) * seeds.std(ddof=1) / 8**0.5
    assert width(seeds + 0 * texts) == pytest.approx(alone, rel=0.1)
    assert width(seeds + texts) > width(seeds + 0 * texts)


def test_hierarchical_interval_equals_scipy_at_its_level(rng):
    effects = rng.normal(size=(6, 1)) + rng.normal(size=(1, 30))
    n_tokens = np.ceil(rng.lognormal(5, 0.5, 30))
    seeds, documents = np.arange(6), np.arange(30)

    def mean(s: np.ndarray, d: np.ndarray) -> float:
        return (effects[np.ix_(s, d)] * n_tokens[d]).sum(1).mean() / n_tokens[d].sum()

    ours = stats.hierarchical_interval(effects * n_tokens, np.tile(n_tokens, (6, 1)))
    without = [
        np.array([mean(np.delete(seeds, i), documents) for i in seeds]),
        np.array([mean(seeds, np.delete(documents, i)) for i in documents]),
    ]
    theirs = sp.bootstrap(
        (seeds, documents),
        mean,
        vectorized=False,
        confidence_level=expanded_level(without),
        n_resamples=9999,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


def test_hierarchical_interval_needs_five_seeds_and_eight_documents(rng):
    values = rng.random((4, 40, 2))
    interval = stats.hierarchical_interval(values, np.ones((4, 40)), n_resamples=99)
    assert (interval.flags == "seeds<5").all()
    assert np.isnan(interval.low).all()
    assert np.allclose(interval.estimate, values.mean((0, 1)))
    few = stats.hierarchical_interval(rng.random((5, 7)), np.ones((5, 7)), n_resamples=99)
    assert few.flags == "units<8"
    same = stats.hierarchical_interval(np.ones((5, 9)), np.ones((5, 9)), n_resamples=99)
    assert same.flags == "few;constant"
