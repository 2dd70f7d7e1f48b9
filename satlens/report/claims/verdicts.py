"""Claims of papers and what intervals allow to say about them.

* ``holds here``: every interval lies beyond the margin on the claimed side, and so far as seeds are
  known one by one, none of them lies on the other;
* ``does not hold here``: every interval lies within the margin, or beyond it on the other side;
* ``undecided``: the data allow both, or there are too few seeds or documents for an interval;
* ``not run``: the study has no such result.

Claims about architectures need the interval over seeds. Claims about how a trained model uses its
access need the interval over documents of every checkpoint, and the one over seeds too as soon as
there are seeds enough for a sign test to reach 0.05.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from satlens.analysis.stats import student_interval
from satlens.report.claims.published import NOTHING, Paper, Published
from satlens.report.collect import Run
from satlens.report.effects import MINUS, Effect, count, interval, plain, settles, signed

Verdict = Literal["holds here", "does not hold here", "undecided", "not run"]
Style = Literal["signed", "plain"]
OVER_SEEDS = "other seeds"
TOO_FEW = "too_few_seeds"


class Measured(NamedTuple):
    """One number that speaks about a claim."""

    seed: int | None
    """None for a number over all seeds."""
    effect: Effect


class Given(NamedTuple):
    """What a verdict has to be read with."""

    text: str
    met: bool = True
    """Whether the claim can be judged at all; where it cannot, it stays undecided."""


Measure = Callable[[Run, str], Iterable[Measured]]
Context = Callable[[Run, str], Given | None]
"""Of a run and an arm, as the measures are."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper says and which statistic of ours speaks about it."""

    text: str
    paper: Paper
    variant: str
    """Of the arm that it is about."""
    quantity: str
    """What is measured, with its unit."""
    measure: Measure | None = None
    """None for what no study of this package measures."""
    needs: str = ""
    """The result that it is measured from; for what is not measured, why."""
    context: Context | None = None
    """What the verdict has to be read with; None where nothing is to be said."""
    published: Published = NOTHING
    side: Literal[-1, 1] = 1
    """On which side of ``at`` the quantity lies where the claim holds."""
    at: float = 0.0
    """What the quantity is where nothing differs."""
    margin: float = 0.0
    """How far beyond ``at`` an interval has to lie."""
    style: Style = "signed"
    unit: str = ""
    """In a word or two, for a sentence."""

    @property
    def bound(self) -> float:
        """The number that an interval has to clear."""
        return self.at + self.side * self.margin

    @property
    def criterion(self) -> str:
        """The rule in words."""
        return f"interval {self.beyond} {self.limit}"

    @property
    def limit(self) -> str:
        """The bound as text."""
        return f"{self.bound:g}".replace("-", MINUS)

    @property
    def beyond(self) -> str:
        return "above" if self.side > 0 else "below"

    def number(self, value: float, digits: int = 3) -> str:
        """A value of the quantity as text."""
        if value == 0:
            return "0"
        return signed(value, digits) if self.style == "signed" else plain(value, digits)

    def interval(self, found: Effect) -> str:
        return interval(found, sign=self.style == "signed")

    def reach(self, found: Effect) -> tuple[float, float]:
        """How far beyond ``at`` the two ends of an interval lie, the nearer one first; without an
        interval how far the value does."""
        ends = (found.low, found.high) if found.has_interval else (found.value, found.value)
        low, high = sorted(self.side * (end - self.at) for end in ends)
        return low, high


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict with the number that it is shown with and why."""

    verdict: Verdict
    reason: str
    context: str = ""
    """What it has to be read with."""
    shown: Effect | None = None
    n_seeds: int = 0
    lowest: float = math.nan
    """Of single seeds."""
    highest: float = math.nan


def mean_over_seeds(effects: Mapping[int, Effect]) -> Effect:
    """Mean over checkpoints with Student's interval over seeds; of one, itself and its own."""
    found = list(effects.values())
    if len(found) == 1:
        return found[0]
    t = student_interval(np.array([each.value for each in found]))
    return Effect(value=float(t.estimate), low=float(t.low), high=float(t.high), covers=OVER_SEEDS)


def judge(claim: Claim, measured: Sequence[Measured], given: Given | None = None) -> Judgement:
    """What the intervals of every checkpoint, or the one over all runs, allow to say."""
    defined = [each for each in measured if math.isfinite(each.effect.value)]
    if not defined:
        return Judgement(verdict="not run", reason="")
    whole = [each.effect for each in defined if each.seed is None]
    single = {each.seed: each.effect for each in defined if each.seed is not None}
    values = [effect.value for effect in single.values()]
    if whole:
        verdict, reason = _of_whole(claim, whole[0], values)
        shown = whole[0]
    else:
        verdict, reason = _of_checkpoints(claim, single)
        shown = (
            mean_over_seeds(single) if settles(len(single)) else _weakest(claim, single, verdict)
        )
        if len(defined) < len(measured):
            reason += f"; not defined in {len(measured) - len(defined)} more"
    if given is not None and not given.met:
        verdict, reason, given = "undecided", given.text, None
    return Judgement(
        verdict=verdict,
        reason=reason,
        context="" if given is None else given.text,
        shown=shown,
        n_seeds=len(single),
        lowest=min(values, default=math.nan),
        highest=max(values, default=math.nan),
    )


