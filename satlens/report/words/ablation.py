"""Sentences about interventions: what replacing gates, routes or reads costs, and where."""

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
    percent,
    plain,
    signed,
)
from satlens.report.words.arms import Gain

_WHAT = {
    ("gate", "zero"): "setting every gate to zero",
    ("gate", "mean"): "replacing every gate by its head's mean over tokens",
    ("gate", "mean_position"): "replacing every gate by its head's mean at each position",
    ("gate", "mean_category"): "replacing every gate by its head's mean in each token category",
    ("gate", "resample"): "taking every gate from the same position of another document",
    ("gate", "shuffle"): "permuting the gates among the tokens of a context",
    ("gate", "optimal"): "giving every head the one value that minimises the loss",
    ("gate", "open"): "setting every gate to one",
    ("route", "zero"): "taking nothing but the residual stream",
    ("route", "uniform"): "making every route uniform",
    ("route", "mean"): "replacing every route by its mean over tokens",
    ("route", "mean_position"): "replacing every route by its mean at each position",
    ("route", "mean_category"): "replacing every route by its mean in each token category",
    ("route", "resample"): "taking every route from the same position of another document",
    ("route", "swap"): "exchanging the routes of values and of queries and keys",
    ("route", "tie_v"): "reading values by the route of queries and keys",
}
_STATIC = {
    "zero": "setting the weight of V_1 to zero",
    "mean": "replacing the weight of V_1 by its mean over tokens",
    "shuffle": "permuting the weight of V_1 among the tokens of a context",
}
_SHORT = {
    "tie_v": "values read by the route of queries and keys",
    "mask": "taken away",
    "onehot": "read alone",
    "remove": "taken out",
}
_PLURALS = {
    "layer": "layers",
    "head": "heads",
    "source": "families of sources by layer",
    "component": "components by read",
}
_ONE = {
    "layer": "One layer",
    "head": "One head",
    "source": "The sources of one family in one layer",
    "component": "One component of one read",
}
_SHOWN = 8
"""Places that a sentence names."""
UP, DOWN = "raises the held-out NLL", "lowers the held-out NLL"


def ablation(
    table: Frame,
    summary: Mapping[str, Any],
    who: str = "model",
    gain: Gain | None = None,
    floor: float = NOISE_FLOOR,
) -> list[Finding]:
    """What each intervention costs: the whole model, then layers, heads and what they read.

    Args:
        who: the arm and seed that the table is about.
        gain: how far this checkpoint's loss is from that of its trained baseline.
        floor: nats a token by which two trainings differ for no reason.
    """
    findings = []
    for (target, kind), rows in table.groupby(["target", "kind"], sort=False):
        what = describe(str(target), str(kind), is_static(rows))
        whole = rows[rows["scope"] == "model"]
        for _, row in whole.iterrows():
            of = describe(str(target), _kind(row)) if _source(row) else what
            findings.append(_whole(row, of, who, floor))
        for scope in _PLURALS:
            part = rows[rows["scope"] == scope]
            if len(part) and (part["dnll"] != 0).any():
                findings.append(_grid(part, str(kind), scope, floor))
    worst = _largest(table)
    if worst is not None:
        n_tokens = int(table["n_tokens"].max())
        findings.append(_beside_gain(worst, n_tokens, who, gain, floor))
    return findings


def ablation_effects(table: Frame) -> dict[tuple[str, str], Effect]:
    """Whole-model effect of each (target, kind) of intervention, with the source where it has one:
    ``("route", "mask embedding")``."""
    whole = table[table["scope"] == "model"]
    return {(row["target"], _kind(row)): effect(row, "dnll") for _, row in whole.iterrows()}


def _source(row: Frame) -> str:
    return str(row.get("source") or "")


def _kind(row: Frame) -> str:
    """The kind of a row, with the sources that it is about."""
    return f"{row['kind']} {_source(row)}".strip()


def is_static(rows: Frame) -> bool:
    """Whether interventions act on weights that are the same for every token."""
    return bool(rows["flags"].fillna("").str.split(";").map(lambda f: "static" in f).all())


def describe(target: str, kind: str, static: bool = False) -> str:
    """What an intervention does, as the subject of a sentence."""
    if static and target == "gate" and kind in _STATIC:
        return _STATIC[kind]
    if kind.startswith("mask "):
        return f"taking the sources {kind.removeprefix('mask ')} away from every read"
    return _WHAT.get((target, kind), f"the intervention {kind} on every {target}")


def _whole(row: Frame, what: str, who: str, floor: float) -> Finding:
    found = effect(row, "dnll")
    subject = f"{who}: {what}"
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
    note = _small(found, floor)
    text = f"{subject} {does} by {plain(abs(found.value))} {NATS}, {interval(found)}{note}"
    return Finding(f"{text}{_predictions(row)}.")


