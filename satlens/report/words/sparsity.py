"""Sentences about gates and routes beside the untrained model."""

from __future__ import annotations

import math
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
    interval_points,
    percent,
    plain,
    points,
    tenths,
)


def sparsity(table: Frame, summary: Mapping[str, Any], who: str = "model") -> list[Finding]:
    """Gates: zeros, dead heads, size, what varies. Routes: spread, embedding, roles."""
    findings = []
    gates, routes = summary.get("gates"), summary.get("routes")
    if gates:
        rows = table[table["kind"] == "gate"]
        if not rows["mean"].notna().any():
            findings.append(Finding(f"{who}: the table has no mean of any gate.", "missing"))
        elif gates.get("static"):
            findings += _static(rows, who)
        else:
            findings += (
                _gates(rows, gates, who) if gates.get("overall") else [_lacking("gates", who)]
            )
    if routes:
        rows = table[table["kind"] == "route"]
        findings += (
            _routes(rows, routes, who) if routes.get("overall") else [_lacking("routes", who)]
        )
    return findings


def _lacking(kind: str, who: str) -> Finding:
    return Finding(f"{who}: the summary lacks the numbers over all {kind}.", "missing")


def sparsity_effects(summary: Mapping[str, Any]) -> Effect | None:
    """Zero fraction minus the untrained model's, paired by document; None without per-token gates
    or without the untrained model."""
    gates = summary.get("gates") or {}
    change = gates.get("zero_fraction_change")
    if gates.get("static") or change is None:
        return None
    return effect_of(change)


# -- gates -----------------------------------------------------------------------------------------


def _gates(rows: Frame, gates: Mapping[str, Any], who: str) -> list[Finding]:
    findings = [_zeros(gates, who), _dead(gates)]
    findings += [_size(rows, gates), _variance(gates)]
    return [finding for finding in findings if finding is not None]


def _zeros(gates: Mapping[str, Any], who: str) -> Finding:
    zero = effect_of(gates["overall"]["zero_fraction"])
    share = f"{tenths(zero.value)} % of cases, {interval_percent(zero)}"
    text = f"{who}: gates are exactly zero in {share}"
    change = sparsity_effects({"gates": gates})
    if change is None:
        return Finding(
            f"{text}; the untrained model was not measured, so this says little.", "open"
        )
    before = f"{tenths(gates['overall_init']['zero_fraction'])} %"
    by = f"the untrained model ({before}) by {points(abs(change.value))}, {interval_points(change)}"
    if change.verdict == "positive":
        return Finding(f"{text}: sparser than {by}.")
    if change.verdict == "negative":
        return Finding(f"{text}: less sparse than {by}.")
    text += f"; the untrained model has {before}, so training is not shown to have changed it"
    return Finding(f"{text}: {points(change.value)}, {interval_points(change)}.", "open")


def _dead(gates: Mapping[str, Any]) -> Finding:
    n, dead = int(gates["n_heads"]), int(gates["n_dead"])
    if not dead:
        return Finding(
            f"None of {count(n, 'head')} is dead: the zeros are closed gates of live heads."
        )
    share = gates.get("share_of_zeros_in_dead_heads")
    places = ", ".join(f"L{layer} head {head}" for layer, head in gates["dead_heads"][:8])
    verb, hold = ("opens", "holds") if dead == 1 else ("open", "hold")
    holds = f" and {hold} {percent(float(share))} of all zeros" if share is not None else ""
    before = gates.get("n_dead_init")
    untrained = f" (untrained: {before})" if before is not None else ""
    return Finding(
        f"{dead} of {count(n, 'head')} never {verb} on these tokens{untrained}{holds}: {places}."
    )


