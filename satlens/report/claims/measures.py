"""The numbers of a run that speak about claims: a function a kind, over seeds or by checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from satlens.analysis.result import Result
from satlens.report import words
from satlens.report.claims.verdicts import (
    OVER_SEEDS,
    Context,
    Given,
    Measure,
    Measured,
    mean_over_seeds,
    too_few,
)
from satlens.report.collect import Run
from satlens.report.effects import (
    ALPHA,
    Effect,
    Frame,
    count,
    effect,
    effect_of,
    listed,
    percent,
    settles,
    signed,
    tenths,
)

EARLY = 1 / 8
"""Share of training at which the RD-AttnRes paper first compares (0.25 of 2 B tokens)."""
TIMING = "rounds of timing, quartiles widened by the machine's own noise"
COUNTED = "exact count"


def plain_arms(run: Run, variant: str) -> list[str]:
    """Arms of a variant without fields of their own, such as another gate function."""
    planned = run.recipe.get("arms", {})
    return [
        arm
        for arm in run.arms
        if run.variant(arm) == variant and not planned.get(arm, {}).get("fields")
    ]


def against(reference: str) -> Measure:
    """Loss of an arm minus that of the plain arm of another variant, over paired seeds.

    Where the seeds are too few for a sign test to reach 0.05, the interval decides nothing.
    """

    def measure(run: Run, arm: str) -> Iterable[Measured]:
        row = contrast(run, arm, plain_arms(run, reference))
        if row is None:
            return
        found = effect(row, "difference", covers=OVER_SEEDS)
        seeds = seeds_of(row)
        yield Measured(None, found if settles(len(seeds)) else too_few(found))
        for seed, value in seeds.items():
            yield Measured(seed, Effect(value=value, covers="this seed"))

    return measure


def contrast(run: Run, first: str, seconds: Iterable[str]) -> Frame | None:
    """The row of the comparison of one arm with one of others; None where there is none."""
    compared = run.study.get("comparison")
    if compared is None:
        return None
    wanted = set(seconds)
    table: Frame = compared.table
    for _, row in table.iterrows():
        if row["first"] == first and row["second"] in wanted:
            return row
    return None


def seeds_of(row: Frame) -> dict[int, float]:
    """Differences of single seeds of a row of the comparison."""
    names = [str(name) for name in row.index if str(name).startswith("seed_")]
    return {int(name[5:]): float(row[name]) for name in names if not math.isnan(float(row[name]))}


def each(analysis: str, of: Callable[[Result], Effect | None]) -> Measure:
    """An effect of the analysis of every seed's checkpoint."""

    def measure(run: Run, arm: str) -> Iterable[Measured]:
        for seed, result in run.of(analysis).get(arm, {}).items():
            found = of(result)
            if found is not None:
                yield Measured(seed, found)

    return measure


def summary(*path: str) -> Callable[[Result], Effect | None]:
    """A cell of a summary, by its path."""

    def of(result: Result) -> Effect | None:
        cell = _cell(result, path)
        return effect_of(cell) if isinstance(cell, dict) else None

    return of


def _cell(result: Result, path: Sequence[str]) -> object:
    """What a summary has at a path; None where that leads nowhere."""
    cell: object = result.summary
    for name in path:
        cell = cell.get(name) if isinstance(cell, dict) else None
    return cell


def size(of: Callable[[Result], Effect | None]) -> Callable[[Result], Effect | None]:
    """An effect without its sign."""

    def found(result: Result) -> Effect | None:
        with_sign = of(result)
        return None if with_sign is None else absolute(with_sign)

    return found


def absolute(found: Effect) -> Effect:
    """An effect without its sign; an interval about zero starts there."""
    low, high = sorted((abs(found.low), abs(found.high)))
    low = 0.0 if found.low <= 0 <= found.high else low
    return replace(found, value=abs(found.value), low=low, high=high)


def share_above_untrained(part: str) -> Callable[[Result], Effect | None]:
    """A share of the variance of gates minus that of the untrained model on the same tokens.

    The untrained share has no interval of its own and counts as exact.
    """

    def of(result: Result) -> Effect | None:
        found = summary("gates", "variance_share_intervals", part)(result)
        before = _cell(result, ("gates", "variance_shares_init", part))
        if found is None or not isinstance(before, int | float):
            return None
        ends = {name: getattr(found, name) - before for name in ("value", "low", "high")}
        return replace(found, **ends)

    return of