def _predictions(row: Frame) -> str:
    """What becomes of the most likely next token, where the table says."""
    changed = effect(row, "top1_change")
    if changed.verdict == "undefined":
        return ""
    kl = plain(effect(row, "kl").value)
    return f"; the most likely next token changes in {percent(changed.value)} (KL {kl} nats)"


def _small(found: Effect, floor: float) -> str:
    if abs(found.value) >= floor:
        return ""
    return f" (less than the {plain(floor, 2)} by which two trainings differ for no reason)"


def _grid(rows: Frame, kind: str, scope: str, floor: float) -> Finding:
    """Where in the model, by tests adjusted over the grid."""
    plural, one = _PLURALS[scope], _ONE[scope]
    n_places = f"{len(rows):,} {plural}" if len(rows) > 1 else one.lower()
    n_output = sum(_is_output(row) for _, row in rows.iterrows())
    if n_output and scope == "layer":  # the read after the last layer stands among the layers
        one, plural = f"{one} or the output read", "reads by layer"
        n_places = f"{count(len(rows) - n_output, scope)} or the output read"
    tested = rows[rows["p_adjusted"].notna()]
    chosen = tested[tested["p_adjusted"].astype(float) < ALPHA]
    prefix = f"{one} at a time, {_SHORT.get(kind, kind)}:"
    if not len(chosen):
        least = float(tested["p_min"].min()) if len(tested) else 1.0
        why = f"; with so few documents no p below {least:.2g} is possible" if least > ALPHA else ""
        text = f"{prefix} no effect is established in any of {n_places}{why}."
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
        f"{signed(found.value, 4)} {NATS} in {_place(largest, scope)}, {interval(found, 4)}"
        f"{_small(found, floor)}."
    )
    rest = len(rows) - len(chosen)
    return Finding(f"{text} In the other {rest} none is established." if rest else text)


def _places(rows: Frame, scope: str) -> str:
    if scope == "layer":
        layers = [int(row["layer"]) for _, row in rows.iterrows() if not _is_output(row)]
        said = [f"{'layer' if len(layers) == 1 else 'layers'} {_ranges(layers)}"] if layers else []
        return listed([*said, "the output read"] if len(layers) < len(rows) else said)
    names = [_place(row, scope) for _, row in rows.iterrows()]
    if len(names) <= _SHOWN:
        return listed(names)
    return f"{', '.join(names[: _SHOWN - 2])} and others"


def _ranges(numbers: list[int]) -> str:
    """3 to 7 where three or more follow each other without a gap, else 1, 3 and 4."""
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return listed([str(number) for number in numbers])


def _is_output(row: Frame) -> bool:
    return row["sublayer"] == "out"


def _place(row: Frame, scope: str) -> str:
    where = "the output read" if _is_output(row) else f"layer {int(row['layer'])}"
    if scope == "component":
        read = row["site"].replace(".read_", " ").removesuffix(".read")
        return f"{row['component']} in {where if _is_output(row) else read}"
    if scope == "source":
        return f"{_source(row)} in {row['site'] or where}"
    if scope == "layer" or _is_output(row):
        return where
    return f"L{int(row['layer'])} head {int(row['head'])}"


def _largest(table: Frame) -> Effect | None:
    """Largest established damage of a whole-model intervention."""
    effects = [found for found in ablation_effects(table).values() if found.verdict == "positive"]
    return max(effects, key=lambda found: found.value, default=None)


def _beside_gain(
    worst: Effect, n_tokens: int, who: str, gain: Gain | None, floor: float
) -> Finding:
    """Damage next to what the arm gains over its trained baseline."""
    if gain is None:
        return Finding(
            f"{who}: no trained baseline was compared with this checkpoint, so the damage says "
            "nothing about usefulness.",
            "open",
        )
    reference, difference = gain.reference, gain.difference
    slices = ""
    if gain.n_tokens != n_tokens:
        slices = (
            f" The damage was measured on {n_tokens:,} tokens, the difference between the arms on "
            f"{gain.n_tokens:,}."
        )
    if difference >= 0 or abs(difference) < floor:
        text = (
            f"{who}: beside this damage the arm ends {signed(difference)} {NATS} from the trained "
            f"{reference} in this seed, no gain beyond the noise floor. Losing up to "
            f"{plain(worst.value)} shows reliance, not usefulness.{slices}"
        )
        return Finding(text, "open")
    ratio = worst.value / -difference
    text = (
        f"{who}: beside this damage the arm ends {plain(-difference)} {NATS} below the trained "
        f"{reference} in this seed; the largest damage, {plain(worst.value)}, is {ratio:.1f} times "
        f"that gain.{slices}"
    )
    if gain.established:
        return Finding(text)
    return Finding(f"{text} Over the seeds that gain is not established.", "open")
