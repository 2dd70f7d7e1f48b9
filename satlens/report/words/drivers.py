"""Sentences about what predicts a gate or a route's weight of the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from satlens.report.effects import Effect, Finding, effect_of, interval, listed, plain

_VALUES = {"gate": "gates", "route": "the weight of the embedding"}
_NAMES = {"token": "the token", "previous_token": "the token before it", "all": "all together"}


def drivers(summary: Mapping[str, Any], who: str = "model") -> list[Finding]:
    """Shares of variance over tokens explained out of sample, by driver; ``summary`` is that of
    the categories analysis."""
    facts = summary.get("drivers") or {}
    findings = []
    for kind, pooled in (facts.get("pooled") or {}).items():
        effects = {name: effect_of(cell) for name, cell in pooled.items()}
        findings.append(_explained(effects, _VALUES[kind], who, str(facts.get("fitted_on", ""))))
    return findings


def _explained(effects: Mapping[str, Effect], values: str, who: str, fitted_on: str) -> Finding:
    defined = {name: found for name, found in effects.items() if found.verdict != "undefined"}
    if not defined:
        return Finding(f"{who}: {values} do not vary over tokens, so nothing drives them.", "open")
    each = [
        f"{_NAMES.get(name, name)} {plain(found.value, 2)} ({interval(found, 2)})"
        for name, found in defined.items()
    ]
    known = any(found.verdict == "positive" for found in defined.values())
    text = (
        f"{who}: of the variance of {values} over tokens, fitted on {fitted_on} and scored on the "
        f"measured documents, this share is predicted by {listed(each)}."
    )
    return Finding(text, "found" if known else "open")
