"""Hyper-Connections: reads of the streams, and the connections they unfold to.

Left, the weights with which each sublayer reads the parallel streams; right, what that amounts to:
the coefficient of the embedding and of each earlier sublayer's output in each read.
"""

import math

import pandas as pd

from satlens.plotting.heatmaps import colour_bar
from satlens.plotting.style import DOUBLE, new_figure, styled
from satlens.plotting.weight_maps import mean_and_range, ring_note, spread, symmetric, weight_map
from satlens.report.paper_figures import Drawing, NotDrawnError, of_variant

SOURCE = "Hyper-Connections (arXiv 2409.19606)"
SUBLAYERS = {"attn": "Attention reads", "mlp": "MLP reads"}


def draw(run):
    arm, seeds = of_variant(run, "sparsity", "hyperconnections")
    unfolded = run.of("routes").get(arm)
    if not unfolded:
        raise NotDrawnError(f"needs the routes of the arm {arm}")
    weights = {seed: result.part("route_weights") for seed, result in seeds.items()}
    streams = mean_and_range(
        {seed: part.table for seed, part in weights.items()},
        ["layer", "sublayer", "source_index"],
        "weight",
    )
    reads = mean_and_range(
        {seed: result.table for seed, result in unfolded.items()},
        ["layer", "sublayer", "component", "component_index"],
        "coefficient",
    )
    n_rows = reads["layer"].nunique()
    figure = new_figure(DOUBLE, min(1.3 + 0.28 * n_rows, 5.5))
    with styled():
        left, right = figure.subfigures(1, 2, width_ratios=[1, 1.75])
        _streams(left, streams)
        _unfolded(right, reads)
        ring_note(left, streams)
        ring_note(right, reads)
    return Drawing(
        figure=figure,
        plotted=_plotted(streams, reads).assign(arm=arm),
        tables=[*weights.values(), *unfolded.values()],
        caption=f"Left: mean weight over tokens of each stream in the read of a sublayer "
        f"({spread(len(weights))}); untrained, 1 on one stream, sublayer by sublayer in turn. "
        "Right: the coefficient of each earlier output in each read, mean over tokens "
        f"({spread(len(unfolded))}); untrained, 1 everywhere as in a "
        "transformer, and the number of streams in the output, which sums them.",
    )


def _plotted(streams, reads):
    """Both maps as one table: what a cell is, and its number as ``value``."""
    named = streams.assign(source="stream " + streams["source_index"].astype(str))
    outputs = reads.rename(columns={"component": "source"})
    parts = [
        part.rename(columns=lambda name, stat=stat: name.replace(stat, "value")).assign(number=what)
        for part, stat, what in (
            (named.drop(columns="source_index"), "weight", "weight of a stream"),
            (outputs.drop(columns="component_index"), "coefficient", "coefficient of an output"),
        )
    ]
    return pd.concat(parts, ignore_index=True)


def _streams(where, streams):
    norm = symmetric(streams, "weight")
    axes = where.subplots(2, 1)
    for ax, (sublayer, title) in zip(axes, SUBLAYERS.items(), strict=True):
        part = streams[streams["sublayer"] == sublayer]
        mesh = weight_map(
            ax, part, "weight", row="layer", column="source_index", norm=norm, title=title
        )
        ax.set_ylabel("layer")
    axes[1].set_xlabel("stream")
    colour_bar(list(axes), mesh, "mean weight", aspect=40)


def _unfolded(where, reads):
    names = {"attn": "a", "mlp": "m"}
    rows = reads.assign(
        reader=[
            "out" if part == "out" else f"{layer}{names[part]}"
            for layer, part in zip(reads["layer"], reads["sublayer"], strict=True)
        ],
        writer=[
            "e" if name == "embed" else f"{name[1 : name.index('.')]}{names[name.split('.')[1]]}"
            for name in reads["component"]
        ],
    )
    ax = where.subplots()
    mesh = weight_map(
        ax,
        rows,
        "coefficient",
        row="reader",
        column="writer",
        norm=symmetric(reads, "coefficient", decades=True),
        title="Unfolded: coefficient of each output",
    )
    ax.set_ylabel("reading sublayer (a attention, m MLP)")
    ax.set_xlabel("embedding (e), output of sublayer")
    bar = colour_bar(ax, mesh, "mean coefficient (logarithmic beyond 1)", aspect=40)
    decades = [10.0**k for k in range(1 + round(math.log10(max(mesh.norm.vmax, 1))))]
    bar.set_ticks([-value for value in decades[::-1]] + [0, *decades], minor=False)
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter("{x:g}")
