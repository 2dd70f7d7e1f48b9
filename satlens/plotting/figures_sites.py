"""What is taken from early layers, by gates and by routes, beside the untrained model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from satlens.plotting.heatmaps import colour_bar, head_map, limits_of, route_map, span_of
from satlens.plotting.intervals import from_zero, heads_by_layer, per_layer
from satlens.plotting.style import (
    Frame,
    Panel,
    Parts,
    colour,
    no_data,
    stacked,
    zero_line,
)

INIT = "_init"
"""Suffix of the column that holds a statistic at initialisation."""


def sparsity_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Gates beside their untrained baseline, routes over their sources, or both.

    Rows of kind ``gate`` have ``layer, head, mean, open_fraction, dead``; rows of kind ``route``
    ``layer, role, mass_embedding, effective_sources``. The part ``route_weights`` adds the maps.
    """
    gates, routes = (table[table["kind"] == kind] for kind in ("gate", "route"))
    weights = parts.get("route_weights")
    panels: list[Panel] = []
    if len(gates) and gates["flags"].str.contains("static").all():
        panels.append((1.9, lambda where: _static_gates(where, gates)))
    elif len(gates):
        height = min(3.6, 1.05 + 0.19 * gates["layer"].nunique())
        panels.append((height, lambda where: _gate_maps(where, gates)))
        panels.append((1.9, lambda where: _gate_heads(where, gates)))
    if len(routes):
        if weights is not None:
            panels.append((map_height(weights), lambda where: _route_maps(where, weights)))
        panels.append((2.1, lambda where: _route_families(where, routes)))
    return stacked(panels)


def route_weights_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """A map a role: mean weight of every source of every read."""
    return stacked([(map_height(table), lambda where: _route_maps(where, table))])


# -- gates -----------------------------------------------------------------------------------------

_GATE_STATS = {"mean": "Mean gate", "open_fraction": "Open fraction"}


def _gate_maps(where: Any, gates: Frame) -> None:
    axes = where.subplots(1, 4)
    for pair, (stat, label) in zip((axes[:2], axes[2:]), _GATE_STATS.items(), strict=True):
        _beside_baseline(pair, gates, stat, label)
    if gates["dead"].any():
        where.supxlabel("crossed out: never open on the data", fontsize=6.5, x=0.99, ha="right")


def _beside_baseline(pair: Any, gates: Frame, stat: str, label: str) -> None:
    """The map at initialisation and, on the same scale, after training."""
    before, after = pair
    signed = bool((gates[stat] < 0).any())
    limits = limits_of([gates], [stat, stat + INIT], signed)
    if stat == "open_fraction":
        limits = (0.0, 1.0)
    mesh = head_map(
        after, gates, stat, limits=limits, signed=signed, dead="dead", title="\ntrained"
    )
    after.set_ylabel("")
    if stat + INIT in gates:
        head_map(
            before, gates, stat + INIT, limits=limits, signed=signed, title=f"{label}\nuntrained"
        )
    else:
        no_data(before, "no baseline")
    colour_bar([before, after], mesh, label.lower())


def _gate_heads(where: Any, gates: Frame) -> None:
    for ax, (stat, label) in zip(where.subplots(1, 2), _GATE_STATS.items(), strict=True):
        heads_by_layer(ax, gates, stat, colour_=colour(0), baseline=stat + INIT)
        ax.set_ylabel(label.lower())
        ax.set_title(f"{label} of each head, 95 % intervals")
        from_zero(ax)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(loc="upper left")


def _static_gates(where: Any, gates: Frame) -> None:
    """One number a layer, and what it makes of the heads' mixed values."""
    weight, share = where.subplots(1, 2)
    heads_by_layer(weight, gates, "mean", colour_=colour(0), baseline="mean" + INIT)
    weight.set_title("Weight of V\N{SUBSCRIPT ONE} (the same for every token)")
    weight.set_ylabel("weight")
    zero_line(weight)
    heads_by_layer(share, gates, "norm_share", colour_=colour(0), baseline="norm_share" + INIT)
    share.set_title("Share of V\N{SUBSCRIPT ONE} in the value's norm, each head")
    share.set_ylabel("norm share")
    share.set_ylim(0, 1)
    if weight.get_legend_handles_labels()[0]:
        weight.legend(loc="best")


# -- routes ----------------------------------------------------------------------------------------


def map_height(weights: Frame) -> float:
    """Height in inches of route maps with as many rows as there are layers."""
    return min(4.2, 0.75 + 0.19 * (weights["layer"].nunique() + 1))


def _route_maps(where: Any, weights: Frame) -> None:
    """A map a role, the output read below those of the MLPs."""
    is_out = weights["sublayer"] == "out"
    rows = weights.assign(
        row=weights["layer"].astype(str).where(~is_out, "out"),
        read=[read_name(s, r) for s, r in zip(weights["sublayer"], weights["role"], strict=True)],
    )
    reads = list(dict.fromkeys(rows["read"]))
    spans = [span_of(str(label)) for label in rows["source"]]
    deepest = max((span.last + 1 for span in spans if span is not None), default=0)
    signed = bool((rows["weight"] < 0).any())
    limits = limits_of([rows], ["weight"], signed=True) if signed else (0.0, 1.0)
    axes = list(where.subplots(1, len(reads), squeeze=False)[0])
    for ax, read in zip(axes, reads, strict=True):
        mesh = route_map(
            ax,
            rows[rows["read"] == read],
            "weight",
            limits=limits,
            signed=signed,
            deepest=deepest,
            title=read,
        )
        if ax is not axes[0]:
            ax.set_ylabel("")
    colour_bar(axes, mesh, "weight (cells: %)")
    where.supxlabel("dotted: the block still being written", fontsize=6.5, x=0.99, ha="right")


def read_name(sublayer: str, role: str) -> str:
    """Title of the reads of one role; the output read goes with the MLPs."""
    if sublayer in ("mlp", "out"):
        return "MLP and output reads"
    if role == "shared":
        return "Attention reads"
    return f"Attention reads: {role.upper()}"


def _route_families(where: Any, routes: Frame) -> None:
    """Weight on the embedding and effective number of sources, layer by layer."""
    several = routes[(routes["n_sources"] > 1) & (routes["sublayer"] != "out")]
    labels = {"mlp": "MLP", "attn": "Attention"}
    names = [
        labels.get(str(s), str(s)) + ("" if r == "shared" else f" {r.upper()}")
        for s, r in zip(several["sublayer"], several["role"], strict=True)
    ]
    if not names:
        no_data(where.subplots(), "every read has a single source")
        return
    axes = where.subplots(1, 2)
    stats = {
        "mass_embedding": ("Weight on the embedding", "weight"),
        "effective_sources": ("Effective number of sources", "exp(entropy)"),
    }
    for ax, (stat, (title, label)) in zip(axes, stats.items(), strict=True):
        series = {name: (several[np.equal(names, name)], stat) for name in sorted(set(names))}
        per_layer(ax, series, baseline=stat + INIT)
        ax.set_title(title + ", 95 % intervals")
        ax.set_ylabel(label)
        from_zero(ax)
    axes[1].legend(loc="upper left")
