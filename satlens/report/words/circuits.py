"""Sentences about what V_1 carries: its share of what heads say, copying, induction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from satlens.report.effects import (
    NATS,
    Effect,
    Finding,
    Frame,
    effect,
    effect_of,
    interval,
    interval_percent,
    percent,
    plain,
    signed,
    tenths,
)

_PATTERNS = {"induction": "induction", "previous_token": "attention to the previous token"}


def circuits(table: Frame, summary: Mapping[str, Any], who: str = "model") -> list[Finding]:
    """Direct attribution of the V_1 parts, copying of their circuits, patterns without gates."""
    return [
        _said(summary, who),
        *_largest(table),
        *_copying(summary),
        *(_pattern(table, name, what) for name, what in _PATTERNS.items()),
        _repetition(summary),
    ]


def _said(summary: Mapping[str, Any], who: str) -> Finding:
    share = effect_of(summary.get("share"))
    logit = effect_of((summary.get("logit") or {}).get("v_first"))
    text = (
        f"{who}: V_1 has {tenths(share.value)} % of what heads say directly about the next token "
        f"by size ({interval_percent(share)}), and adds {signed(logit.value)} to its logit, "
        f"{interval(logit)}"
    )
    return Finding(f"{text}.", _kind(logit))


def _largest(table: Frame) -> list[Finding]:
    defined = table[table["dla_v_first"].notna()]
    if not len(defined):
        return []
    row = defined.loc[defined["dla_v_first"].abs().idxmax()]
    found = effect(row, "dla_v_first")
    return [
        Finding(
            f"Largest at L{int(row['layer'])} head {int(row['head'])}: {signed(found.value)}, "
            f"{interval(found)}.",
            _kind(found),
        )
    ]


def _copying(summary: Mapping[str, Any]) -> list[Finding]:
    if summary.get("copying") is None:
        return []
    eigenvalues = float(summary.get("copying_eigenvalues") or 0.0)
    return [
        Finding(
            f"From weights alone, a token's V_1 raises its own logit the most for "
            f"{percent(float(summary['copying']))} of the tokens of a mean circuit; the mean "
            f"eigenvalue score is {signed(eigenvalues, 2)} (1: all copying, -1: all its opposite)."
        )
    ]


def _pattern(table: Frame, name: str, what: str) -> Finding:
    row = table.loc[table[name].idxmax()]
    place = f"L{int(row['layer'])} head {int(row['head'])}"
    on, change = effect(row, name), effect(row, f"{name}_gate_effect")
    text = f"Most {what}: {place}, {plain(on.value, 2)} of its attention"
    if change.value == 0:
        return Finding(f"{text}; gates do not change it.")
    says = {"positive": "gates add", "negative": "gates take", "null": "gates are not shown to add"}
    verb = says.get(change.verdict, "gates add")
    size = change.value if change.verdict != "negative" else -change.value
    return Finding(f"{text}, to which {verb} {signed(size)} ({interval(change)}).", _kind(change))


def _repetition(summary: Mapping[str, Any]) -> Finding:
    facts = summary.get("repetition") or {}
    found = effect_of(facts.get("nll_gate_effect"))
    text = (
        "On random tokens that repeat, open gates change the loss of the repetition by "
        f"{signed(found.value)} {NATS}, {interval(found)} over other sequences."
    )
    return Finding(text, _kind(found))


def _kind(found: Effect) -> Any:
    return "found" if found.verdict in ("positive", "negative") else "open"