def closed_gates(result: Result) -> Effect | None:
    """Fraction of gates at exactly zero minus that of the untrained model."""
    return words.sparsity_effects(result.summary)


def largest_contrast(result: Result) -> Effect | None:
    """The largest contrast of categories in size, among those established after adjustment.

    Frequency and position are held fixed. Where none is established the largest is shown without
    an interval.
    """
    tables = [part.table for part in result.parts if part.name == "categories_contrasts"]
    if not tables:
        return None
    table: Frame = tables[0][tables[0]["kind"] == "gate"]
    table = table[table["delta_controlled"].notna()]
    if not len(table):
        return None
    chosen = table[table["p_controlled_adjusted"].astype(float) < ALPHA]
    rows = chosen if len(chosen) else table
    found = effect(rows.loc[rows["delta_controlled"].abs().idxmax()], "delta_controlled")
    if not len(chosen):
        return Effect(value=abs(found.value), flags="none_established")
    return absolute(found)


# -- what a verdict is read with -------------------------------------------------------------------


def note(text: str) -> Context:
    """The same of every run."""
    return lambda run, arm: Given(text)


def trained_and_untrained(trained: Sequence[str], untrained: Sequence[str]) -> Context:
    """A share in trained and in untrained models, from two cells of the summary of sparsity."""

    def given(run: Run, arm: str) -> Given | None:
        pairs = [
            (after, before)
            for result in run.of("sparsity").get(arm, {}).values()
            if isinstance(after := _cell(result, trained), int | float)
            and isinstance(before := _cell(result, untrained), int | float)
        ]
        if not pairs:
            return None
        after, before = (f"{tenths(sum(each) / len(each))} %" for each in zip(*pairs, strict=True))
        return Given(f"trained {after}, untrained {before}")

    return given


def signs(analysis: str, of: Callable[[Result], Effect | None]) -> Context:
    """In how many checkpoints a correlation is on which side of zero by its own interval."""

    def given(run: Run, arm: str) -> Given | None:
        found = [of(result) for result in run.of(analysis).get(arm, {}).values()]
        verdicts = [each.verdict for each in found if each is not None]
        parts = [
            f"{word} 0 in {verdicts.count(verdict)}"
            for verdict, word in (("positive", "above"), ("negative", "below"))
            if verdict in verdicts
        ]
        if not parts:
            return None
        where = f"{listed(parts)} of {count(len(found), 'checkpoint')}"
        return Given(f"the correlation itself is {where}, by intervals over documents")

    return given


# -- along training --------------------------------------------------------------------------------


class Gap(NamedTuple):
    """How a difference of two arms in logged validation loss moved, over their paired seeds."""

    early: Effect
    late: Effect
    change: Effect
    """The late one minus the early one; each with Student's interval over seeds."""
    changes: dict[int, float]
    """By seed."""
    after: float
    """Share of training that had passed at the early evaluation."""


def gap(run: Run, arm: str, reference: str) -> Gap | None:
    """The gap to a plain arm of another variant at the first evaluation at or after an eighth of
    training, and at the end; None without logged losses of both."""
    gaps = gaps_in_training(run, arm, reference)
    if not gaps:
        return None
    early = {seed: of[_early(of)] for seed, of in gaps.items()}
    late = {seed: of[max(of)] for seed, of in gaps.items()}
    changes = {seed: late[seed] - early[seed] for seed in gaps}
    after = max(_early(of) / max(of) for of in gaps.values())
    return Gap(_averaged(early), _averaged(late), _averaged(changes), changes, after)


def _averaged(values: Mapping[int, float]) -> Effect:
    return mean_over_seeds({seed: Effect(value=value) for seed, value in values.items()})


def _early(gap: Mapping[int, float]) -> int:
    return min(tokens for tokens in gap if tokens >= EARLY * max(gap))


