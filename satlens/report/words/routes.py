"""Sentences about effective routes: of what reads consist, beside the untrained model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from satlens.report.effects import (
    Effect,
    Finding,
    Frame,
    count,
    effect,
    effect_of,
    interval,
    interval_percent,
    plain,
    tenths,
)


def routes(table: Frame, summary: Mapping[str, Any], who: str = "model") -> list[Finding]:
    """How many components a read has by size, which ones, how many with a negative sign, and that
    they add up.

    Args:
        table: of the result ``routes``: a row a (read, component).
    """
    if not summary.get("overall"):
        return [Finding(f"{who}: the summary lacks the numbers over all reads.", "missing")]
    findings = [_spread(summary, who), _embedding(summary), _largest(table), _negative(summary)]
    findings += [_coefficients(table, summary), _identity(summary)]
    if summary.get("n_undefined"):
        n = count(int(summary["n_undefined"]), "token-read pair")
        findings.append(Finding(f"{n} had no defined coefficients; they are left out.", "open"))
    return [finding for finding in findings if finding is not None]


def _overall(summary: Mapping[str, Any], name: str) -> tuple[Effect, float | None]:
    """A statistic over all reads of several components, and that of the untrained model."""
    before = (summary.get("overall_init") or {}).get(name)
    return effect_of(summary["overall"].get(name)), before


def _spread(summary: Mapping[str, Any], who: str) -> Finding | None:
    found, before = _overall(summary, "effective_components")
    if found.verdict == "undefined":
        return None
    text = (
        f"{who}: by the norms of what components bring, a read consists of {plain(found.value, 1)} "
        f"effective components, {interval(found, 1, sign=False)}"
    )
    if before is None:
        return Finding(f"{text}; the untrained model was not measured.")
    if not found.has_interval:
        return Finding(f"{text} (untrained: {plain(before, 1)}).", "open")
    if found.low <= before <= found.high:
        text += f"; the untrained model has {plain(before, 1)}: no change is established."
        return Finding(text, "open")
    change = "fewer" if found.value < before else "more"
    return Finding(f"{text}: {change} than the untrained model's {plain(before, 1)}.")


def _embedding(summary: Mapping[str, Any]) -> Finding | None:
    found, before = _overall(summary, "embedding_share")
    if found.verdict == "undefined":
        return None
    text = f"The embedding is {tenths(found.value)} % of their size, {interval_percent(found)}"
    text += f" (untrained: {tenths(before)} %)" if before is not None else ""
    return Finding(text + ".")


def _largest(table: Frame) -> Finding | None:
    """The sublayer that brings the largest share to a read of at least three components."""
    n = table.groupby("site")["component_index"].transform("max") + 1
    rows = table[(n > 2) & (table["component_index"] > 0) & table["share"].notna()]
    if not len(rows):
        return None
    row = rows.loc[rows["share"].idxmax()]
    found = effect(row, "share")
    return Finding(
        f"The largest share of one sublayer is that of {row['component']} in {row['site']}: "
        f"{tenths(found.value)} %, {interval_percent(found)}."
    )


def _negative(summary: Mapping[str, Any]) -> Finding | None:
    mean = " (its mean over channels)" if summary.get("per_channel") else ""
    if not summary.get("signed"):
        return Finding(f"No coefficient{mean} is negative: no component is subtracted.")
    found, _ = _overall(summary, "negative_share")
    return Finding(
        f"Components with a negative coefficient{mean} are {tenths(found.value)} % of their size, "
        f"{interval_percent(found)}."
    )


def _coefficients(table: Frame, summary: Mapping[str, Any]) -> Finding | None:
    """What coefficients depend on."""
    if summary.get("static"):
        return Finding("Coefficients are the same for every token; shares vary with the sizes.")
    if summary.get("per_channel"):
        return Finding(
            "Norms act inside the reads, so coefficients differ between channels: the table has "
            "their means, and shares come from all of them."
        )
    moving = table[table["token_variance"] > 0]
    if not len(moving):
        return None
    row = moving.loc[moving["token_variance"].idxmax()]
    deviation = float(row["token_variance"]) ** 0.5
    return Finding(
        f"The coefficient that varies most between tokens is that of {row['component']} in "
        f"{row['site']}: mean {plain(float(row['coefficient']), 2)}, standard deviation "
        f"{plain(deviation, 2)}."
    )


def _identity(summary: Mapping[str, Any]) -> Finding | None:
    error = (summary.get("identity") or {}).get("max_error")
    if error is None:
        return None
    return Finding(
        f"On these tokens the components add up to every read within {error:.0e} of its size."
    )
