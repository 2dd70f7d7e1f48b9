"""Intervals and tests over passages: closed forms, coverage, and what ignoring passages does."""

from __future__ import annotations

import numpy as np
import pytest
from samples import binomial_range, documents
from scipy import stats as sp

from satlens.analysis import stats
from satlens.analysis.scoring.answers import Answers, Metric, answers_of
from satlens.analysis.scoring.estimates import (
    Scored,
    difference_estimates,
    score_estimates,
    sign_flips,
)
from satlens.analysis.scoring.tables import difference_table, means_of, score_table
from satlens.analysis.statistics import calibration
from satlens.errors import AnalysisError

OPTIONS = {"n_resamples": 999, "seed": 0}
PAIR = ("a", "b")


def answers(values, scale="mean", weights=None, name="acc") -> Answers:
    values = np.asarray(values, float)
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    skipped = np.isnan(values)
    metric = Metric(name, scale, values, np.where(skipped, 0, weights))
    return Answers((metric,), np.zeros(len(values), bool), skipped, "0" * 16, 10)


def scored(first, second, passages=None, task="t", **options) -> Scored:
    names = range(len(first)) if passages is None else passages
    both = {"a": answers(first, **options), "b": answers(second, **options)}
    return Scored(task, [f"p{name}" for name in names], both)


# -- simulation ------------------------------------------------------------------------------------


def test_paired_intervals_over_passages_cover_and_those_over_questions_do_not():
    low, high = binomial_range(0.95, 500)
    by_passage = calibration.paired_coverage(repetitions=500)
    assert low <= by_passage.share <= high
    by_question = calibration.paired_coverage(clustered=False, repetitions=200, n_resamples=199)
    assert by_question.high < 0.85


def test_simulated_models_differ_by_what_is_claimed(rng):
    drawn = calibration.answered_passages(rng, 40_000)
    truth = 0.6 * 0.1
    by_passage = np.bincount(drawn.passage, drawn.first - drawn.second)
    n = np.bincount(drawn.passage)
    error = np.std(by_passage - truth * n) / np.sqrt(len(n)) / n.mean()
    assert abs(by_passage.sum() / n.sum() - truth) < 4 * error
    assert n.mean() == pytest.approx(5, abs=0.05)


def test_flipping_passages_keeps_the_error_rate_and_flipping_questions_does_not(rng):
    wrong = np.zeros(2)
    for index in range(200):
        drawn = calibration.answered_passages(rng, 30, preferences=(0.3, 0.3))
        for which, passages in enumerate((drawn.passage, None)):
            one = scored(drawn.first, drawn.second, passages)
            cells = [{"t": one.differences(PAIR, "acc")}]
            (p,) = sign_flips(cells, [one], {"n_resamples": 199, "seed": index}).p
            wrong[which] += p <= 0.05
    by_passage, by_question = wrong / 200
    low, high = binomial_range(0.05, 200)
    assert low <= by_passage <= high
    assert by_question > 0.12


@pytest.mark.slow
@pytest.mark.parametrize("n_passages", [15, 30, 200])
def test_coverage_at_other_numbers_of_passages(n_passages):
    rate = calibration.paired_coverage(n_passages=n_passages, repetitions=2000, seed=9000)
    assert binomial_range(0.94, 2000)[0] <= rate.share <= binomial_range(0.96, 2000)[1]


# -- means over tasks ------------------------------------------------------------------------------


def test_a_mean_over_one_task_is_its_ratio(rng):
    values, n = documents(rng, 40, 3)
    alone = stats.ratio_interval(values, n)
    mean = stats.stratified_interval([(values, n)])
    assert np.allclose(mean.estimate, alone.estimate)
    assert np.allclose(mean.low, alone.low, rtol=2e-3)
    assert np.allclose(mean.high, alone.high, rtol=2e-3)


def test_a_mean_over_tasks_has_the_error_of_independent_tasks(rng):
    sizes, spreads = (400, 100, 250), (0.1, 0.4, 0.2)
    strata = [(rng.normal(0.5, s, n), np.ones(n)) for n, s in zip(sizes, spreads, strict=True)]
    found = stats.stratified_interval(strata)
    assert found.estimate == pytest.approx(np.mean([values.mean() for values, _ in strata]))
    variance = sum(values.var(ddof=1) / len(values) for values, _ in strata) / 9
    half = sp.norm.isf(0.025) * np.sqrt(variance)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.05)
    assert found.units == sum(sizes)


def test_a_mean_with_too_few_passages_in_one_task_has_no_interval(rng):
    strata = [(rng.normal(size=n), np.ones(n)) for n in (200, 7)]
    found = stats.stratified_interval(strata)
    assert np.isfinite(found.estimate)
    assert np.isnan(found.low)
    assert "units<8" in str(found.flags)
    with pytest.raises(AnalysisError, match="strata"):
        stats.stratified_interval([(np.ones((9, 2)), np.ones(9)), (np.ones((9, 3)), np.ones(9))])


# -- scores and differences ------------------------------------------------------------------------


def test_perplexities_and_weighted_means_are_those_of_their_definition(rng):
    nll, words = rng.gamma(4, 1, 50), rng.integers(5, 80, 50)
    other = nll + rng.normal(0, 0.2, 50)
    one = scored(nll, other, scale="exp", weights=words, name="word_perplexity")
    found, _ = score_estimates(one, OPTIONS)
    expected = [np.exp((values * words).sum() / words.sum()) for values in (nll, other)]
    assert found["a", "word_perplexity"].value == pytest.approx(expected[0])
    assert found["a", "word_perplexity"].low < expected[0] < found["a", "word_perplexity"].high
    difference = difference_estimates(one, [PAIR], OPTIONS)[PAIR, "word_perplexity"]
    assert difference.value == pytest.approx(expected[0] - expected[1])
    assert difference.low < difference.value < difference.high


