"""Sentences about how far two routes over the same sources differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from satlens.report.effects import (
    Effect,
    Finding,
    Frame,
    by_seed,
    count,
    effect,
    effect_of,
    interval,
    listed,
    percent,
    plain,
)
from satlens.report.words.seeds import in_each


def divergence(table: Frame, summary: Mapping[str, Any], who: str = "model") -> list[Finding]:
    """Mean divergence beside the untrained model, both aggregations, and the layers at the ends."""
    several = table[table["n_sources"] > 1]
    if not len(several):
        return [
            Finding(f"{who}: every read has one source, so there is nothing to differ.", "open")
        ]
    unit = _unit(summary)
    token, mean = (effect_of(summary.get(name)) for name in ("js_token", "js_mean"))
    of = f"of at most {bound(summary)}"
    findings = [_overall(token, _untrained(several), f"{who}: {_subject(table)}", unit, of)]
    if math.isfinite(token.value) and token.value > 0 and math.isfinite(mean.value):
        findings.append(
            Finding(
                f"Routes averaged over tokens first diverge by {plain(mean.value)} {unit}, "
                f"{interval(mean, sign=False)}: {percent(mean.value / token.value)} of the "
                "divergence per token. The "
                "rest differs from token to token and cancels in the mean."
            )
        )
    findings += [*_layers(several, unit), *_rectified(table)]
    undefined = int(table["n_undefined"].sum()) if "n_undefined" in table else 0
    if undefined:
        findings.append(
            Finding(f"{count(undefined, 'token-read pair')} had no defined divergence.", "open")
        )
    return findings


def divergence_across(
    arm: str, results: Mapping[int, tuple[Frame, Mapping[str, Any]]]
) -> list[Finding]:
    """Whether the routes differ in every seed; ``results`` is seed -> (table, summary)."""
    effects, said = [], []
    what = "the routes of one read"
    for seed, (table, summary) in results.items():
        what = "reads, by their components," if _is_of_components(table) else what
        token = effect_of(summary.get("js_token"))
        untrained = _untrained(table[table["n_sources"] > 1])
        effects.append(token.has_interval and token.low > (untrained if untrained > 0 else 0.0))
        size = f"{plain(token.value)} {_unit(summary)} ({interval(token, sign=False)})"
        said.append(by_seed(seed) + size)
    if not effects:
        return []
    text = f"mean JS divergence a token, {'; '.join(said)}."
    if all(effects):
        return [Finding(f"{arm}: {what} differ {in_each(results)}: {text}")]
    n = sum(effects)
    return [Finding(f"{arm}: {what} differ in {n} of {len(effects)} seeds: {text}", "open")]


def bound(summary: Mapping[str, Any]) -> str:
    """The largest divergence there is, as ``0.693 nats``."""
    return f"{plain(_ceiling(summary))} {_unit(summary)}"


def _subject(table: Frame) -> str:
    """What is compared: ``the qk and v routes``, or each read with another."""
    if _is_of_components(table):
        return "reads of one layer and of consecutive layers, by their components,"
    roles = [str(role).split("|") for role in dict.fromkeys(table["role"])]
    names = list(dict.fromkeys(name for pair in roles for name in pair))
    pairs = "routes of each two" if len(roles) > 1 and len(names) > 2 else "routes"
    return f"the {listed(names)} {pairs}"


def _is_of_components(table: Frame) -> bool:
    """Whether reads were compared by their effective routes."""
    return bool(table["site"].astype(str).str.contains(".read", regex=False).any())


def _rectified(table: Frame) -> list[Finding]:
    if not table["flags"].fillna("").str.contains("norm_rectified").any():
        return []
    if _is_of_components(table):
        return [
            Finding(
                "Reads are compared by how much each component brings, by its norm, whatever its "
                "sign."
            )
        ]
    return [
        Finding(
            "Signed weights are no distribution: what is compared is how much each source brings, "
            "by the size of weight times source, whatever its sign."
        )
    ]


def _unit(summary: Mapping[str, Any]) -> str:
    return str(summary.get("unit", "nats"))


def _ceiling(summary: Mapping[str, Any]) -> float:
    """The largest divergence in the unit of the summary."""
    return float(summary.get("ceiling", math.log(2)))


def _untrained(table: Frame) -> float:
    return float(table["js_token_init"].mean()) if "js_token_init" in table else math.nan


def _overall(token: Effect, untrained: float, subject: str, unit: str, of: str) -> Finding:
    beside = f" (untrained: {plain(untrained)})" if math.isfinite(untrained) else ""
    if not math.isfinite(token.value):
        return Finding(f"{subject}: the divergence is not defined.", "open")
    number = f"{plain(token.value)} {unit} a token, {interval(token, sign=False)}{beside}"
    floor = 0.0 if not math.isfinite(untrained) else untrained
    if not token.has_interval:
        return Finding(f"{subject} diverge by {number}: nothing is established.", "open")
    if token.low <= floor:
        return Finding(f"{subject} are not told apart: mean JS divergence {number}.", "open")
    return Finding(f"{subject} differ: mean JS divergence {number}, {of}.")


def _layers(several: Frame, unit: str) -> list[Finding]:
    defined = several[several["js_token"].notna()]
    if len(defined) < 2:
        return []
    most, least = (
        defined.loc[i] for i in (defined["js_token"].idxmax(), defined["js_token"].idxmin())
    )
    top, bottom = effect(most, "js_token"), effect(least, "js_token")
    apart = bottom.has_interval and top.has_interval and bottom.high < top.low
    several_pairs = several["comparison"].nunique() > 1
    places = [
        f"{row['site']} ({row['comparison']})" if several_pairs else row["site"]
        for row in (most, least)
    ]
    text = (
        f"Largest at {places[0]}: {plain(top.value)} {unit}, {interval(top, sign=False)}; "
        f"smallest at {places[1]}: {plain(bottom.value)}, {interval(bottom, sign=False)}."
    )
    if not apart:
        return [Finding(f"{text} The intervals overlap: no layer stands out.", "open")]
    return [Finding(text)]
