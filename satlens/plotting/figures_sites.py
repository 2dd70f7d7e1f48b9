"""What is taken from early layers, by gates and by routes, beside the untrained model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from satlens.plotting.heatmaps import (
    ANNOTATED_ROWS,
    colour_bar,
    head_map,
    limits_of,
    route_map,
    span_of,
    stream_map,
)
from satlens.plotting.intervals import from_zero, heads_by_layer, per_layer
from satlens.plotting.style import (
    PAGE,
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
    ``layer, role, n_sources`` and the statistics of :data:`_ROUTE_STATS` that they have. The part
    ``route_weights`` adds the maps.
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
    scale = min(1.0, PAGE / sum(height for height, _ in panels)) if panels else 1.0
    return stacked([(scale * height, fill) for height, fill in panels])


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


_ACROSS = 3
"""Maps side by side; four or more stand in rows of two."""


def map_height(weights: Frame) -> float:
    """Height in inches of route maps with as many rows as there are layers."""
    n_rows = len(_grid(len(_read_names(weights))))
    one = 0.75 + 0.19 * (weights["layer"].nunique() + 1)
    return min(4.2 if n_rows == 1 else 6.0, n_rows * one)


def _grid(n_maps: int) -> list[range]:
    """Numbers of the maps in each row."""
    across = n_maps if n_maps <= _ACROSS else 2
    return [range(i, min(i + across, n_maps)) for i in range(0, n_maps, across)]


def _read_names(weights: Frame) -> list[str]:
    names = map(read_name, weights["sublayer"], weights["role"])
    return list(dict.fromkeys(names))


def _route_maps(where: Any, weights: Frame) -> None:
    """A map a role, the output read below those of the MLPs or of the residual."""
    is_out = weights["sublayer"] == "out"
    rows = weights.assign(
        row=weights["layer"].astype(str).where(~is_out, "out"),
        read=list(map(read_name, weights["sublayer"], weights["role"])),
    )
    reads = _read_names(weights)
    if rows["source"].astype(str).str.startswith("stream").all():
        _stream_maps(where, rows, reads)
        return
    spans = [span_of(str(label)) for label in rows["source"]]
    deepest = max((span.last + 1 for span in spans if span is not None), default=0)
    signed = bool((rows["weight"] < 0).any())
    limits = limits_of([rows], ["weight"], signed=True) if signed else (0.0, 1.0)
    grid = _grid(len(reads))
    axes = where.subplots(len(grid), len(grid[0]), squeeze=False)
    for ax in axes.flat[len(reads) :]:
        ax.set_axis_off()
    for ax, read in zip(axes.flat, reads, strict=False):
        mesh = route_map(
            ax,
            rows[rows["read"] == read],
            "weight",
            limits=limits,
            signed=signed,
            deepest=deepest,
            title=read,
        )
        if ax not in axes[:, 0]:
            ax.set_ylabel("")
        if ax not in axes[-1]:
            ax.set_xlabel("")
    unit = " (cells: hundredths)" if signed else " (cells: %)"
    written = rows.groupby("read")["row"].nunique().max() <= ANNOTATED_ROWS
    colour_bar(list(axes.flat), mesh, f"weight{unit if written else ''}", aspect=22 * len(grid))
    if rows["source"].astype(str).str.startswith("partial").any():
        where.supxlabel("dotted: the block still being written", fontsize=6.5, x=0.99, ha="right")


def _stream_maps(where: Any, rows: Frame, reads: list[str]) -> None:
    """Weights over parallel streams, a map a kind of read."""
    axes = list(where.subplots(1, len(reads), squeeze=False)[0])
    limits = limits_of([rows], ["weight"], signed=True)
    for ax, read in zip(axes, reads, strict=True):
        part = rows[rows["read"] == read]
        mesh = stream_map(ax, part, "weight", limits=limits, signed=True, title=read)
        if ax is not axes[0]:
            ax.set_ylabel("")
    colour_bar(axes, mesh, "weight")


def read_name(sublayer: str, role: str) -> str:
    """Title of the reads of one role; the output read goes with the MLPs or the residual."""
    if role == "r":
        return "Residual: R"
    if sublayer in ("mlp", "out"):
        return "MLP and output reads"
    if sublayer == "depth":
        return "After each layer"
    return "Attention reads" if role == "shared" else f"Attention: {role.upper()}"


def _named(label: str, role: str) -> str:
    return label if role == "shared" else f"{label} {role.upper()}"


_ROUTE_STATS = {
    "mass_embedding": ("Weight on the embedding", "weight"),
    "effective_sources": ("Effective number of sources", "exp(entropy)"),
    "norm_effective_sources": ("Effective sources by norm", "exp(entropy)"),
    "negative_norm_share": ("Negative share of norms", "share"),
}
"""Statistics of reads in order of preference: the first two that a model has are drawn."""


def _route_families(where: Any, routes: Frame) -> None:
    """Two statistics of reads, layer by layer."""
    several = routes[(routes["n_sources"] > 1) & (routes["sublayer"] != "out")]
    labels = {"mlp": "MLP", "attn": "Attention", "depth": "After the layer"}
    names = [
        "Residual R" if r == "r" else _named(labels.get(str(s), str(s)), r)
        for s, r in zip(several["sublayer"], several["role"], strict=True)
    ]
    if not names:
        no_data(where.subplots(), "every read has a single source")
        return
    stats = [stat for stat in _ROUTE_STATS if stat in several and several[stat].notna().any()]
    axes = where.subplots(1, 2)
    for ax, stat in zip(axes, stats[:2], strict=False):
        title, label = _ROUTE_STATS[stat]
        series = {name: (several[np.equal(names, name)], stat) for name in sorted(set(names))}
        per_layer(ax, series, baseline=stat + INIT)
        ax.set_title(title + ", 95 % intervals")
        ax.set_ylabel(label)
        from_zero(ax)
    for ax in axes[len(stats) :]:
        no_data(ax, "not defined")
    if stats:
        axes[len(stats[:2]) - 1].legend(loc="upper left")
