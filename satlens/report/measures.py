"""The numbers of a run that speak about claims: a function a kind, over seeds or by checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from satlens.analysis.result import Result
from satlens.analysis.stats import student_interval
from satlens.report import words
from satlens.report.collect import Run
from satlens.report.effects import ALPHA, Effect, Frame, effect, effect_of
from satlens.report.verdicts import OVER_SEEDS, Measure, Measured, too_few

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
        yield Measured(None, too_few(found) if float(row["sign_p_min"]) > ALPHA else found)
        for seed, value in seeds_of(row).items():
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
        cell: object = result.summary
        for name in path:
            cell = cell.get(name) if isinstance(cell, dict) else None
        return effect_of(cell) if isinstance(cell, dict) else None

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
    low, high = sorted((abs(found.low), abs(found.high)))
    return Effect(value=abs(found.value), low=low, high=high)


# -- along training --------------------------------------------------------------------------------


def gap_change(reference: str) -> Measure:
    """Loss gap at the end minus the gap at the first evaluation after an eighth of training.

    From the logged validation losses, over paired seeds, with Student's interval.
    """

    def measure(run: Run, arm: str) -> Iterable[Measured]:
        gaps = gaps_in_training(run, arm, reference)
        if not gaps:
            return
        changes = {seed: gap[max(gap)] - gap[early_in(gap)] for seed, gap in gaps.items()}
        t = student_interval(np.array(list(changes.values())))
        found = Effect(
            value=float(t.estimate), low=float(t.low), high=float(t.high), covers=OVER_SEEDS
        )
        yield Measured(None, too_few(found) if 2.0 ** (1 - len(gaps)) > ALPHA else found)
        for seed, value in changes.items():
            yield Measured(seed, Effect(value=value, covers="this seed"))

    return measure


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


def early_in(gap: dict[int, float]) -> int:
    """The first evaluation at or after an eighth of training, in tokens."""
    return min(tokens for tokens in gap if tokens >= EARLY * max(gap))


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
