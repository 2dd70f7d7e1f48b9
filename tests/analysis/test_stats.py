from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats as sp
from scipy.spatial import distance

from satlens.analysis import stats
from satlens.errors import AnalysisError


def documents(rng: np.random.Generator, n: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Skewed document lengths and sums whose ratio varies between documents."""
    n_tokens = np.ceil(rng.lognormal(5, 0.5, n))
    return rng.gamma(4, 0.1, (n, cells)) * n_tokens[:, None], n_tokens


def interval_of(estimate: float, units: int) -> np.ndarray:
    """Central 99.9 % range of a binomial share, for checks of coverage and of error rates."""
    return sp.binom.ppf([0.0005, 0.9995], units, estimate) / units


# -- units -----------------------------------------------------------------------------------------


def test_documents_are_their_own_groups_up_to_1024():
    assert np.array_equal(stats.group_of(np.arange(1024), 1024), np.arange(1024))
    assert stats.group_of(3, 50) == 3


def test_many_documents_spread_evenly_over_1024_groups():
    sizes = np.bincount(stats.group_of(np.arange(100_000), 100_000), minlength=1024)
    assert sizes.size == 1024
    assert sizes.min() >= 90
    assert sizes.max() <= 105
    assert np.bincount(stats.group_of(np.arange(1100), 1100), minlength=1024).max() <= 2


def test_a_document_outside_the_corpus_is_refused():
    with pytest.raises(AnalysisError, match="outside"):
        stats.group_of(np.array([0, 7]), 7)


def test_pooling_by_cluster_adds_the_sums_of_a_label(rng):
    values, n_tokens = documents(rng, 6, 2)
    labels = ["b", "a", "b", "a", "b", "c"]
    pooled, tokens = stats.pool_clusters(labels, values, n_tokens)
    assert np.allclose(pooled, [values[[1, 3]].sum(0), values[[0, 2, 4]].sum(0), values[5]])
    assert np.array_equal(tokens, [n_tokens[[1, 3]].sum(), n_tokens[[0, 2, 4]].sum(), n_tokens[5]])
    with pytest.raises(AnalysisError, match="labels"):
        stats.pool_clusters(labels[:5], values)


def test_clusters_of_alike_documents_widen_the_interval(rng):
    labels = np.repeat(np.arange(20), 10)
    n_tokens = np.full(200, 100.0)
    values = (rng.normal(size=20)[labels] + 0.1 * rng.normal(size=200)) * n_tokens
    single = stats.ratio_interval(values, n_tokens)
    pooled = stats.ratio_interval(*stats.pool_clusters(labels.tolist(), values, n_tokens))
    assert pooled.estimate == pytest.approx(single.estimate)
    assert pooled.high - pooled.low > 2 * (single.high - single.low)
    assert pooled.units == 20


# -- bootstrap -------------------------------------------------------------------------------------


def test_ratio_interval_equals_scipy_on_each_cell(rng):
    values, n_tokens = documents(rng, 40, 6)
    ours = stats.ratio_interval(values.reshape(40, 2, 3), n_tokens, n_resamples=999, seed=5)
    for cell in range(6):
        theirs = sp.bootstrap(
            (values[:, cell], n_tokens),
            lambda x, n, axis: x.sum(axis) / n.sum(axis),
            paired=True,
            vectorized=True,
            n_resamples=999,
            method="BCa",
            rng=np.random.default_rng(5),
        ).confidence_interval
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
    monkeypatch.setattr("satlens.analysis.bootstrap._CHUNK_ELEMENTS", 1500)
    monkeypatch.setattr("satlens.analysis.bootstrap._BATCH_ELEMENTS", 1000)
    parts = stats.ratio_interval(values, n_tokens, n_resamples=500)
    assert np.allclose(parts.low, whole.low, rtol=1e-12, atol=0)
    assert np.allclose(parts.high, whole.high, rtol=1e-12, atol=0)
    other = stats.ratio_interval(values, n_tokens, n_resamples=500, seed=1)
    assert not np.array_equal(other.low, whole.low)


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


def coverage(rng: np.random.Generator, repetitions: int, n_resamples: int) -> float:
    """Share of intervals over 50 documents that hold the true ratio."""
    n_tokens = np.ceil(rng.lognormal(5, 0.25, (50, repetitions)))
    rate = rng.beta(8, 12, (50, repetitions))  # mean 0.4, independent of the length
    interval = stats.ratio_interval(
        rng.binomial(n_tokens.astype(int), rate), n_tokens, n_resamples=n_resamples
    )
    return float(((interval.low <= 0.4) & (interval.high >= 0.4)).mean())


def test_coverage_at_fifty_documents(rng):
    low, high = interval_of(0.93, 1000)[0], interval_of(0.97, 1000)[1]
    assert low <= coverage(rng, 1000, 999) <= high


@pytest.mark.slow
def test_coverage_at_fifty_documents_in_full(rng):
    assert 0.93 <= coverage(rng, 20_000, 9999) <= 0.97


# -- sign flips ------------------------------------------------------------------------------------


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


def test_max_t_is_wrong_at_its_nominal_rate_under_the_null(rng):
    rejections = 0
    for seed in range(400):
        shared = rng.normal(size=(20, 1))  # cells of one document depend on each other
        test = stats.sign_flip_test(shared + rng.normal(size=(20, 12)), n_resamples=399, seed=seed)
        rejections += bool((test.p_adjusted <= 0.05).any())
    low, high = interval_of(0.05, 400)
    assert low <= rejections / 400 <= high


# -- effect sizes ----------------------------------------------------------------------------------


def histogram_of(values: np.ndarray, **options) -> stats.Histogram:
    histogram = stats.Histogram.empty(np.shape(values)[1:], **options)
    histogram.add(values)
    return histogram


def test_cliffs_delta_equals_all_pairs(rng):
    # Values on the middle of bins, so that binning ties what is equal and nothing else.
    middles = np.sqrt(stats.Histogram.empty().edges[:-1] * stats.Histogram.empty().edges[1:])
    pool = np.concatenate([-middles[::40], np.zeros(6), middles[::40]])
    first, second = rng.choice(pool, (200, 3)), rng.choice(pool[5:], (150, 3))
    ours = stats.cliffs_delta(histogram_of(first), histogram_of(second))
    pairs = np.sign(first[:, None] - second[None]).mean(axis=(0, 1))
    assert np.allclose(ours, pairs, atol=1e-14)
    u = sp.mannwhitneyu(first[:, 0], second[:, 0]).statistic
    assert ours[0] == pytest.approx(2 * u / (200 * 150) - 1)


def test_cliffs_delta_of_equal_separate_and_empty_histograms():
    low, high = histogram_of(np.array([0.0, 0.0, 0.1])), histogram_of(np.array([0.5, 0.9]))
    assert stats.cliffs_delta(low, low) == 0
    assert stats.cliffs_delta(high, low) == 1
    assert stats.cliffs_delta(low, high) == -1
    assert np.isnan(stats.cliffs_delta(low, stats.Histogram.empty()))
    with pytest.raises(AnalysisError, match="edges"):
        stats.cliffs_delta(low, stats.Histogram.empty(edges=np.array([1.0, 2.0])))


finite = st.floats(-1e3, 1e3) | st.just(0.0)
samples = hnp.arrays(np.float64, st.tuples(st.integers(0, 30), st.just(2)), elements=finite)


@settings(deadline=None)
@given(samples, samples)
def test_histograms_of_parts_add_up_to_the_whole(first, second):
    whole = histogram_of(np.concatenate([first, second]))
    merged = histogram_of(first) + histogram_of(second)
    assert np.array_equal(whole.counts, merged.counts)
    assert np.array_equal(whole.minimum, merged.minimum)
    assert np.array_equal(whole.maximum, merged.maximum)
    assert (whole.n_values == len(first) + len(second)).all()


@settings(deadline=None)
@given(samples)
def test_cliffs_delta_is_antisymmetric_and_bounded(values):
    first, second = histogram_of(values[:, :1]), histogram_of(values[:, 1:])
    delta = stats.cliffs_delta(first, second)
    assert np.array_equal(delta, -stats.cliffs_delta(second, first), equal_nan=True)
    assert (np.isnan(delta) | (np.abs(delta) <= 1)).all()


@settings(deadline=None)
@given(samples, st.floats(0, 1))
def test_quantiles_are_within_a_bin_of_the_sorted_value(values, q):
    ours = histogram_of(values).quantile(q)
    if not len(values):
        assert np.isnan(ours).all()
        return
    exact = np.quantile(values, q, axis=0, method="inverted_cdf")
    for got, value, column in zip(ours, exact, values.T, strict=True):
        assert column.min() <= got <= column.max()
        if 1e-4 <= abs(value) < 1e2:
            assert got == pytest.approx(value, rel=0.0236)
        elif value == 0:
            assert got == 0


def test_the_zero_bin_holds_exact_zeros_only():
    histogram = histogram_of(np.array([0.0, -0.0, 5e-324, -5e-324, 1e-4, 100.0, 1e9]))
    middle = histogram.edges.size + 1
    assert histogram.counts[middle] == 2
    assert histogram.counts[middle - 1] == histogram.counts[middle + 1] == 1
    assert histogram.counts[-1] == 2
    assert histogram.quantile(1.0) == 1e9


def test_values_that_are_not_finite_are_counted_apart():
    histogram = histogram_of(np.array([[np.nan, 1.0], [np.inf, 2.0]]))
    assert list(histogram.undefined) == [2, 0]
    assert list(histogram.n_values) == [0, 2]
    with pytest.raises(AnalysisError, match="shape"):
        histogram.add(np.zeros((2, 3)))


distributions = st.integers(1, 6).flatmap(
    lambda n: st.tuples(*[hnp.arrays(np.float64, n, elements=st.floats(0, 1e6))] * 2)
)


@settings(deadline=None)
@given(distributions)
def test_jensen_shannon_is_symmetric_bounded_and_scipys(pair):
    p, q = pair
    ours = stats.jensen_shannon(p, q)
    if p.sum() == 0 or q.sum() == 0:
        assert np.isnan(ours)
        return
    assert 0 <= ours <= math.log(2)
    assert ours == stats.jensen_shannon(q, p)
    assert stats.jensen_shannon(p, p) == 0
    assert stats.jensen_shannon(p, q, base=2) == pytest.approx(ours / math.log(2))
    if min(p[p > 0].min(), q[q > 0].min()) > 1e-290:
        assert ours == pytest.approx(np.nan_to_num(distance.jensenshannon(p, q)) ** 2, abs=1e-14)


def test_jensen_shannon_of_disjoint_and_invalid_rows():
    p = np.array([[1, 0.0], [-1, 2], [0, 0], [np.nan, 1], [np.inf, 1]])
    ours = stats.jensen_shannon(p, np.array([0, 1.0]))
    assert ours[0] == math.log(2)
    assert np.isnan(ours[1:]).all()
    assert stats.jensen_shannon(p[0], [0, 1.0], base=2) == 1


def test_hoyer_sparsity(rng):
    values = np.abs(rng.normal(size=(3, 50)))
    l1, l2 = np.linalg.norm(values, 1, axis=1), np.linalg.norm(values, axis=1)
    expected = (math.sqrt(50) - l1 / l2) / (math.sqrt(50) - 1)
    assert np.allclose(stats.hoyer(l1, l2**2, 50), expected)
    assert stats.hoyer(3.0, 9.0, 100) == 1
    assert stats.hoyer(100.0, 100.0, 100) == 0
    assert np.isnan(stats.hoyer(np.zeros(2), np.zeros(2), np.array([5, 0]))).all()


def test_variance_shares_equal_an_anova(rng):
    x = rng.normal(size=(4, 3, 200)) + rng.normal(size=(4, 1, 1)) + rng.normal(size=(4, 3, 1))
    shares = stats.variance_shares(x.sum(-1), (x**2).sum(-1), 200)
    heads, layers = x.mean(-1), x.mean((-2, -1))
    between = [layers.var(), (heads - layers[:, None]).var(), (x - heads[..., None]).var()]
    assert np.allclose(shares, np.array(between) / x.var())
    assert shares.sum() == pytest.approx(1)


def test_variance_shares_of_planted_differences():
    layer = np.array([[1.0, 1], [3, 3]])
    assert list(stats.variance_shares(layer * 10, layer**2 * 10, 10)) == [1, 0, 0]
    assert list(stats.variance_shares(layer.T * 10, layer.T**2 * 10, 10)) == [0, 1, 0]
    assert np.isnan(stats.variance_shares(np.full((2, 2), 0.1), np.full((2, 2), 0.01), 1)).all()
    unequal = stats.variance_shares([[5.0, 0], [0, 0]], [[9.0, 0], [0, 0]], [[4, 0], [0, 0]])
    assert list(unequal) == [0, 0, 1]


# -- seeds -----------------------------------------------------------------------------------------


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
    assert width(seeds + 0 * texts) == pytest.approx(2 * 1.96 * seeds.std() / 8**0.5, rel=0.2)
    assert width(seeds + texts) > width(seeds + 0 * texts)


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


# -- the module ------------------------------------------------------------------------------------


def test_statistics_and_results_import_no_torch():
    code = (
        "import sys, satlens.analysis.stats, satlens.analysis.result, satlens.provenance;"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


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


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240601)
