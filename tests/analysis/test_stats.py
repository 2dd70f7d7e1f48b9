"""Groups of documents, effect sizes and descriptive statistics."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from samples import documents
from scipy import stats as sp
from scipy.spatial import distance

from satlens.analysis import stats
from satlens.errors import AnalysisError

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


# -- the module ------------------------------------------------------------------------------------


def test_statistics_and_results_import_no_torch():
    code = (
        "import sys, satlens.analysis.stats, satlens.analysis.result, satlens.provenance;"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
