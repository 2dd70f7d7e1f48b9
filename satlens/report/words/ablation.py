"""Sentences about interventions: what replacing gates or routes costs, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from satlens.report.effects import (
    ALPHA,
    NATS,
    NOISE_FLOOR,
    Effect,
    Finding,
    Frame,
    count,
    effect,
    interval,
    listed,
    plain,
    signed,
)

_WHAT = {
    ("gate", "zero"): "setting every gate to zero",
    ("gate", "mean"): "replacing every gate by its head's mean over tokens",
    ("gate", "shuffle"): "permuting the gates among the tokens of a context",
    ("route", "uniform"): "making every route uniform",
    ("route", "mean"): "replacing every route by its mean over tokens",
    ("route", "tie_v"): "reading values by the route of queries and keys",
}
UP, DOWN = "raises the held-out NLL", "lowers the held-out NLL"


def ablation(
    table: Frame,
    summary: Mapping[str, Any],
    who: str = "model",
    gain: tuple[str, float] | None = None,
) -> list[Finding]:
    """What each intervention costs: the whole model, then layers and heads.

    Args:
        who: the arm and seed that the table is about.
        gain: trained baseline and how far this checkpoint's loss is from it (negative: below).
    """
    findings = []
    for (target, kind), rows in table.groupby(["target", "kind"], sort=False):
        what = describe(str(target), str(kind))
        whole = rows[rows["scope"] == "model"]
        findings += [_whole(row, what, who) for _, row in whole.iterrows()]
        for scope in ("layer", "head"):
            part = rows[rows["scope"] == scope]
            if len(part) and (part["dnll"] != 0).any():
                findings.append(_grid(part, str(kind), scope))
    worst = _largest(table)
    if worst is not None:
        findings.append(_beside_gain(worst, who, gain))
    return findings


def ablation_effects(table: Frame) -> dict[tuple[str, str], Effect]:
    """Whole-model effect of each (target, kind) of intervention."""
    whole = table[table["scope"] == "model"]
    return {(row["target"], row["kind"]): effect(row, "dnll") for _, row in whole.iterrows()}


def describe(target: str, kind: str) -> str:
    """What an intervention does, as the subject of a sentence."""
    return _WHAT.get((target, kind), f"the intervention {kind} on every {target}")


def _whole(row: Frame, what: str, who: str) -> Finding:
    found = effect(row, "dnll")
    subject = f"{who}: {what}"
    small = f" (less than the {plain(NOISE_FLOOR, 2)} by which two trainings differ for no reason)"
    match found.verdict:
        case "undefined":
            return Finding(f"{subject} gives a loss that is not defined.", "open")
        case "null" if found.low == found.high == 0:
            return Finding(f"{subject} changes nothing at all.", "open")
        case "null":
            text = (
                f"{subject} has no effect that is established: {signed(found.value)} {NATS}, "
                f"{interval(found)}, covers 0."
            )
            return Finding(text, "open")
        case "no_interval":
            text = (
                f"{subject} changes the held-out NLL by {signed(found.value)} {NATS}, with "
                f"{interval(found)}, so nothing is established."
            )
            return Finding(text, "open")
    does = UP if found.value > 0 else DOWN
    note = small if abs(found.value) < NOISE_FLOOR else ""
    text = f"{subject} {does} by {plain(abs(found.value))} {NATS}, {interval(found)}{note}."
    return Finding(text)


def _grid(rows: Frame, kind: str, scope: str) -> Finding:
    """Where in the model, by tests adjusted over the grid."""
    plural = {"layer": "layers", "head": "heads"}[scope]
    tested = rows[rows["p_adjusted"].notna()]
    chosen = tested[tested["p_adjusted"].astype(float) < ALPHA]
    prefix = f"One {scope} at a time, {kind}:"
    if not len(chosen):
        least = float(tested["p_min"].min()) if len(tested) else 1.0
        why = f"; with so few documents no p below {least:.2g} is possible" if least > ALPHA else ""
        text = f"{prefix} no effect is established in any of {count(len(rows), scope)}{why}."
        return Finding(text, "open")
    up, down = chosen[chosen["dnll"] > 0], chosen[chosen["dnll"] < 0]
    said = [
        f"it {verb} in {len(part)} of {len(rows)} {plural} ({_places(part, scope)})"
        for part, verb in ((up, "costs"), (down, "helps"))
        if len(part)
    ]
    largest = chosen.loc[chosen["dnll"].abs().idxmax()]
    found = effect(largest, "dnll")
    text = (
        f"{prefix} {listed(said)} at adjusted p < {ALPHA}; the largest effect is "
        f"{signed(found.value, 4)} {NATS} in {_place(largest, scope)}, {interval(found, 4)}. In "
        "the other "
        f"{len(rows) - len(chosen)} none is established."
    )
    return Finding(text)


def _places(rows: Frame, scope: str) -> str:
    if scope == "layer":
        layers = [str(int(layer)) for layer in rows["layer"]]
        return f"{'layer' if len(layers) == 1 else 'layers'} {listed(layers)}"
    names = [_place(row, scope) for _, row in rows.iterrows()]
    return listed(names) if len(names) <= 8 else f"{', '.join(names[:6])} and others"


def _place(row: Frame, scope: str) -> str:
    if scope == "layer":
        return f"layer {int(row['layer'])}"
    return f"L{int(row['layer'])} head {int(row['head'])}"


def _largest(table: Frame) -> Effect | None:
    """Largest established damage of a whole-model intervention."""
    effects = [found for found in ablation_effects(table).values() if found.verdict == "positive"]
    return max(effects, key=lambda found: found.value, default=None)


def _beside_gain(worst: Effect, who: str, gain: tuple[str, float] | None) -> Finding:
    """Damage next to what the arm gains over its trained baseline."""
    if gain is None:
        return Finding(
            f"{who}: no trained baseline was compared with this checkpoint, so the damage says "
            "nothing about usefulness.",
            "open",
        )
    reference, difference = gain
    if difference >= 0 or abs(difference) < NOISE_FLOOR:
        text = (
            f"{who}: beside this damage the arm ends {signed(difference)} {NATS} from the trained "
            f"{reference} in this seed, no gain beyond the noise floor. Losing up to "
            f"{plain(worst.value)} shows reliance, not usefulness."
        )
        return Finding(text, "open")
    ratio = worst.value / -difference
    text = (
        f"{who}: beside this damage the arm ends {plain(-difference)} {NATS} below the trained "
        f"{reference} in this seed; the largest damage, {plain(worst.value)}, is {ratio:.1f} times "
        "that gain."
    )
    return Finding(text)
