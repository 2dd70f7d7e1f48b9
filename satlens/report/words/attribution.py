"""Sentences about mass versus cause: does the weight that a unit carries tell what it is for?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from satlens.report.effects import (
    NATS,
    Finding,
    Frame,
    count,
    effect,
    effect_of,
    interval,
    listed,
    plain,
    signed,
)

_UNITS = {"gate": "gate", "route": "route and source"}
_UNIT_PLURALS = {"gate": "gates", "route": "pairs of a route and a source"}
_SHOWN = 3


def attribution(table: Frame, summary: Mapping[str, Any], who: str = "model") -> list[Finding]:
    """Rank correlations of mass, screens and exact cost; the units that disagree."""
    findings = []
    for kind, facts in (summary.get("by_kind") or {}).items():
        rows = table[table["kind"] == kind]
        findings += [_correlation(facts, kind, who), _screens(facts), _disagreeing(rows, facts)]
    return [finding for finding in findings if finding is not None]


def _correlation(facts: Mapping[str, Any], kind: str, who: str) -> Finding:
    units = count(int(facts["n_removed"]), _UNITS[kind], _UNIT_PLURALS[kind])
    if "mass_dnll" not in facts:
        return Finding(f"{who}: no {_UNITS[kind]} was removed, so masses stand alone.", "missing")
    found = effect_of(facts["mass_dnll"])
    number = f"rank correlation {signed(found.value, 2)} over {units}, {interval(found, 2)}"
    match found.verdict:
        case "positive":
            return Finding(f"{who}: what carries more weight costs more to remove: {number}.")
        case "negative":
            return Finding(f"{who}: what carries more weight costs less to remove: {number}.")
        case _:
            text = f"{who}: weight is not shown to go with the cost of removing it: {number}."
            return Finding(text, "open")


def _screens(facts: Mapping[str, Any]) -> Finding | None:
    """How well one backward pass ranks what exact removal costs."""
    if "attribution_dnll" not in facts:
        return None
    first, second = (effect_of(facts[f"{name}_dnll"]) for name in ("attribution", "fisher"))
    text = (
        "Predicted from one backward pass, exact cost has the rank correlation "
        f"{signed(first.value, 2)} to first order, {interval(first, 2)}, and "
        f"{signed(second.value, 2)} to second, {interval(second, 2)}"
    )
    top = (facts.get("deciles") or {}).get("highest") or {}
    if top.get("n") and top.get("dnll") is not None:
        text += (
            f"; where second order puts the most it predicts {signed(float(top['fisher']))} {NATS} "
            f"and removal costs {signed(float(top['dnll']))}"
        )
    return Finding(f"{text}.", "found" if second.verdict in ("positive", "negative") else "open")


def _disagreeing(rows: Frame, facts: Mapping[str, Any]) -> Finding | None:
    n = int(facts.get("n_disagree", 0))
    if not n:
        return None
    chosen = rows[rows["flags"].str.split(";").map(lambda flags: "disagrees" in flags)]
    order = chosen["rank_difference"].abs().sort_values(ascending=False).index[:_SHOWN]
    named = [_unit(chosen.loc[index]) for index in order]
    more = f" and {n - len(named)} more" if n > len(named) else ""
    return Finding(
        f"Weight and cost are at least half of the ranks apart at {listed(named)}{more}."
    )


def _unit(row: Frame) -> str:
    place = str(row["site"])
    place += f" head {int(row['head'])}" if row["kind"] == "gate" else f" {row['source']}"
    cost = effect(row, "dnll")
    return f"{place} (weight {plain(float(row['mass']), 2)}, cost {signed(cost.value)})"