def test_pairing_makes_the_interval_of_models_that_answer_alike_narrow(rng):
    first = rng.integers(0, 2, 300).astype(float)
    second = np.where(rng.random(300) < 0.03, 1 - first, first)
    one = scored(first, second)
    alone, _ = score_estimates(one, OPTIONS)
    paired = difference_estimates(one, [PAIR, PAIR[::-1]], OPTIONS)
    mine, theirs = paired[PAIR, "acc"], paired[PAIR[::-1], "acc"]
    assert mine.high - mine.low < 0.5 * (alone["a", "acc"].high - alone["a", "acc"].low)
    assert mine.value == pytest.approx(first.mean() - second.mean())
    assert mine.value == -theirs.value


def test_skipped_questions_count_for_neither_model_of_a_difference():
    first = np.array([1.0, 1, 0, np.nan] * 10)
    second = np.array([1.0, np.nan, 1, 0] * 10)
    one = scored(first, second)
    table, _ = score_table([one], [], OPTIONS)
    assert table["score"].tolist() == pytest.approx([2 / 3, 2 / 3])
    assert table["n_questions"].tolist() == [30, 30]
    assert table["n_skipped"].tolist() == [10, 10]
    differences, _ = difference_table([one], [], [PAIR], OPTIONS)
    assert differences["delta"].item() == pytest.approx(-0.5)  # 0 and -1 on the shared ones
    assert differences["n_questions"].item() == 20


def test_a_task_of_which_every_question_is_skipped_has_no_score():
    one = scored([np.nan] * 12, [1.0] * 12)
    table, _ = score_table([one], [], OPTIONS)
    assert np.isnan(table["score"][0])
    assert "undefined" in table["flags"][0]
    differences, _ = difference_table([one], [], [PAIR], OPTIONS)
    assert np.isnan(differences["delta"].item())
    assert np.isnan(differences["p"].item())


def test_p_of_passages_that_all_point_one_way_is_exact():
    one = scored(np.ones(18), np.zeros(18), passages=np.repeat(np.arange(6), 3))
    table, tests = difference_table([one], [], [PAIR], {"n_resamples": 9999, "seed": 0})
    assert table["p"].item() == 2 / 2**6  # 18 questions, but 6 passages
    assert table["n_documents"].item() == 6
    assert tests["adjustment"] == "max_t"


def test_means_of_a_group_weigh_tasks_alike_and_are_tested_with_them(rng):
    tasks = [
        scored(rng.integers(0, 2, n), rng.integers(0, 2, n), np.arange(n) // 3, task=name)
        for name, n in (("swde", 30), ("fda", 300))
    ]
    perplexity = scored(np.ones(9), np.ones(9), task="wikitext", scale="exp", name="ppl")
    means = means_of({"retrieval": ("swde", "fda", "wikitext"), "other": ("swde",)}, tasks)
    assert [mean.label for mean in means] == ["retrieval (mean of 2)"]
    table, _ = score_table([*tasks, perplexity], means, OPTIONS)
    mine = table[table["model"] == "a"].set_index("task")["score"]
    assert mine["retrieval (mean of 2)"] == pytest.approx((mine["swde"] + mine["fda"]) / 2)
    differences, _ = difference_table([*tasks, perplexity], means, [PAIR], OPTIONS)
    rows = differences.set_index("task")
    assert rows["delta"]["retrieval (mean of 2)"] == pytest.approx(
        (rows["delta"]["swde"] + rows["delta"]["fda"]) / 2
    )
    assert (differences["p_adjusted"] >= differences["p"]).all()
    assert rows["n_documents"]["retrieval (mean of 2)"] == 110


# -- records of the harness ------------------------------------------------------------------------


def mean(items):
    return sum(items) / len(items)


def record(doc: int, **metrics) -> dict:
    return {
        "doc_id": doc,
        "arguments": [("Question", f" {doc}")],
        "filter": "none",
        "metrics": list(metrics),
        **metrics,
    }


def test_records_are_put_in_the_order_of_questions_and_skipped_ones_left_out():
    samples = [record(2, acc=1), record(0, acc=0), record(1, acc=float("nan"))]
    found = answers_of("t", samples, {"acc": mean}, skipped={1}, truncated={1, 2})
    (metric,) = found.metrics
    assert np.array_equal(metric.values, [0, np.nan, 1], equal_nan=True)
    assert found.skipped.tolist() == [False, True, False]
    assert found.truncated.tolist() == [False, False, True]  # what is left out is not cut
    with pytest.raises(AnalysisError, match="question 1: acc is nan"):
        answers_of("t", samples, {"acc": mean})


def test_a_metric_that_is_no_mean_over_questions_is_refused():
    def f1_score(items):
        return 0.0

    with pytest.raises(AnalysisError, match=r"metric f1.*f1_score"):
        answers_of("t", [record(0, f1=(1, 1))], {"f1": f1_score})


def test_a_prompt_hash_tells_whitespace_apart():
    one, other = (
        answers_of("t", [{**record(0, acc=1), "arguments": [(text, " a")]}], {"acc": mean})
        for text in ("Question", "Question ")
    )
    assert len(one.prompt_hash) == 16
    assert one.prompt_hash != other.prompt_hash
