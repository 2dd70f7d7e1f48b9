"""Losses: which architecture ends lower, by how much, and how the difference came about."""

from __future__ import annotations

import math
from collections.abc import Callable

from satlens.analysis.result import Result
from satlens.report import words
from satlens.report.claims.measures import Gap, gap, plain_arms, seeds_of
from satlens.report.claims.verdicts import mean_over_seeds
from satlens.report.collect import Run
from satlens.report.effects import (
    NATS,
    NOISE_FLOOR,
    Effect,
    Frame,
    count,
    effect,
    percent,
    plain,
    settles,
    signed,
)
from satlens.report.findings.phrases import table
from satlens.report.over_seeds import held_out

_HEADS = (
    *("contrast", f"difference, {NATS}", "t, over seeds", "bootstrap, over seeds"),
    *("seeds and documents", "documents, these checkpoints", "lower in", "sign test p"),
)
_GROUPS = {
    "beyond": f"Established beyond the noise floor of {NOISE_FLOOR:g}",
    "apart": f"Established to differ, but not shown to exceed the noise floor of {NOISE_FLOOR:g}",
    "direction": "A direction only, because of too few seeds",
    "open": "Not established by seeds that could have done so",
    "few": "Not established, and too few seeds to do so",
}


def contrasts_table(run: Run) -> str:
    """Every paired difference with the intervals that it has; empty without a comparison."""
    compared = run.study.get("comparison")
    if compared is None:
        return ""
    rows = []
    for _, row in _rows(compared):
        ends = [
            _ends(effect(row, name))
            for name in (
                *("difference", "difference_percentile"),
                *("difference_hierarchical", "difference_documents"),
            )
        ]
        wins = sum(value < 0 for value in seeds_of(row).values())
        name = f"{row['first']} \N{MINUS SIGN} {row['second']}"
        p = float(row["sign_p"])
        rows.append(
            [
                name,
                signed(float(row["difference"])),
                *ends,
                f"{wins} of {len(seeds_of(row))}",
                plain(p) if math.isfinite(p) else "",
            ]
        )
    return table(_HEADS, rows)


def contrasts(run: Run) -> list[str]:
    """The paired differences in words, grouped by how far they are established."""
    compared = run.study.get("comparison")
    if compared is None:
        return []
    kinds = words.comparison(compared.table, compared.summary)
    groups: dict[str, list[str]] = {}
    for found, (_, row) in zip(kinds, _rows(compared), strict=True):
        groups.setdefault(_group(found.kind, row), []).append(_contrast(row))
    return [f"{_GROUPS[kind]}: {'; '.join(groups[kind])}." for kind in _GROUPS if kind in groups]


def _group(kind: str, row: Frame) -> str:
    """How far a difference is established; its kind is that of its sentence in a report."""
    if kind == "found":
        return "beyond" if effect(row, "difference").exceeds(NOISE_FLOOR) else "apart"
    return "few" if kind == "open" and not settles(len(seeds_of(row))) else kind


def _contrast(row: Frame) -> str:
    found, single = effect(row, "difference"), seeds_of(row)
    side = "below" if found.value < 0 else "above"
    same = sum((value < 0) == (found.value < 0) for value in single.values())
    interval = f", t interval {_ends(found)}" if found.has_interval else ""
    return (
        f"{row['first']} ends {plain(abs(found.value))} {side} {row['second']}{interval}, "
        f"{same} of {count(len(single), 'seed')}"
    )


def along_training(run: Run) -> list[str]:
    """How the gap of each contrast with seeds enough moved from early in training to its end."""
    compared = run.study.get("comparison")
    if compared is None:
        return []
    said = []
    for _, row in _rows(compared):
        first, second = str(row["first"]), str(row["second"])
        if second not in plain_arms(run, run.variant(second)) or not settles(len(seeds_of(row))):
            continue
        found = gap(run, first, run.variant(second))
        if found is not None:
            said.append(_moved(first, second, found))
    return said


def _moved(first: str, second: str, found: Gap) -> str:
    verb = {
        "positive": "moves up",
        "negative": "moves down",
        "null": "does not move by an amount that is established",
    }.get(found.change.verdict, "has no interval")
    return (
        f"{first} minus {second}, validation loss: {_valued(found.early)} after "
        f"{percent(found.after)} of training, {_valued(found.late)} at its end; over the seeds it "
        f"{verb} ({_valued(found.change)})."
    )


def arms_table(run: Run) -> str:
    """What was trained: parameters, seeds, and where it ended on held-out text."""
    compared = run.study.get("comparison")
    sizes = {} if compared is None else compared.summary.get("n_parameters") or {}
    losses = held_out(run)
    rows = []
    for arm in run.arms:
        values = losses[losses["arm"] == arm]["loss"]
        ended = (
            mean_over_seeds({k: Effect(value=v) for k, v in enumerate(values)})
            if len(values)
            else None
        )
        size = sizes.get(arm)
        rows.append(
            [
                arm if run.variant(arm) == arm else f"{arm} ({run.variant(arm)})",
                f"{int(size):,}" if size else "",
                str(len(values)),
                "" if ended is None else _valued(ended, plain),
                "" if ended is None else plain(math.exp(ended.value), 1),
            ]
        )
    rows.sort(key=lambda row: row[3] or "~")
    heads = ("arm", "parameters", "seeds", f"held-out NLL, {NATS} [t over seeds]", "perplexity")
    text = table(heads, rows)
    if compared is not None and losses.empty:
        text += "\n\nThe comparison of this study lacks the held-out losses of its arms."
    return text


def _valued(found: Effect, write: Callable[[float], str] = signed) -> str:
    return f"{write(found.value)} {_ends(found, write)}".rstrip()


def _ends(found: Effect, write: Callable[[float], str] = signed) -> str:
    if not found.has_interval:
        return ""
    return f"[{write(found.low)}, {write(found.high)}]"


def _rows(compared: Result) -> Frame:
    frame: Frame = compared.table
    return frame.iterrows()


def nulls(run: Run) -> list[str]:
    """Differences between architectures that seeds enough did not establish."""
    compared = run.study.get("comparison")
    if compared is None:
        return []
    kinds = words.comparison(compared.table, compared.summary)
    return [
        f"A difference between {row['first']} and {row['second']}: "
        f"{signed(float(row['difference']))} {NATS}, t interval {_ends(effect(row, 'difference'))} "
        f"over {count(len(seeds_of(row)), 'seed')}."
        for found, (_, row) in zip(kinds, _rows(compared), strict=True)
        if found.kind == "open" and settles(len(seeds_of(row)))
    ]