def place(claim: Claim, found: Effect) -> Verdict:
    """On which side of the claim's bound one interval lies."""
    if not found.has_interval or found.flags == TOO_FEW:
        return "undecided"
    nearer, farther = claim.reach(found)
    if nearer > claim.margin:
        return "holds here"
    return "does not hold here" if farther <= claim.margin else "undecided"


def _of_whole(claim: Claim, found: Effect, values: Sequence[float]) -> tuple[Verdict, str]:
    """One number over all runs, and the seeds that it is the mean of."""
    verdict = place(claim, found)
    sides = [claim.side * (value - claim.at) for value in values]
    beyond = sum(side > 0 for side in sides)
    seeds = f"{claim.beyond} {claim.at:g} in {beyond} of {count(len(values), 'seed')}"
    if found.flags == TOO_FEW:
        least = f"{2.0 ** (1 - len(values)):.3g}"
        few = f"a sign test over {count(len(values), 'seed')} cannot reach p below {least}"
        return verdict, f"{seeds}; {few}"
    said = _lies(claim, found, verdict, agree=len({side > 0 for side in sides}) < 2)
    if verdict == "holds here" and beyond < len(values):
        return "undecided", f"{said}, but the seeds do not agree; {seeds}"
    return verdict, f"{said}; {seeds}" if values else said


def _lies(claim: Claim, found: Effect, verdict: Verdict, agree: bool = True) -> str:
    """Where an interval lies, beside what the claim needs; ``agree``: whether the seeds do."""
    bound = claim.limit
    if not found.has_interval:
        return "no interval"
    what = "it" if found.low == found.high else "the interval"
    if verdict == "holds here":
        return f"{what} lies {claim.beyond} {bound}"
    nearer, farther = claim.reach(found)
    differs = agree and abs(found.value - claim.at) >= claim.margin
    if verdict == "undecided":
        if nearer > 0 and differs:
            return (
                f"apart from {claim.number(claim.at)} by its interval, but not shown to exceed the "
                f"margin of {claim.margin:g}"
            )
        return f"the interval covers {bound}"
    if farther < 0 and differs:
        other = "below" if claim.side > 0 else "above"
        return f"the opposite is found: {what} lies {other} {claim.number(claim.at)}"
    return f"{what} does not reach beyond {bound}"


def _weakest(claim: Claim, single: Mapping[int, Effect], verdict: Verdict) -> Effect:
    """The checkpoint whose interval comes nearest to another verdict."""
    if verdict == "does not hold here":
        return max(single.values(), key=lambda found: claim.reach(found)[1])
    return min(single.values(), key=lambda found: claim.reach(found)[0])


def _of_checkpoints(claim: Claim, single: Mapping[int, Effect]) -> tuple[Verdict, str]:
    """Every checkpoint by its interval over documents, then all of them over seeds."""
    n = len(single)
    places: list[Verdict] = [place(claim, found) for found in single.values()]
    nearest = _weakest(claim, single, places[0])
    if n == 1:
        return places[0], f"one checkpoint: {_lies(claim, nearest, places[0])}"
    ends = (claim.number(value) for value in _extremes(single))
    spread = f"{n} checkpoints from {' to '.join(ends)}"
    if len(set(places)) > 1:
        held, against = (places.count(each) for each in ("holds here", "does not hold here"))
        return "undecided", f"shown by {held} and contradicted by {against} of {spread}"
    if places[0] != "holds here":
        return places[0], f"{spread}: {_lies(claim, nearest, places[0])} in each"
    if not settles(n):
        few = "the weakest is shown; too few seeds to speak about others"
        return "holds here", f"in each of {spread}; {few}"
    each = (
        f"in each of {spread} over documents (weakest: {claim.number(nearest.value)}, "
        f"{claim.interval(nearest)})"
    )
    if place(claim, mean_over_seeds(single)) == "holds here":
        return "holds here", f"{each} and over seeds"
    return "undecided", f"{each}, but over seeds the interval covers {claim.limit}"


def _extremes(single: Mapping[int, Effect]) -> tuple[float, float]:
    values = [found.value for found in single.values()]
    return min(values), max(values)


def beside_published(claim: Claim, shown: Effect | None) -> str:
    """On which side of the paper's own numbers ours lies; empty where they are not of one kind."""
    if shown is None:
        return ""
    said = {
        scale: _beside(claim, shown, theirs) for scale, theirs in claim.published.by_scale.items()
    }
    if len(set(said.values())) > 1:
        return ", ".join(f"{scale}: {words}" for scale, words in said.items())
    return next(iter(said.values()), "")


def _beside(claim: Claim, shown: Effect, theirs: float) -> str:
    if shown.has_interval and shown.low <= theirs <= shown.high:
        return "interval covers the published value"
    if (shown.value - claim.at) * (theirs - claim.at) < 0:
        return "opposite to the published value"
    if abs(shown.value - claim.at) < abs(theirs - claim.at):
        return "a smaller difference than published"
    return "a larger difference than published"


def too_few(found: Effect) -> Effect:
    """The effect, marked as one whose seeds are too few to decide anything."""
    return replace(found, flags=TOO_FEW)
