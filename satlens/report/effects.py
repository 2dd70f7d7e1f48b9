"""From numbers to the words that they allow: verdicts, formats and enumerations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

NOISE_FLOOR = 0.01
"""Differences in nats a token below which two runs at the demo scale are not told apart: in a
similar recipe on other text, changing the learning rate by a thousandth moved the loss by
about as much."""

ALPHA = 0.05
NO_SEED = -1
"""Stands for the seed of a checkpoint that was measured outside a study."""
NATS = "nats/token"
MINUS = "\N{MINUS SIGN}"

Frame = Any
"""A pandas DataFrame (or a row of one). Not annotated as such: pandas types every selection as a
union of all that it could be."""
Kind = Literal["found", "direction", "open", "missing", "caveat"]
Verdict = Literal["positive", "negative", "null", "no_interval", "undefined"]


class Finding(str):
    """A sentence with what it is: found, a direction only, left open, missing, or a caveat."""

    __slots__ = ("kind",)
    kind: Kind

    def __new__(cls, text: str, kind: Kind = "found") -> Finding:
        finding = super().__new__(cls, text)
        finding.kind = kind
        return finding


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A number with its interval and what the interval speaks about; NaN ends are no interval."""

    value: float
    low: float = math.nan
    high: float = math.nan
    covers: str = "this checkpoint, other documents"
    flags: str = ""

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def verdict(self) -> Verdict:
        """Sign of the effect when its interval excludes zero, else what stands in the way."""
        if not math.isfinite(self.value):
            return "undefined"
        if not self.has_interval:
            return "no_interval"
        if self.low > 0:
            return "positive"
        return "negative" if self.high < 0 else "null"

    def exceeds(self, margin: float) -> bool:
        """Whether the whole interval lies farther from zero than ``margin``, on one side of it."""
        return self.has_interval and (self.low > margin or self.high < -margin)


def settles(n_seeds: int) -> bool:
    """Whether a sign test over so many seeds can reach 0.05."""
    return 2.0 ** (1 - n_seeds) <= ALPHA


def effect(row: Any, stat: str, covers: str | None = None) -> Effect:
    """The statistic ``stat`` of a row of a result table, ends NaN where there are none."""

    def number(name: str) -> float:
        value = row.get(name)
        return math.nan if value is None or pd.isna(value) else float(value)

    return Effect(
        value=number(stat),
        low=number(stat + "_low"),
        high=number(stat + "_high"),
        flags=str(row.get("flags", "") or ""),
        covers=covers or "this checkpoint, other documents",
    )


def effect_of(cell: Mapping[str, Any] | None) -> Effect:
    """An effect from a cell of a summary: ``estimate, low, high, flags``; nulls are NaN."""
    cell = cell or {}
    value, low, high = (
        math.nan if cell.get(name) is None else float(cell[name])
        for name in ("estimate", "low", "high")
    )
    return Effect(value=value, low=low, high=high, flags=str(cell.get("flags") or ""))


# -- formats ---------------------------------------------------------------------------------------


def signed(value: float, digits: int = 3) -> str:
    """+0.046, -0.046 with a typographic minus; n/a for NaN."""
    if not math.isfinite(value):
        return "n/a"
    return f"{value:+.{_digits(value, digits)}f}".replace("-", MINUS)


def plain(value: float, digits: int = 3) -> str:
    """0.046; n/a for NaN."""
    if not math.isfinite(value):
        return "n/a"
    return f"{value:.{_digits(value, digits)}f}".replace("-", MINUS)


def _digits(value: float, digits: int) -> int:
    """More digits for a number that would otherwise be written as zero."""
    if value == 0 or abs(value) >= 0.5 * 10**-digits:
        return digits
    return min(8, math.ceil(-math.log10(abs(value))))


def percent(value: float) -> str:
    """56 %, 0.3 %, 0 %: whole numbers from 1 to 99 per cent; only what is 0 or 1 reads so."""
    if not math.isfinite(value):
        return "n/a"
    share = 100 * value
    if share == 0 or 1 <= share <= 99 or share == 100:
        return f"{share:.0f} %"
    if share < 0.1:
        return "< 0.1 %"
    return "> 99.9 %" if share > 99.9 else f"{share:.1f} %"


def tenths(value: float) -> str:
    """56.3: a share in per cent with one decimal, as :func:`interval_percent` writes its ends, so
    that rounding never puts an estimate outside its interval; only 0 and 1 read as 0 and 100."""
    if not math.isfinite(value):
        return "n/a"
    share = 100 * value
    if 0 < share < 0.05:
        return "< 0.1"
    return "> 99.9" if 99.95 <= share < 100 else f"{share:.1f}"


def interval(found: Effect, digits: int = 3, name: str = "95 % interval", sign: bool = True) -> str:
    """``95 % interval [-0.066, -0.027]``, or why there is none; ``sign`` writes a plus too."""
    if found.has_interval:
        write = signed if sign else plain
        low, high = (write(end, digits) for end in (found.low, found.high))
        return f"{name} [{low}, {high}]"
    return f"no interval{_reason(found.flags)}"


def interval_percent(found: Effect) -> str:
    """``95 % interval 55.0 to 57.0 %``, or why there is none."""
    if found.has_interval:
        return f"95 % interval {tenths(found.low)} to {tenths(found.high)} %"
    return f"no interval{_reason(found.flags)}"


def points(value: float) -> str:
    """A difference of two shares: +6.0 points, i.e. hundredths."""
    return f"{signed(100 * value, 1)} points"


def interval_points(found: Effect) -> str:
    """``95 % interval [+5.0, +7.0] points``, or why there is none."""
    if not found.has_interval:
        return interval(found)
    low, high = (signed(100 * end, 1) for end in (found.low, found.high))
    return f"95 % interval [{low}, {high}] points"


def _reason(flags: str) -> str:
    """What the flags of a row say about a missing interval."""
    for flag in flags.split(";"):
        word = flag.rsplit(":", 1)[-1]
        if word.startswith("units<"):
            return f": fewer than {word[6:]} documents"
        if word.startswith("seeds<"):
            return f": fewer than {word[6:]} seeds"
    return ""


def count(number: int, singular: str, plural: str | None = None) -> str:
    """1 head, 3 heads."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def listed(items: Sequence[str], last: str = "and") -> str:
    """a; a and b; a, b and c."""
    items = list(items)
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def who(arm: str, seed: int) -> str:
    """The subject of a sentence: ``satformer (seed 0)``; the arm alone outside a study."""
    return arm if seed == NO_SEED else f"{arm} (seed {seed})"


def heading(arm: str, seed: int) -> str:
    """The same as a title: ``satformer, seed 0``."""
    return arm if seed == NO_SEED else f"{arm}, seed {seed}"


def by_seed(seed: int) -> str:
    """What a number of one seed is introduced by: ``seed 0: ``; nothing outside a study."""
    return "" if seed == NO_SEED else f"seed {seed}: "


def capital(text: str) -> str:
    """The first letter as a capital, the rest untouched."""
    return text[:1].upper() + text[1:]
