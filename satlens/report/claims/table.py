"""Which claims of the papers hold in a study: a table made of its tables, with verdicts.

The claims are in :mod:`satlens.report.claims.claimed`, the rules of the verdicts in
:mod:`satlens.report.claims.verdicts`, the papers' own numbers in
:mod:`satlens.report.claims.published`.
"""

from __future__ import annotations

import math

import pandas as pd

from satlens.analysis.result import Result
from satlens.analysis.stats import OTHER_DOCUMENTS
from satlens.report.claims import measures as of
from satlens.report.claims.claimed import CLAIMS
from satlens.report.claims.verdicts import OVER_SEEDS, Claim, beside_published, judge
from satlens.report.collect import Run
from satlens.report.effects import Finding, Frame, count, effect, listed

NOT_RUN = "not run"
SHORT = {
    OVER_SEEDS: "over seeds",
    OTHER_DOCUMENTS: "over documents",
    of.TIMING: "over rounds of timing",
}
"""What an interval covers, in a few words."""
COLUMNS = (
    *("claim", "source", "published", "scale_there", "arm", "quantity", "criterion"),
    *("value", "value_low", "value_high", "covers", "lowest", "highest", "n_seeds"),
    *("verdict", "reason", "context", "beside_published", "n_documents", "n_tokens", "flags"),
)
NOTES = (
    "The papers publish no thresholds: margins and the choice of statistics are ours.",
    "A claim about checkpoints holds only if it does in each of them. Of six seeds and more their "
    "mean is shown with Student's interval over seeds, of fewer the checkpoint whose interval "
    "comes nearest to another verdict.",
)


def claims(run: Run) -> Result:
    """Every claim that the arms of a study can speak about, a row a claim and arm.

    Returns:
        ``claims``: what is claimed and published, ``value, value_low, value_high`` with what the
        interval ``covers``, ``lowest`` and ``highest`` of single seeds, ``verdict``, ``reason`` and
        ``context``, what the verdict has to be read with.
    """
    rows = [
        claim_row(claim, run, arm) for claim in CLAIMS for arm in of.plain_arms(run, claim.variant)
    ]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return Result("claims", table, notes=list(NOTES), keys=("n_seeds",))


def claim_row(claim: Claim, run: Run | None, arm: str) -> dict[str, object]:
    """A claim beside what one arm of a study says about it; beside nothing without a study."""
    measured = [] if run is None or claim.measure is None else list(claim.measure(run, arm))
    given = None if run is None or claim.context is None else claim.context(run, arm)
    judged = judge(claim, measured, given)
    shown = judged.shown
    return {
        "claim": claim.text,
        "source": claim.paper.source,
        "published": claim.published.text,
        "scale_there": claim.published.scale,
        "arm": arm,
        "quantity": claim.quantity,
        "criterion": claim.criterion if claim.measure is not None else "",
        "value": math.nan if shown is None else shown.value,
        "value_low": math.nan if shown is None else shown.low,
        "value_high": math.nan if shown is None else shown.high,
        "covers": "" if shown is None else shown.covers,
        "lowest": judged.lowest,
        "highest": judged.highest,
        "n_seeds": judged.n_seeds,
        "verdict": judged.verdict,
        "reason": judged.reason or _absent(claim, run, arm),
        "context": judged.context,
        "beside_published": beside_published(claim, shown),
        "n_documents": 0,
        "n_tokens": 0,
        "flags": "" if shown is None else shown.flags,
    }


def _absent(claim: Claim, run: Run | None, arm: str) -> str:
    """Why there is no number."""
    if claim.measure is None:
        return claim.needs
    if run is None:
        return f"no study has an arm {claim.variant}"
    planned = {
        missing.reason
        for missing in run.missing
        if missing.name == claim.needs and missing.arm in (arm, None)
    }
    return listed(sorted(planned)) or f"the study has no {claim.needs} that speaks about it"


# -- in words --------------------------------------------------------------------------------------


def sentences(result: Result) -> list[Finding]:
    """A sentence a claim: its verdict, the number and what the interval covers."""
    table: Frame = result.table
    return [_sentence(row) for _, row in table.iterrows()]


def number(row: Frame) -> str:
    """The number of a row of the table, written as its claim is."""
    claim = find(row)
    return claim.number(float(row["value"]))


def ends(row: Frame) -> str:
    """``[0.1, 0.2]`` and what it covers, or that there is none."""
    found = effect(row, "value", covers=str(row["covers"]))
    if found.covers == of.COUNTED:
        return of.COUNTED
    if not found.has_interval:
        return "no interval"
    claim = find(row)
    low, high = (claim.number(end) for end in (found.low, found.high))
    return f"[{low}, {high}] {SHORT.get(found.covers, found.covers)}"


def why(row: Frame) -> str:
    """The reason of a row with what it has to be read with."""
    return "; ".join(part for part in (row["reason"], row["context"]) if part)


def find(row: Frame) -> Claim:
    """The claim that a row is about."""
    for claim in CLAIMS:
        same = (claim.text, claim.paper.source, claim.quantity)
        if same == (row["claim"], row["source"], row["quantity"]):
            return claim
    raise ValueError(f"{row['claim']}: no such claim")


def _sentence(row: Frame) -> Finding:
    text = f"{row['arm']}: {row['claim']} ({row['source']})"
    if row["verdict"] == NOT_RUN:
        return Finding(f"Not run: {text}; {row['reason']}.", "missing")
    seeds = f" ({count(int(row['n_seeds']), 'seed')})" if row["n_seeds"] else ""
    said = {
        "holds here": "Holds here",
        "does not hold here": "Does not hold here",
        "undecided": "Undecided",
    }[str(row["verdict"])]
    kind = "open" if row["verdict"] == "undecided" else "found"
    text = f"{said}: {text}. {row['quantity']} {number(row)}, {ends(row)}{seeds}: {why(row)}."
    return Finding(text, kind)