def _size(rows: Frame, gates: Mapping[str, Any]) -> Finding:
    mean, share = (effect_of(gates["overall"].get(name)) for name in ("mean", "norm_share"))
    before = gates.get("overall_init") or {}
    layers = rows.groupby("layer")["mean"].mean()
    top = rows.loc[rows["mean"].idxmax()] if rows["mean"].notna().any() else None
    text = f"The mean gate is {plain(mean.value)}, {interval(mean, sign=False)}"
    text += f" (untrained: {plain(before['mean'])})" if before.get("mean") is not None else ""
    if len(layers) > 1:
        text += (
            f"; by layer from {plain(layers.min(), 2)} (layer {layers.idxmin()}) to "
            f"{plain(layers.max(), 2)} (layer {layers.idxmax()})"
        )
    if top is not None:
        found = effect(top, "mean")
        text += (
            f"; the largest head is L{int(top['layer'])} head {int(top['head'])} with "
            f"{plain(found.value, 2)}, {interval(found, 2, sign=False)}"
        )
    if math.isfinite(share.value):
        text += (
            ". The token mean of \N{GREEK SMALL LETTER ALPHA}||V_1|| / "
            "(\N{GREEK SMALL LETTER ALPHA}||V_1|| + ||V_n||) is "
            f"{tenths(share.value)} %, {interval_percent(share)}"
        )
    return Finding(text + ".")


def _variance(gates: Mapping[str, Any]) -> Finding | None:
    shares = gates.get("variance_shares") or {}
    if any(shares.get(name) is None for name in ("tokens", "heads", "layers")):
        return None
    text = (
        f"Of the variance of gates {percent(shares['tokens'])} lies between the tokens of a head, "
        f"{percent(shares['heads'])} between heads and {percent(shares['layers'])} between layers"
    )
    before = (gates.get("variance_shares_init") or {}).get("tokens")
    text += f" (untrained: {percent(before)} between tokens)" if before is not None else ""
    if shares["tokens"] < 0.1:
        return Finding(text + ": one number a head would do nearly as well.", "found")
    return Finding(text + ".")


def _static(rows: Frame, who: str) -> list[Finding]:
    """Weights that do not depend on the token: nothing here has a distribution over tokens."""
    layers = rows.groupby("layer")["mean"].mean()
    before = rows.groupby("layer")["mean_init"].mean() if "mean_init" in rows else None
    start = f" (at the start {plain(before.mean(), 2)} on average)" if before is not None else ""
    text = (
        f"{who}: V_1 has one weight a layer, the same for every token: from "
        f"{plain(layers.min(), 2)} "
        f"(layer {layers.idxmin()}) to {plain(layers.max(), 2)} (layer {layers.idxmax()}){start}. "
        "Zero "
        "fractions and categories have no meaning here."
    )
    findings = [Finding(text)]
    negative = [int(layer) for layer, value in layers.items() if value < 0]  # type: ignore[arg-type]
    if negative:
        where = ", ".join(map(str, negative))
        findings.append(
            Finding(f"The weight of V_1 is negative in layers {where}: it is subtracted.")
        )
    return findings


# -- routes ----------------------------------------------------------------------------------------


def _routes(rows: Frame, routes: Mapping[str, Any], who: str) -> list[Finding]:
    overall = routes["overall"]
    entropy, effective = (
        effect_of(overall.get(name)) for name in ("normalised_entropy", "effective_sources")
    )
    findings = []
    if math.isfinite(entropy.value):
        number = (
            "normalised entropy, reads weighted by log n of their n sources, "
            f"{plain(entropy.value)}, {interval(entropy, sign=False)}"
        )
        if entropy.has_interval and entropy.high < 1:
            findings.append(
                Finding(
                    f"{who}: routes concentrate: {number} (untrained and uniform: 1); "
                    f"{plain(effective.value, 2)} effective sources a read, "
                    f"{interval(effective, 2, sign=False)}."
                )
            )
        else:
            text = f"{who}: routes are not shown to differ from uniform ones: {number}."
            findings.append(Finding(text, "open"))
    findings += [_families(overall, bool(routes.get("n_signed"))), *_signed(routes, who)]
    findings += [_embedding(rows), *_roles(rows)]
    if routes.get("n_static", 0) < routes.get("n_reads", 1):
        findings += [_content(routes), _tokens(routes)]
    if routes.get("n_undefined"):
        n = count(int(routes["n_undefined"]), "token-read pair")
        findings.append(
            Finding(f"{n} had weights that are not defined; they are left out.", "open")
        )
    return [finding for finding in findings if finding is not None]


def _families(overall: Mapping[str, Any], signed: bool) -> Finding | None:
    names = {
        "embedding": "the embedding",
        "blocks": "completed blocks",
        "partial": "the current block",
        "states": "all states after layers",
        "streams": "all streams",
    }
    parts = []
    for name, label in names.items():
        found = effect_of(overall.get(f"mass_{name}"))
        if not math.isfinite(found.value):
            continue
        if signed:  # a sum of weights, and no share of anything
            parts.append(f"{label} {plain(found.value, 2)} ({interval(found, 2, sign=False)})")
        else:
            parts.append(f"{label} {tenths(found.value)} % ({interval_percent(found)})")
    what = "Mean sum of weights" if signed else "Mean weight"
    return Finding(f"{what} where there is such a source: {'; '.join(parts)}.") if parts else None


