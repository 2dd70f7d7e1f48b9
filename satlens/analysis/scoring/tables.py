"""The tables of task scores: scores, differences, protocol, and every single answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from satlens.analysis.scoring.estimates import (
    Estimate,
    Pair,
    Scored,
    Sums,
    difference_estimates,
    mean_over_tasks,
    score_estimates,
    sign_flips,
)
from satlens.analysis.stats import Interval


class Mean(NamedTuple):
    """A row over several tasks that share a metric."""

    label: str
    metric: str
    tasks: tuple[Scored, ...]


def means_of(groups: Mapping[str, Sequence[str]], tasks: Sequence[Scored]) -> list[Mean]:
    """The means to report: of every group, by each metric that two or more of its tasks have.

    Perplexities are left out, which have no scale in common.
    """
    found = []
    for group, names in groups.items():
        by_metric: dict[str, list[Scored]] = {}
        for scored in (one for one in tasks if one.task in names):
            for metric in scored.linear:
                by_metric.setdefault(metric, []).append(scored)
        found += [
            Mean(f"{group} (mean of {len(of)})", metric, tuple(of))
            for metric, of in by_metric.items()
            if len(of) > 1
        ]
    return found


# -- scores ----------------------------------------------------------------------------------------


def score_table(
    tasks: Sequence[Scored], means: Sequence[Mean], options: Mapping[str, int]
) -> tuple[pd.DataFrame, Interval]:
    """A row a model, task and metric, means after the tasks; and an interval, for its protocol."""
    rows, interval = [], None
    for scored in tasks:
        found, interval = score_estimates(scored, options)
        rows += [
            _score_row(arm, scored.task, metric, estimate, [scored])
            for (arm, metric), estimate in found.items()
        ]
    assert interval is not None
    for mean in means:
        for arm in mean.tasks[0].answers:
            sums = [scored.sums(arm, mean.metric) for scored in mean.tasks]
            estimate = mean_over_tasks(sums, options)
            rows.append(_score_row(arm, mean.label, mean.metric, estimate, mean.tasks))
    table = pd.DataFrame(rows)
    order = {arm: place for place, arm in enumerate(tasks[0].answers)}
    table = table.sort_values("model", key=lambda column: column.map(order), kind="stable")
    return table.reset_index(drop=True), interval


def _score_row(
    arm: str, task: str, metric: str, estimate: Estimate, of: Sequence[Scored]
) -> dict[str, Any]:
    answered = [scored.metric(arm, metric).answered for scored in of]
    answers = [scored.answers[arm] for scored in of]
    return {
        "model": arm,
        "task": task,
        "metric": metric,
        **_columns("score", estimate),
        "chance": float(np.mean([scored.chance.get(metric, math.nan) for scored in of])),
        "n_questions": int(sum(one.sum() for one in answered)),
        "n_truncated": int(sum(one.truncated.sum() for one in answers)),
        "n_skipped": int(sum(one.skipped.sum() for one in answers)),
        "n_documents": sum(
            scored.passages_in(one) for scored, one in zip(of, answered, strict=True)
        ),
        "n_tokens": sum(one.n_tokens for one in answers),
        "flags": estimate.flags,
    }


def _columns(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


# -- differences -----------------------------------------------------------------------------------


def difference_table(
    tasks: Sequence[Scored],
    means: Sequence[Mean],
    pairs: Sequence[Pair],
    options: Mapping[str, int],
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A row a pair, task and metric, means after the tasks; and how the tests were made.

    The tests of one pair are adjusted together.
    """
    estimates = [difference_estimates(scored, pairs, options) for scored in tasks]
    rows, tests = [], {}
    for pair in pairs:
        mine: list[dict[str, Any]] = []
        cells: list[dict[str, Sums]] = []
        for scored, found in zip(tasks, estimates, strict=True):
            for metric in scored.metrics:
                cells.append({scored.task: scored.differences(pair, metric)})
                mine.append(_row(pair, scored.task, metric, found[pair, metric], [scored]))
        for mean in means:
            parts = {one.task: one.differences(pair, mean.metric) for one in mean.tasks}
            cells.append(parts)
            estimate = mean_over_tasks(list(parts.values()), options)
            mine.append(_row(pair, mean.label, mean.metric, estimate, mean.tasks))
        test = sign_flips(cells, tasks, options)
        for row, p, adjusted, least in zip(mine, test.p, test.p_adjusted, test.p_min, strict=True):
            row |= {"p": float(p), "p_adjusted": float(adjusted), "p_min": float(least)}
        rows += mine
        tests = {"adjustment": test.adjustment, "n_resamples": test.n_resamples}
    return pd.DataFrame(rows), tests


def _row(
    pair: Pair, task: str, metric: str, estimate: Estimate, of: Sequence[Scored]
) -> dict[str, Any]:
    asked = [scored.shared(pair, metric) for scored in of]
    model, baseline = pair
    return {
        "model": model,
        "baseline": baseline,
        "task": task,
        "metric": metric,
        **_columns("delta", estimate),
        "n_questions": int(sum(one.sum() for one in asked)),
        "n_documents": sum(scored.passages_in(one) for scored, one in zip(of, asked, strict=True)),
        "n_tokens": sum(scored.answers[model].n_tokens for scored in of),
        "flags": estimate.flags,
    }


# -- protocol and answers --------------------------------------------------------------------------


def protocol_table(tasks: Sequence[Scored]) -> pd.DataFrame:
    """A row a task: what was asked, in which words, of which data."""
    rows = []
    for scored in tasks:
        answers = next(iter(scored.answers.values()))
        rows.append(
            {
                "task": scored.task,
                "version": str(scored.facts["version"]),
                "prompt_hash": scored.prompt_hash,
                "data": scored.facts["data"],
                "data_sha256": scored.facts["data_sha256"],
                "output_type": scored.facts["output_type"],
                "metrics": ", ".join(
                    metric.name if metric.scale == "mean" else f"{metric.name} (exp of the mean)"
                    for metric in answers.metrics
                ),
                "source": scored.facts["source"],
                "num_fewshot": scored.facts["num_fewshot"],
                "n_questions": len(scored.passages),
                "n_documents": scored.n_passages,
                "n_tokens": answers.n_tokens,
                "flags": "",
            }
        )
    return pd.DataFrame(rows)


def answer_table(tasks: Sequence[Scored]) -> pd.DataFrame:
    """A row a model, task, metric and question."""
    parts = []
    for scored in tasks:
        n = len(scored.passages)
        for arm, answers in scored.answers.items():
            parts += [
                pd.DataFrame(
                    {
                        "model": arm,
                        "task": scored.task,
                        "metric": metric.name,
                        "question": [str(number) for number in range(n)],
                        "passage": list(scored.passages),
                        "value": metric.values,
                        "weight": metric.weights,
                        "truncated": answers.truncated,
                        "skipped": answers.skipped,
                        "n_documents": 1,
                        "n_tokens": pd.array([pd.NA] * n, dtype="Int64"),
                        "flags": "",
                    }
                )
                for metric in answers.metrics
            ]
    return pd.concat(parts, ignore_index=True)
