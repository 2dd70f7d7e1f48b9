"""Phrases about one effect over the seeds of an arm, and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from satlens.analysis.result import Result
from satlens.report.claims.verdicts import mean_over_seeds
from satlens.report.effects import MINUS, Effect, count, effect_of, listed, plain, signed, tenths

Write = Callable[[float], str]
FEW = 3
"""Seeds from which on a mean with its interval is written instead of every seed."""


def number(digits: int = 3) -> Write:
    """A plain number."""
    return lambda value: plain(value, digits)


def change(digits: int = 3) -> Write:
    """A number with its sign."""
    return lambda value: signed(value, digits)


def fixed(digits: int = 2) -> Write:
    """So many digits and no more, as correlations have; what rounds to zero has no sign."""
    return lambda value: f"{round(value, digits) + 0.0:.{digits}f}".replace("-", MINUS)


def share(value: float) -> str:
    """Per cent with one decimal."""
    return f"{tenths(value)} %"


def across(effects: Mapping[int, Effect], write: Write) -> str:
    """An effect over seeds in a sentence: ``0.56 [0.50, 0.62]``.

    From three seeds on the mean with its t interval over seeds; two seeds one by one; a single
    one, which is said, with its interval over documents.
    """
    found = [each for each in effects.values() if each.verdict != "undefined"]
    if not found:
        return "not defined"
    if len(found) == 1:
        return f"{write(found[0].value)}{_ends(found[0], write)} (one seed)"
    if len(found) < FEW:
        return listed([write(each.value) for each in found])
    mean = mean_over_seeds(dict(enumerate(found)))
    return f"{write(mean.value)}{_ends(mean, write)}"


def _ends(found: Effect, write: Write) -> str:
    return f" [{write(found.low)}, {write(found.high)}]" if found.has_interval else ""


def above_zero(measured: Iterable[Mapping[int, Effect]]) -> str:
    """How many costs of single checkpoints are above zero by their own intervals over documents,
    those of several interventions together; empty where none has an interval."""
    found = [each for effects in measured for each in effects.values() if each.has_interval]
    up = sum(each.verdict == "positive" for each in found)
    if not found:
        return ""
    return f"by their own intervals over documents {up} of {len(found)} such costs are above 0"


class Row(NamedTuple):
    """One quantity of one arm, by seed, for a table."""

    study: str
    arm: str
    quantity: str
    effects: Mapping[int, Effect]
    write: Write
    untrained: Mapping[int, float] | None = None
    beside_zero: bool = False
    """Whether it says something in how many seeds zero is excluded."""


ROW_HEADS = (
    *("study", "arm", "quantity", "mean", "interval over seeds"),
    *("single seeds [over documents]", "0 excluded over documents", "untrained"),
)


def rows_table(rows: Sequence[Row]) -> str:
    """Quantities with every interval: t over seeds, range of seeds, how many are apart from zero
    by their own interval over documents; empty without rows."""
    lines = [_cells(row) for row in rows if any(_defined(row.effects))]
    if not lines:
        return ""
    kept = [k for k in range(len(ROW_HEADS)) if any(line[k] for line in lines)]
    heads = [ROW_HEADS[k] for k in kept]
    return table(heads, [[line[k] for k in kept] for line in lines])


def _defined(effects: Mapping[int, Effect]) -> list[Effect]:
    return [each for each in effects.values() if each.verdict != "undefined"]


def _cells(row: Row) -> list[str]:
    found = _defined(row.effects)
    values = [each.value for each in found]
    average = sum(values) / len(values)
    t = mean_over_seeds(dict(enumerate(found))) if len(found) >= FEW else None
    spread = f"{row.write(min(values))} to {row.write(max(values))} ({len(values)})"
    if len(values) < FEW:  # too few for an interval over seeds: each with its own
        spread = listed([f"{row.write(each.value)}{_ends(each, row.write)}" for each in found])
    apart = [each.verdict for each in found if each.has_interval and row.beside_zero]
    off = sum(each in ("positive", "negative") for each in apart)
    before = row.untrained
    return [
        row.study,
        row.arm,
        row.quantity,
        row.write(average),
        "" if t is None else _ends(t, row.write).strip(),
        spread,
        f"{off} of {len(apart)}" if apart else "",
        row.write(mean(before.values())) if before else "",
    ]


def cells(results: Mapping[int, Result], *path: str) -> dict[int, Effect]:
    """A cell of the summary of every seed's result, by its path; absent ones left out."""
    found = {}
    for seed, result in results.items():
        cell: object = result.summary
        for name in path:
            cell = cell.get(name) if isinstance(cell, dict) else None
        if isinstance(cell, dict) and cell.get("estimate") is not None:
            found[seed] = effect_of(cell)
    return found


def numbers(results: Mapping[int, Result], *path: str) -> dict[int, float]:
    """A bare number of the summary of every seed's result, by its path; absent ones left out."""
    found = {}
    for seed, result in results.items():
        cell: object = result.summary
        for name in path:
            cell = cell.get(name) if isinstance(cell, dict) else None
        if isinstance(cell, int | float):
            found[seed] = float(cell)
    return found


def mean(values: Iterable[float]) -> float:
    """The plain mean."""
    values = list(values)
    return sum(values) / len(values)


def seeds(number: int) -> str:
    """in the one seed measured; in both seeds; in all 6 seeds."""
    if number == 1:
        return "in the one seed measured"
    return "in both seeds" if number == 2 else f"in all {number} seeds"


def how_many(some: int, of: int) -> str:
    """in 4 of 6 seeds, or in all of them."""
    return seeds(of) if some == of else f"in {some} of {count(of, 'seed')}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
