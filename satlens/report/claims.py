"""Which claims of the papers appear in a study: a table made of its tables, with verdicts.

A claim names the statistic that speaks about it here, the side on which it holds and how far from
zero it has to be. The verdict follows from intervals alone:

* ``appears``: every interval lies beyond the margin on the claimed side;
* ``does not appear``: every interval lies within the margin, or beyond it on the other side;
* ``undecided``: the data allow both, or there are too few seeds or documents for an interval;
* ``not measured``: the study has no such result.

Claims about architectures need the interval over seeds; claims about how a trained model uses its
access need it of every seed's checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import pandas as pd

from satlens.analysis.result import Result
from satlens.report import words
from satlens.report.collect import Run
from satlens.report.effects import (
    ALPHA,
    NATS,
    NOISE_FLOOR,
    Effect,
    Finding,
    Frame,
    count,
    effect,
    effect_of,
    interval,
    signed,
)

Verdict = Literal["appears", "does not appear", "undecided", "not measured"]
SATFORMER, RD_ATTNRES = "arXiv 2605.03953", "arXiv 2608.01075"
RESFORMER, ATTNRES = "arXiv 2410.17897", "arXiv 2603.15031"
MASS_AND_CAUSE = "arXiv 2606.13168"
SHARE_MARGIN = 0.01
"""Shares of variance below it are called negligible; the papers give no threshold."""
DIVERGENCE_MARGIN = 0.01
"""Nats: routes closer than this are called equal; the papers give no threshold."""
RANK_MARGIN = 0.5
"""Rank correlations above it are called agreement; the papers give no threshold."""


class Measured(NamedTuple):
    """One number that speaks about a claim."""

    seed: int | None
    """None for a number over all seeds."""
    effect: Effect


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper says and which statistic of ours speaks about it."""

    text: str
    source: str
    variant: str
    """Of the arm that it is about."""
    quantity: str
    """What is measured, with its unit."""
    measure: Callable[[Run, str], Iterable[Measured]]
    """Of a run and an arm."""
    side: Literal[-1, 1] = 1
    """Sign of the quantity where the claim holds."""
    margin: float = 0.0
    """How far beyond zero an interval has to lie."""

    @property
    def criterion(self) -> str:
        """The rule in words."""
        return f"interval {'above' if self.side > 0 else 'below'} {self.side * self.margin:g}"


def claims(run: Run) -> Result:
    """Every claim that the arms of a study can speak about, a row a claim and arm.

    Returns:
        ``claims`` with ``value, value_low, value_high``: over seeds for claims about losses, else
        of the seed nearest to none; ``lowest`` and ``highest`` over seeds; ``verdict``.
    """
    rows = [
        _row(claim, arm, list(claim.measure(run, arm)))
        for claim in CLAIMS
        for arm in run.arms
        if run.variant(arm) == claim.variant
    ]
    table = pd.DataFrame(rows, columns=list(_COLUMNS))
    return Result("claims", table, notes=list(_NOTES), keys=("n_seeds",))


_COLUMNS = (
    *("claim", "source", "arm", "quantity", "criterion", "covers", "verdict", "n_seeds"),
    *("value", "value_low", "value_high", "lowest", "highest"),
    *("n_documents", "n_tokens", "flags"),
)
_NOTES = (
    "The papers publish no thresholds: margins and the choice of statistics are ours.",
    "Of several checkpoints the weakest is shown, with lowest and highest estimate beside it; a "
    "claim appears only if it does in each of them.",
)


def _row(claim: Claim, arm: str, found: Sequence[Measured]) -> dict[str, object]:
    defined = [each for each in found if math.isfinite(each.effect.value)]
    row: dict[str, object] = {
        "claim": claim.text,
        "source": claim.source,
        "arm": arm,
        "quantity": claim.quantity,
        "criterion": claim.criterion,
        "verdict": verdict(claim, [each.effect for each in defined]),
        "covers": "",
        "n_seeds": len([each for each in defined if each.seed is not None]),
        "n_documents": 0,
        "n_tokens": 0,
        "flags": "",
    }
    values = [each.effect.value for each in defined]
    row |= {"lowest": min(values, default=math.nan), "highest": max(values, default=math.nan)}
    shown = _weakest(claim, [each.effect for each in defined if each.seed is None])
    shown = shown or _weakest(claim, [each.effect for each in defined])
    if shown is None:
        return row | dict.fromkeys(("value", "value_low", "value_high"), math.nan)
    return row | {
        "value": shown.value,
        "value_low": shown.low,
        "value_high": shown.high,
        "covers": shown.covers,
        "flags": shown.flags,
    }