def _signed(routes: Mapping[str, Any], who: str) -> list[Finding]:
    """Signed weights by what they bring: |w| ||X||."""
    n = int(routes.get("n_signed") or 0)
    if not n:
        return []
    effective, negative = (
        effect_of(routes["overall"].get(name))
        for name in ("norm_effective_sources", "negative_norm_share")
    )
    static = ", the same for every token" if routes.get("n_static") == n else ""
    text = f"{who}: the weights of {count(n, 'read')} are signed{static}"
    if not math.isfinite(effective.value):
        return [Finding(f"{text}, and no token has one that is not zero.", "open")]
    return [
        Finding(
            f"{text}. By weight times size of the source a read has "
            f"{plain(effective.value, 2)} effective sources, {interval(effective, 2, sign=False)}; "
            f"{tenths(negative.value)} % of what sources bring is subtracted, "
            f"{interval_percent(negative)}."
        )
    ]


def _embedding(rows: Frame) -> Finding | None:
    """Reads whose weight on the embedding differs from the uniform start, by their intervals."""
    if "mass_embedding_init" not in rows:
        return None
    several = rows[(rows["n_sources"] > 1) & rows["mass_embedding_low"].notna()]
    if not len(several):
        return None
    above = int((several["mass_embedding_low"] > several["mass_embedding_init"]).sum())
    below = int((several["mass_embedding_high"] < several["mass_embedding_init"]).sum())
    rest = len(several) - above - below
    text = (
        f"The embedding is weighted above its untrained weight in {above} and below it in {below} "
        f"of {count(len(several), 'read')}"
    )
    text += f"; in {rest} no change is established." if rest else "."
    return Finding(text, "found" if above or below else "open")


def _roles(rows: Frame) -> list[Finding]:
    """Attention reads with two routes: which of them leans on the embedding."""
    reads = rows[(rows["sublayer"] == "attn") & (rows["n_sources"] > 1)]
    wide = {role: part.set_index("layer") for role, part in reads.groupby("role")}
    if not {"qk", "v"} <= wide.keys():
        return []
    layers = wide["qk"].index.intersection(wide["v"].index)
    qk, v = (wide[role].loc[layers] for role in ("qk", "v"))
    more = int((v["mass_embedding_low"] > qk["mass_embedding_high"]).sum())
    less = int((v["mass_embedding_high"] < qk["mass_embedding_low"]).sum())
    text = (
        f"The value route puts more weight on the embedding than the query-key route in {more} and "
        f"less in {less} of {count(len(layers), 'layer')} (intervals apart)"
    )
    if not more and not less:
        return [Finding(f"{text}: no difference between the roles is established.", "open")]
    rest = len(layers) - more - less
    return [Finding(f"{text}; in {rest} they overlap." if rest else f"{text}.")]


def _content(routes: Mapping[str, Any]) -> Finding | None:
    """How much of what routes could tell about their token they tell."""
    found = effect_of(routes["overall"].get("content_dependence"))
    if not math.isfinite(found.value):
        return None
    tokens = effect_of((routes.get("weight_variance") or {}).get("tokens"))
    share = (
        f" {tenths(tokens.value)} % of the variance of all weights lies between tokens, "
        f"{interval_percent(tokens)}; the rest between reads and sources."
        if math.isfinite(tokens.value)
        else ""
    )
    return Finding(
        f"The token decides {tenths(found.value)} % of what a route could say about it (mutual "
        f"information of token and source by log n), {interval_percent(found)}.{share}"
    )


def _tokens(routes: Mapping[str, Any]) -> Finding | None:
    """How far a read's weight on the embedding moves with the token, beside its size."""
    weight = routes.get("embedding_weight") or {}
    mean, spread = weight.get("mean"), weight.get("sd_within_read")
    if mean is None or spread is None:
        return None
    return Finding(
        f"Within a read the embedding's weight has a standard deviation of {plain(spread)} over "
        f"tokens; its mean over reads of several sources is {plain(mean)}."
    )
