"""Sentences about scores on tasks: beside chance, and what an intervention costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from satlens.plotting.figures_tasks import is_share
from satlens.report.effects import (
    Effect,
    Finding,
    Frame,
    Kind,
    count,
    effect,
    interval,
    interval_percent,
    interval_points,
    listed,
    plain,
    points,
    signed,
    tenths,
)
from satlens.report.words.seeds import in_all

PASSAGES = "these checkpoints, other passages"
_GROUP = " (mean of "
"""Within the name of a row over several tasks."""


def tasks(table: Frame, differences: Frame | None = None, who: str = "model") -> list[Finding]:
    """What one checkpoint scores beside chance, and how it differs under interventions.

    Args:
        table: of the result ``tasks``; its first model is the one that ``who`` names.
        differences: its part ``task_differences``.
    """
    if not len(table):
        return [Finding(f"{who}: no task was scored.", "missing")]
    findings = []
    first = str(table["model"].iloc[0])
    for model in dict.fromkeys(table["model"]):
        if not model.startswith(f"{first} + "):  # its differences say what interventions do
            rows = table[table["model"] == model]
            name = who if model == first else str(model)
            findings += [*_beside_chance(rows, name), *_without_chance(rows, name)]
    findings += _lost_evidence(table)
    if differences is not None:
        pairs = dict.fromkeys(zip(differences["model"], differences["baseline"], strict=True))
        for pair in pairs:
            chosen = (differences["model"] == pair[0]) & (differences["baseline"] == pair[1])
            what = contrast(*pair)
            own = pair[1] == first and pair[0].startswith(f"{first} + ")
            findings += _pair(differences[chosen], f"{who} + {what}" if own else what)
    return findings


def contrast(model: str, baseline: str) -> str:
    """What sets a model apart from its baseline: its interventions, or being another."""
    if model.startswith(f"{baseline} + "):
        return model.removeprefix(f"{baseline} + ")
    return f"{model} against {baseline}"


def difference_effects(differences: Frame) -> dict[tuple[str, str, str], Effect]:
    """(contrast, task, metric) -> difference; of groups alone where there are any."""
    rows = differences
    grouped = rows["task"].str.contains(_GROUP, regex=False)
    rows = rows[grouped] if grouped.any() else rows
    return {
        (contrast(row["model"], row["baseline"]), row["task"], row["metric"]): effect(
            row, "delta", PASSAGES
        )
        for row in rows.to_dict("records")
    }


def has_to_lose(table: Frame, task: str, metric: str) -> bool:
    """Whether the first model of a table scores more on a task than guessing does.

    Without it an intervention has nothing to take away. True of perplexities.
    """
    rows = table[(table["task"] == task) & (table["metric"] == metric)]
    rows = rows[rows["model"] == table["model"].iloc[0]].to_dict("records")
    return any(
        not is_share(metric) or row["score_low"] > (row["chance"] if _has_chance(row) else 0.0)
        for row in rows
    )


def chance_across(scores: Mapping[str, Mapping[int, Frame]]) -> list[Finding]:
    """For each task with a chance level: which checkpoints score above it.

    Args:
        scores: arm -> seed -> table of the result ``tasks``; its first model is the checkpoint.
    """
    found: dict[tuple[str, str], dict[str, dict[int, str]]] = {}
    levels: dict[tuple[str, str], float] = {}
    for arm, seeds in scores.items():
        for seed, table in seeds.items():
            own = table[table["model"] == table["model"].iloc[0]] if len(table) else table
            for row in own.to_dict("records"):
                if _has_chance(row) and _GROUP not in row["task"]:
                    key = (row["task"], row["metric"])
                    found.setdefault(key, {}).setdefault(arm, {})[seed] = _side(row)
                    levels[key] = row["chance"]
    return [_across(task, levels[task, metric], arms) for (task, metric), arms in found.items()]


def _across(task: str, level: float, arms: Mapping[str, Mapping[int, str]]) -> Finding:
    said = []
    for side, words in _SIDES.items():
        names = []
        for arm, seeds in arms.items():
            n = sum(found == side for found in seeds.values())
            if n == len(seeds):
                names.append(f"{arm} ({in_all(n)})" if n > 1 else arm)
            elif n:
                names.append(f"{arm} (in {n} of {len(seeds)} seeds)")
        if names:
            said.append(f"{words}: {listed(names)}")
    settled = all(side != "open" for seeds in arms.values() for side in seeds.values())
    text = f"{task} (chance {_level(level)}), {'; '.join(said)}."
    return Finding(text, "found" if settled else "open")


_SIDES = {
    "above": "above chance",
    "below": "below chance",
    "open": "not told from chance",
    "no interval": "too few passages for an interval",
}


def _level(share: float) -> str:
    """12.5 %, 25 %."""
    return f"{tenths(share).removesuffix('.0')} %"


def _has_chance(row: Mapping[str, Any]) -> bool:
    """Whether guessing scores something, so that a score means little without it."""
    level = float(row["chance"])
    return is_share(row["metric"]) and math.isfinite(level) and level > 0


def _side(row: Frame) -> str:
    """On which side of chance the interval of a score lies."""
    found = effect(row, "score", PASSAGES)
    if not found.has_interval:
        return "no interval"
    if found.low > row["chance"]:
        return "above"
    return "below" if found.high < row["chance"] else "open"


def _beside_chance(rows: Frame, who: str) -> list[Finding]:
    """A sentence a side of chance, with the tasks on it."""
    sides: dict[str, list[str]] = {}
    several = _several(rows)
    for row in rows.to_dict("records"):
        if _has_chance(row) and math.isfinite(row["score"]):
            score = effect(row, "score", PASSAGES)
            name = _task(row, several)
            text = f"{name} {tenths(score.value)} % ({interval_percent(score)}"
            sides.setdefault(_side(row), []).append(f"{text}; chance {_level(row['chance'])})")
    return [
        Finding(
            f"{who}, {words}: {listed(sides[side])}.",
            "open" if side in ("open", "no interval") else "found",
        )
        for side, words in _SIDES.items()
        if side in sides
    ]


def _without_chance(rows: Frame, who: str) -> list[Finding]:
    """Scores of tasks where guessing gets nothing right, and metrics that are no shares."""
    several = _several(rows)
    shares, others, undefined = [], [], []
    for row in rows.to_dict("records"):
        score, name = effect(row, "score", PASSAGES), _task(row, several)
        if not math.isfinite(score.value):
            undefined.append(name)
        elif not is_share(row["metric"]):
            others.append(
                f"{name} {plain(score.value, _digits(score))} "
                f"({interval(score, _digits(score), sign=False)})"
            )
        elif not _has_chance(row):
            shares.append(f"{name} {tenths(score.value)} % ({interval_percent(score)})")
    found = []
    if shares:
        found.append(Finding(f"{who} answers, where a guess is worth nothing: {listed(shares)}."))
    if others:
        found.append(Finding(f"{who}: {listed(others)}; less is better."))
    if undefined:
        found.append(Finding(f"{who}: no score is defined on {listed(undefined)}.", "open"))
    return found


def _several(rows: Frame) -> bool:
    """Whether shares are counted in several ways, so that a task alone does not say which."""
    return rows.loc[rows["metric"].map(is_share), "metric"].nunique() > 1


def _task(row: Mapping[str, Any], several: bool) -> str:
    """The task, with its metric where it is no share or there are several."""
    if not is_share(row["metric"]):
        return f"{row['metric'].replace('_', ' ')} on {row['task']}"
    return f"{row['task']} ({row['metric']})" if several else str(row["task"])


def _lost_evidence(table: Frame) -> list[Finding]:
    """Questions whose text was cut to the context, or that were left out of the scores."""
    rows = table[~table["task"].str.contains(_GROUP, regex=False)]
    rows = rows.groupby("task", sort=False)[["n_questions", "n_truncated", "n_skipped"]].max()
    cut = [
        f"{int(row['n_truncated']):,} of {count(int(row['n_questions']), 'question')} of {task}"
        for task, row in rows.iterrows()
        if row["n_truncated"] > 0
    ]
    skipped = [
        f"{int(row['n_skipped']):,} of {task}"
        for task, row in rows.iterrows()
        if row["n_skipped"] > 0
    ]
    found = []
    if cut:
        text = "Cut to the model's context, so that the evidence may be gone"
        found.append(Finding(f"{text}: {listed(cut)}.", "caveat"))
    if skipped:
        text = "Questions longer than the model's context, left out of the scores"
        found.append(Finding(f"{text}: {listed(skipped)}.", "caveat"))
    return found


def _pair(rows: Frame, what: str) -> list[Finding]:
    """What one model gains and loses against its baseline, then where nothing is established."""
    settled: list[Finding] = []
    left: list[str] = []
    several = _several(rows)
    for row in rows.to_dict("records"):
        found, name = effect(row, "delta", PASSAGES), _task(row, several)
        if found.verdict in ("positive", "negative"):
            side = "higher" if found.value > 0 else "lower"
            text = f"{what}: {name} is {side} by {_size(found, row)}{_adjusted(row)}."
            settled.append(Finding(text, _kind(row)))
        elif found.verdict == "undefined":
            left.append(f"{name} (undefined)")
        elif found.low == found.high == 0:
            left.append(f"{name} (nothing changes)")
        else:
            left.append(f"{name} ({_difference(found, row)})")
    if left:
        text = f"{what}: no difference is established: {listed(left)}."
        settled.append(Finding(text, "open"))
    return settled


def _kind(row: Mapping[str, Any]) -> Kind:
    """An interval that excludes 0 among many tasks is a direction until p is adjusted for them."""
    return "direction" if row.get("p_adjusted", 0.0) >= 0.05 else "found"


def _size(found: Effect, row: Mapping[str, Any]) -> str:
    """``10.0 points, 95 % interval [...] points``: the size without its sign, then the interval."""
    if is_share(row["metric"]):
        return f"{plain(100 * abs(found.value), 1)} points, {interval_points(found)}"
    digits = _digits(found)
    return f"{plain(abs(found.value), digits)}, {interval(found, digits)}"


def _difference(found: Effect, row: Mapping[str, Any]) -> str:
    if is_share(row["metric"]):
        return f"{points(found.value)}, {interval_points(found)}"
    return f"{signed(found.value, _digits(found))}, {interval(found, _digits(found))}"


def _digits(found: Effect) -> int:
    """A perplexity of hundreds needs no thousandths."""
    return 1 if abs(found.value) >= 10 else 3


def _adjusted(row: Mapping[str, Any]) -> str:
    """p of the sign flips over passages, adjusted over the tasks."""
    p, adjusted = (float(row.get(name, math.nan)) for name in ("p", "p_adjusted"))
    if not math.isfinite(adjusted):
        return ""
    return f" (sign-flip p {p:.2g}, {adjusted:.2g} adjusted over the tasks)"