def verdict(claim: Claim, effects: Sequence[Effect]) -> Verdict:
    """What the intervals of every checkpoint, or the one over seeds, allow to say."""
    if not effects:
        return "not measured"
    # The interval over seeds decides where there is one; single seeds are its points.
    over_seeds = [each for each in effects if each.covers == OVER_SEEDS]
    judged = over_seeds or effects
    if not all(each.has_interval and each.flags != TOO_FEW for each in judged):
        return "undecided"
    near = [min(claim.side * each.low, claim.side * each.high) for each in judged]
    far = [max(claim.side * each.low, claim.side * each.high) for each in judged]
    if all(end > claim.margin for end in near):
        return "appears"
    if all(end <= claim.margin for end in far):
        return "does not appear"
    return "undecided"


def _weakest(claim: Claim, effects: Sequence[Effect]) -> Effect | None:
    return min(effects, key=lambda each: claim.side * each.value, default=None)


# -- what is measured ------------------------------------------------------------------------------

OVER_SEEDS = "other seeds"
TOO_FEW = "too_few_seeds"


def _against(reference: str) -> Callable[[Run, str], Iterable[Measured]]:
    """Loss of an arm minus that of the arm of another variant, over paired seeds.

    Where the seeds are too few for a sign test to reach 0.05, the interval decides nothing.
    """

    def measure(run: Run, arm: str) -> Iterable[Measured]:
        compared = run.study.get("comparison")
        if compared is None:
            return
        table: Frame = compared.table
        for _, row in table.iterrows():
            if row["first"] != arm or run.variant(str(row["second"])) != reference:
                continue
            found = effect(row, "difference", covers=OVER_SEEDS)
            if float(row["sign_p_min"]) > ALPHA:
                found = replace(found, flags=TOO_FEW)
            yield Measured(None, found)
            for name in row.index:
                if str(name).startswith("seed_") and pd.notna(row[name]):
                    single = Effect(value=float(row[name]), covers="this seed")
                    yield Measured(int(str(name)[5:]), single)

    return measure


def _each(
    analysis: str, of: Callable[[Result], Effect | None]
) -> Callable[[Run, str], Iterable[Measured]]:
    """An effect of the analysis of every seed's checkpoint."""

    def measure(run: Run, arm: str) -> Iterable[Measured]:
        for seed, result in run.of(analysis).get(arm, {}).items():
            found = of(result)
            if found is not None:
                yield Measured(seed, found)

    return measure


def _largest_contrast(result: Result) -> Effect | None:
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


def _summary(*path: str) -> Callable[[Result], Effect | None]:
    def of(result: Result) -> Effect | None:
        cell: object = result.summary
        for name in path:
            cell = cell.get(name) if isinstance(cell, dict) else None
        return effect_of(cell) if isinstance(cell, dict) else None

    return of


def _disagreement(kind: str) -> Callable[[Result], Effect | None]:
    """How far the rank correlation of mass and cost stays below agreement."""

    def of(result: Result) -> Effect | None:
        found = _summary("by_kind", kind, "mass_dnll")(result)
        if found is None:
            return None
        low, high = (RANK_MARGIN - end for end in (found.high, found.low))
        return Effect(value=RANK_MARGIN - found.value, low=low, high=high, flags=found.flags)

    return of


def _zeros(result: Result) -> Effect | None:
    return words.sparsity_effects(result.summary)


