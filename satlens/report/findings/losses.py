"""Losses: which architecture ends lower, by how much, and how the difference came about."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from satlens.analysis.result import Result
from satlens.report import words
from satlens.report.collect import Run
from satlens.report.effects import (
    NATS,
    Effect,
    Frame,
    count,
    effect,
    listed,
    percent,
    plain,
    signed,
)
from satlens.report.findings.phrases import table
from satlens.report.measures import early_in, gaps_in_training, plain_arms, seeds_of
from satlens.report.verdicts import mean_over_seeds, settles

_HEADS = (
    *("contrast", f"difference, {NATS}", "t, over seeds", "bootstrap, over seeds"),
    *("seeds and documents", "documents, these checkpoints", "lower in", "sign test p"),
)
_GROUPS = {
    "found": "Established over seeds",
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
        few = found.kind == "open" and not settles(len(seeds_of(row)))
        groups.setdefault("few" if few else found.kind, []).append(_contrast(row))
    return [f"{_GROUPS[kind]}: {'; '.join(groups[kind])}." for kind in _GROUPS if kind in groups]


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
    """How the gap of each contrast with seeds enough moved between an eighth and the end."""
    compared = run.study.get("comparison")
    if compared is None:
        return []
    said = []
    for _, row in _rows(compared):
        first, second = str(row["first"]), str(row["second"])
        if second not in plain_arms(run, run.variant(second)) or not settles(len(seeds_of(row))):
            continue
        gaps = gaps_in_training(run, first, run.variant(second))
        if gaps:
            said.append(_moved(first, second, gaps))
    return said


def _moved(first: str, second: str, gaps: Mapping[int, Mapping[int, float]]) -> str:
    ends = {seed: (early_in(dict(gap)), max(gap)) for seed, gap in gaps.items()}
    early = mean_over_seeds({seed: Effect(value=gaps[seed][a]) for seed, (a, _) in ends.items()})
    late = mean_over_seeds({seed: Effect(value=gaps[seed][b]) for seed, (_, b) in ends.items()})
    moved = mean_over_seeds(
        {seed: Effect(value=gaps[seed][b] - gaps[seed][a]) for seed, (a, b) in ends.items()}
    )
    at = {a / b for a, b in ends.values()}
    verb = {
        "positive": "moves up",
        "negative": "moves down",
        "null": "does not move by an amount that is established",
    }.get(moved.verdict, "has no interval")
    return (
        f"{first} minus {second}, validation loss: {signed(early.value)} {_ends(early)} after "
        f"{listed(sorted(percent(share) for share in at))} of training, {signed(late.value)} "
        f"{_ends(late)} at its end; over the seeds it {verb} ({signed(moved.value)} "
        f"{_ends(moved)})."
    )


def arms_table(run: Run) -> str:
    """What was trained: parameters, seeds, and where it ended on held-out text."""
    compared = run.study.get("comparison")
    losses: Mapping[str, Mapping[str, float]] = {} if compared is None else compared.summary["nll"]
    sizes = {} if compared is None else compared.summary.get("n_parameters", {})
    rows = []
    for arm in run.arms:
        values = list(losses.get(arm, {}).values())
        ended = (
            mean_over_seeds({k: Effect(value=v) for k, v in enumerate(values)}) if values else None
        )
        nll = "" if ended is None else f"{plain(ended.value)} {_ends(ended, plain)}".rstrip()
        size = sizes.get(arm)
        rows.append(
            [
                arm if run.variant(arm) == arm else f"{arm} ({run.variant(arm)})",
                f"{int(size):,}" if size else "",
                str(len(run.seeds.get(arm, ()))),
                nll,
                "" if ended is None else plain(math.exp(ended.value), 1),
            ]
        )
    rows.sort(key=lambda row: row[3] or "~")
    heads = ("arm", "parameters", "seeds", f"held-out NLL, {NATS} [t over seeds]", "perplexity")
    return table(heads, rows)


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