def gap_change(reference: str) -> Measure:
    """How the gap of :func:`gap` changed, over seeds."""

    def measure(run: Run, arm: str) -> Iterable[Measured]:
        found = gap(run, arm, reference)
        if found is None:
            return
        few = not settles(len(found.changes))
        yield Measured(None, too_few(found.change) if few else found.change)
        for seed, value in found.changes.items():
            yield Measured(seed, Effect(value=value, covers="this seed"))

    return measure


def early_gain(reference: str) -> Context:
    """Where the gap started: a gain that is not there yet cannot shrink."""

    def given(run: Run, arm: str) -> Given | None:
        found = gap(run, arm, reference)
        if found is None:
            return None
        ends = [signed(end) for end in (found.early.value, found.early.low, found.early.high)]
        text = (
            f"at the first evaluation, after {percent(found.after)} of training, the gap is "
            f"{ends[0]} [{ends[1]}, {ends[2]}]"
        )
        if found.early.verdict == "negative":
            return Given(text)
        return Given(f"{text}: no gain is established there that could shrink", met=False)

    return given


def gaps_in_training(run: Run, arm: str, reference: str) -> dict[int, dict[int, float]]:
    """Seed -> tokens -> validation loss of an arm minus that of a plain arm of a variant."""
    logged = run.study.get("curves")
    others = plain_arms(run, reference)
    if logged is None or not others:
        return {}
    table: Frame = logged.table
    losses = {
        name: table[table["arm"] == name].set_index(["seed", "tokens"])["val_loss"]
        for name in (arm, others[0])
    }
    gaps: dict[int, dict[int, float]] = {}
    for (seed, tokens), value in (losses[arm] - losses[others[0]]).dropna().items():
        gaps.setdefault(int(seed), {})[int(tokens)] = float(value)
    return gaps


# -- cost ------------------------------------------------------------------------------------------


def speed_against(reference: str) -> Measure:
    """Training tokens a second over those of another variant, timed in the same rounds.

    Ends are quartiles over rounds (of two ratios to the transformer: the widest that theirs
    allow), widened by what the transformer differs from itself.
    """

    def measure(run: Run, arm: str) -> Iterable[Measured]:
        pair = _ratio(run, "speed_ratio", run.variant(arm), reference)
        if pair is None:
            return
        mine, theirs = pair
        low, high = noise(run)
        yield Measured(
            None,
            Effect(
                value=mine.value / theirs.value,
                low=mine.low / theirs.high * low,
                high=mine.high / theirs.low * high,
                covers=TIMING,
            ),
        )

    return measure


def memory_against(reference: str) -> Measure:
    """Bytes of activations kept for the backward pass over those of another variant."""

    def measure(run: Run, arm: str) -> Iterable[Measured]:
        pair = _ratio(run, "memory_ratio", run.variant(arm), reference)
        if pair is not None:
            ratio = pair[0].value / pair[1].value
            yield Measured(None, Effect(value=ratio, low=ratio, high=ratio, covers=COUNTED))

    return measure


def noise(run: Run) -> tuple[float, float]:
    """What the speed of the transformer over itself ranges over, 1 included."""
    for (variant, _), row in _timed(run).items():
        if variant.endswith("(again)"):
            found = effect(row, "speed_ratio")
            return min(1.0, found.low), max(1.0, found.high)
    return 1.0, 1.0


_ITSELF = Effect(value=1.0, low=1.0, high=1.0)


def _timed(run: Run) -> dict[tuple[str, str], Frame]:
    """Rows of the timing by variant and reference."""
    timed = run.study.get("bench")
    if timed is None:
        return {}
    return {(str(row["variant"]), str(row["reference"])): row for _, row in timed.table.iterrows()}


def _ratio(run: Run, stat: str, variant: str, reference: str) -> tuple[Effect, Effect] | None:
    """A ratio of a variant and of its reference over one third: over the reference, or over the
    transformer; None where neither was timed."""
    rows = _timed(run)
    if (variant, reference) in rows:
        return effect(rows[variant, reference], stat), _ITSELF
    pair = [rows.get((name, "transformer")) for name in (variant, reference)]
    if any(row is None for row in pair):
        return None
    mine, theirs = (effect(row, stat) for row in pair)
    return mine, theirs
