"""Answers of two runs to the same tasks, paired by question."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from satlens.analysis.result import Result
from satlens.analysis.scoring.answers import Answers, Metric
from satlens.analysis.scoring.estimates import Scored
from satlens.analysis.scoring.tables import difference_table
from satlens.analysis.stats import N_RESAMPLES
from satlens.report.effects import Frame

SAME = {
    "data_sha256": "the questions are not the same (the sha256 of the data differ)",
    "version": "the versions of the task differ",
    "num_fewshot": "the numbers of shots differ",
    "prompt_hash": "the prompts differ in their words or in their number",
}
"""What two protocols of a task have to share, and what is said where they do not."""
OPTIONS = {"n_resamples": N_RESAMPLES, "seed": 0}


def paired_tasks(
    model: str, baseline: str, result: Result, reference: Result
) -> tuple[Frame, Mapping[str, str]]:
    """Differences ``model`` minus ``baseline`` over the tasks that both were asked.

    Results with interventions are paired intervention by intervention. Returns rows as those of
    ``task_differences``, and the reason for every task that cannot be paired.
    """
    protocols = [_protocol(each) for each in (result, reference)]
    shared = [task for task in protocols[0] if task in protocols[1]]
    reasons = {
        task: "one of the runs was not asked it"
        for task in dict.fromkeys([*protocols[0], *protocols[1]])
        if task not in shared
    }
    for task in shared:
        one, other = (protocol[task] for protocol in protocols)
        differing = [text for field, text in SAME.items() if one[field] != other[field]]
        if differing:
            reasons[task] = differing[0]
    labels = [_by_intervention(each) for each in (result, reference)]
    rows = []
    for changed in (name for name in labels[0] if name in labels[1]):
        names = [f"{arm} + {changed}" if changed else arm for arm in (model, baseline)]
        sides = [
            (name, each, of[changed])
            for name, each, of in zip(names, (result, reference), labels, strict=True)
        ]
        tasks = [_scored(task, protocols[0][task], sides) for task in shared if task not in reasons]
        if tasks:
            rows.append(difference_table(tasks, [], [(names[0], names[1])], OPTIONS)[0])
    return (pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()), reasons


def _protocol(result: Result) -> dict[str, Frame]:
    table = result.part("task_protocol").table
    return {str(row["task"]): row for _, row in table.iterrows()}


def _by_intervention(result: Result) -> dict[str, str]:
    """Label of the first model under each intervention; the empty text is none."""
    labels = list(dict.fromkeys(result.table["model"]))
    own = labels[0].partition(" + ")[0]
    return {
        label.partition(" + ")[2]: label for label in labels if label.partition(" + ")[0] == own
    }


def _scored(task: str, protocol: Frame, sides: list[tuple[str, Result, str]]) -> Scored:
    """The answers of both sides to a task whose protocols agree."""
    of_task = [_rows(result, task, label) for _, result, label in sides]
    passages = of_task[0].drop_duplicates("question")["passage"]
    return Scored(
        task=task,
        passages=list(passages),
        answers={
            name: _answers(rows, protocol, result, label, task)
            for (name, result, label), rows in zip(sides, of_task, strict=True)
        },
    )


def _rows(result: Result, task: str, label: str) -> Frame:
    table = result.part("task_answers").table
    return table[(table["task"] == task) & (table["model"] == label)]


def _answers(rows: Frame, protocol: Frame, result: Result, label: str, task: str) -> Answers:
    exp = {
        name.removesuffix(" (exp of the mean)")
        for name in str(protocol["metrics"]).split(", ")
        if name.endswith(" (exp of the mean)")
    }
    metrics = [
        Metric(
            str(name),
            "exp" if name in exp else "mean",
            of_metric["value"].to_numpy(float),
            of_metric["weight"].to_numpy(float),
        )
        for name, of_metric in rows.groupby("metric", sort=False)
    ]
    first = rows[rows["metric"] == metrics[0].name]
    scores = result.table[(result.table["model"] == label) & (result.table["task"] == task)]
    return Answers(
        metrics=tuple(metrics),
        truncated=first["truncated"].to_numpy(bool),
        skipped=first["skipped"].to_numpy(bool),
        prompt_hash=str(protocol["prompt_hash"]),
        n_tokens=int(np.max(scores["n_tokens"])),
    )