CLAIMS = (
    Claim(
        text="static value residuals lower the loss of a Transformer",
        source=RESFORMER,
        variant="resformer",
        quantity=f"loss difference, {NATS}",
        measure=_against("transformer"),
        side=-1,
        margin=NOISE_FLOOR,
    ),
    Claim(
        text="gated access to V_1 lowers the loss of a Transformer",
        source=SATFORMER,
        variant="satformer",
        quantity=f"loss difference, {NATS}",
        measure=_against("transformer"),
        side=-1,
        margin=NOISE_FLOOR,
    ),
    Claim(
        text="gated access ends below static value residuals",
        source=SATFORMER,
        variant="satformer",
        quantity=f"loss difference, {NATS}",
        measure=_against("resformer"),
        side=-1,
        margin=NOISE_FLOOR,
    ),
    Claim(
        text="access is sparse: training closes gates",
        source=SATFORMER,
        variant="satformer",
        quantity="zero fraction minus the untrained model's",
        measure=_each("sparsity", _zeros),
    ),
    Claim(
        text="access depends on depth",
        source=SATFORMER,
        variant="satformer",
        quantity="share of the variance of gates between layers",
        measure=_each("sparsity", _summary("gates", "variance_share_intervals", "layers")),
        margin=SHARE_MARGIN,
    ),
    Claim(
        text="access is specific to heads",
        source=SATFORMER,
        variant="satformer",
        quantity="share of the variance of gates between the heads of a layer",
        measure=_each("sparsity", _summary("gates", "variance_share_intervals", "heads")),
        margin=SHARE_MARGIN,
    ),
    Claim(
        text="access depends on the category of a token",
        source=SATFORMER,
        variant="satformer",
        quantity="largest contrast of semantic and functional tokens, frequency and position fixed",
        measure=_each("categories", _largest_contrast),
    ),
    Claim(
        text="the trained model relies on its gates",
        source=SATFORMER,
        variant="satformer",
        quantity=f"cost of closing every gate, {NATS}",
        measure=_each("ablation", _summary("overall", "gate.zero")),
    ),
    Claim(
        text="which tokens open a gate matters, not only how far it opens",
        source=SATFORMER,
        variant="satformer",
        quantity=f"cost of each head's mean gate, {NATS}",
        measure=_each("ablation", _summary("overall", "gate.mean")),
    ),
    Claim(
        text="a learned mixture over depth lowers the loss of a Transformer",
        source=ATTNRES,
        variant="attnres",
        quantity=f"loss difference, {NATS}",
        measure=_against("transformer"),
        side=-1,
        margin=NOISE_FLOOR,
    ),
    Claim(
        text="routes of their own for values end below a shared route",
        source=RD_ATTNRES,
        variant="rd-attnres",
        quantity=f"loss difference, {NATS}",
        measure=_against("attnres"),
        side=-1,
        margin=NOISE_FLOOR,
    ),
    Claim(
        text="values are read from elsewhere than queries and keys",
        source=RD_ATTNRES,
        variant="rd-attnres",
        quantity="Jensen-Shannon divergence of the two routes, nats a token",
        measure=_each("divergence", _summary("js_token")),
        margin=DIVERGENCE_MARGIN,
    ),
    Claim(
        text="the trained model relies on the separate value route",
        source=RD_ATTNRES,
        variant="rd-attnres",
        quantity=f"cost of reading values by the other route, {NATS}",
        measure=_each("ablation", _summary("overall", "route.tie_v")),
    ),
    *(
        Claim(
            text="the weight that a source carries does not tell what removing it costs",
            source=MASS_AND_CAUSE,
            variant=variant,
            quantity=f"{RANK_MARGIN:g} minus the rank correlation of mass and cost",
            measure=_each("attribution", _disagreement(kind)),
        )
        for variant, kind in (("satformer", "gate"), ("attnres", "route"), ("rd-attnres", "route"))
    ),
)


# -- in words --------------------------------------------------------------------------------------


def sentences(result: Result) -> list[Finding]:
    """A sentence a claim: its verdict, the number and what the interval covers."""
    table: Frame = result.table
    return [_sentence(row) for _, row in table.iterrows()]


def _sentence(row: Frame) -> Finding:
    text = f"{row['arm']}: {row['claim']} ({row['source']})"
    if row["verdict"] == "not measured":
        return Finding(f"Not measured here: {text}.", "missing")
    found = effect(row, "value", covers=str(row["covers"]))
    number = f"{row['quantity']} {signed(found.value)}, {interval(found)}"
    seeds = count(int(row["n_seeds"]), "seed")
    said = {"appears": "Appears", "does not appear": "Does not appear", "undecided": "Undecided"}
    kind = "open" if row["verdict"] == "undecided" else "found"
    return Finding(f"{said[str(row['verdict'])]}: {text}. {number} ({seeds}).", kind)
