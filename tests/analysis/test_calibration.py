"""Coverage and false-positive rates by simulation, small here and in full when slow tests run."""

from __future__ import annotations

import numpy as np
import pytest
from samples import binomial_range

from satlens.analysis import stats
from satlens.analysis.statistics import calibration
from satlens.errors import AnalysisError

LEAST, MOST = 0.93, 0.97
"""Coverage at 50 documents that a nominal 95 % may have."""


def within(rate: calibration.Rate, low: float = LEAST, high: float = MOST) -> bool:
    """Whether the observed share is possible for a true one between ``low`` and ``high``."""
    ends = [binomial_range(share, rate.repetitions) for share in (low, high)]
    return bool(ends[0][0] <= rate.share <= ends[1][1])


@pytest.mark.parametrize(
    ("population", "cv"), [("zero_share", 0.25), ("gate", 1.0), ("rare_gate", 0.5)]
)
def test_ratios_are_covered_at_fifty_documents(population, cv):
    rate = calibration.coverage(population, length_cv=cv)
    assert rate.repetitions == 1000
    assert within(rate)


def test_the_level_of_a_plain_bootstrap_would_not_do(monkeypatch):
    monkeypatch.setattr(
        "satlens.analysis.statistics.resampling._half_width",
        lambda influences: np.float64(1.959964),
    )
    assert not within(calibration.coverage("rare_gate", length_cv=1.0, n_documents=15))


def test_populations_have_the_ratios_they_claim(rng):
    n_tokens = np.ceil(rng.lognormal(5, 0.3, 200_000))
    for name, population in calibration.POPULATIONS.items():
        sums = population.draw(rng, n_tokens)
        ratio = sums.sum() / n_tokens.sum()
        error = np.std(sums - ratio * n_tokens) / np.sqrt(len(sums)) / n_tokens.mean()
        assert abs(ratio - population.truth) < 4 * error, name
    with pytest.raises(AnalysisError, match="no population 'gates'"):
        calibration.coverage("gates")


def test_lengths_have_the_spread_they_claim(rng):
    for cv in (0.0, 0.5, 1.0):
        drawn = calibration._lengths(rng, cv, (200_000,))
        assert drawn.std() / drawn.mean() == pytest.approx(cv, abs=0.02)
        assert drawn.mean() == pytest.approx(calibration.MEAN_LENGTH, rel=0.02)


def test_documents_with_no_open_gate_are_no_repetition():
    rate = calibration.coverage("rare_gate", n_documents=8, repetitions=400, n_resamples=99)
    assert 300 < rate.repetitions < 400  # 0.8^8 of them have none


def test_false_positives_are_nominal_under_the_null():
    rate = calibration.false_positives(repetitions=300)
    assert rate.nominal == 0.05
    low, high = binomial_range(0.05, 300)
    assert low <= rate.share <= high


def test_unadjusted_tests_of_a_grid_would_be_wrong_too_often(monkeypatch):
    def unadjusted(*arguments, **options):
        test = stats.sign_flip_test(*arguments, **options)
        return test._replace(p_adjusted=test.p)

    monkeypatch.setattr(calibration, "sign_flip_test", unadjusted)
    rate = calibration.false_positives(repetitions=100)
    assert rate.low > 0.05
    assert not rate.holds


def test_rates_have_their_exact_interval():
    rate = calibration.false_positives(repetitions=20, n_resamples=99, n_cells=1)
    assert rate.share == rate.count / 20
    assert rate.low <= rate.share <= rate.high
    assert rate.holds == (rate.low <= 0.05 <= rate.high)


def test_rank_correlations_are_covered():
    rate = calibration.rank_coverage(repetitions=100, n_resamples=199)
    assert within(rate, 0.92, 0.97)


# -- in full ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cv", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("population", list(calibration.POPULATIONS))
def test_ratios_are_covered_in_full(population, cv):
    rate = calibration.coverage(population, length_cv=cv, repetitions=4000, n_resamples=1999)
    assert LEAST <= rate.share <= MOST


@pytest.mark.slow
@pytest.mark.parametrize(("n_documents", "least"), [(8, 0.85), (15, 0.89), (30, 0.91), (200, 0.93)])
@pytest.mark.parametrize("population", list(calibration.POPULATIONS))
def test_coverage_at_other_sizes_is_as_documented(population, n_documents, least):
    for cv in (0.0, 0.5, 1.0):
        rate = calibration.coverage(
            population, length_cv=cv, n_documents=n_documents, repetitions=4000
        )
        assert least <= rate.share <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("adjustment", ["max_t", "benjamini_hochberg"])
def test_false_positives_in_full(adjustment):
    rate = calibration.false_positives(adjustment=adjustment, repetitions=4000, n_resamples=999)
    assert rate.low <= 0.05  # Benjamini-Hochberg is below it where cells depend on each other
    assert adjustment == "benjamini_hochberg" or rate.holds


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("noise", [1.0, 4.0])
def test_rank_correlations_are_covered_in_full(correlation, noise):
    rate = calibration.rank_coverage(
        correlation=correlation, noise=noise, repetitions=1000, n_resamples=999
    )
    assert 0.92 <= rate.share <= 0.97
