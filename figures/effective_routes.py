"""Effective routes: what every read holds of each sublayer's own output.

One map an architecture, whatever its raw weights act on: the share of the embedding and of each
earlier attention and MLP output in the norms that make up a read, with the sign of its coefficient.
"""

import pandas as pd
from matplotlib.colors import Normalize

from satlens.plotting.heatmaps import colour_bar
from satlens.plotting.intervals import from_zero, per_layer
from satlens.plotting.style import DOUBLE, MUTED, PAGE, SIGNED, new_figure, styled
from satlens.plotting.weight_maps import mean_and_range, ring_note, spread, weight_map
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "satlens; unfolded as in Hyper-Connections (arXiv 2409.19606)"
SUBLAYERS = {"attn": "attention", "mlp": "MLP"}


def draw(run):
    found = {
        arm: seeds
        for arm, seeds in run.of("routes").items()
        if not any(each.table.empty for each in seeds.values())
    }
    if not found:
        raise NotDrawnError("needs the routes of an arm")
    keys = ["layer", "sublayer", "role", "component", "component_index"]
    maps = {
        arm: mean_and_range(_tables(seeds), keys, "signed_share") for arm, seeds in found.items()
    }
    reads = {
        arm: {seed: each.part("routes_reads") for seed, each in seeds.items()}
        for arm, seeds in found.items()
    }
    counts = {arm: _counts(seeds) for arm, seeds in reads.items()}
    across = 2 if len(maps) in (2, 4) else min(3, len(maps))
    heights = _heights(maps, across)
    figure = new_figure(DOUBLE, sum(heights) + 2.2)
    with styled():
        above, below = figure.subfigures(2, 1, height_ratios=[sum(heights), 2.2])
        _maps(above, maps, heights, across)
        _effective(below, counts)
    n_seeds = max(len(seeds) for seeds in found.values())
    return Drawing(
        figure=figure,
        plotted=_plotted(maps, counts),
        tables=[
            each
            for arm, seeds in found.items()
            for seed, result in seeds.items()
            for each in (result, reads[arm][seed])
        ],
        caption="Maps: mean over tokens of the share of each component in a read, |coefficient| "
        "times norm, with the coefficient's sign; shares of a read add up to 1 without signs; "
        "colours end where 98 % of the sublayers' shares are within. "
        "Below: effective number of components, exp(entropy of the shares), of each layer's MLP "
        f"read. Seeds: {spread(n_seeds, 'bars')}. Untrained, every architecture is a plain "
        "transformer up to scale.",
    )


def _tables(seeds):
    return {seed: each.table for seed, each in seeds.items()}


def _counts(seeds):
    """The effective number of components of the MLP reads, which every architecture has."""
    tables = {seed: table[table["sublayer"] == "mlp"] for seed, table in _tables(seeds).items()}
    return mean_and_range(tables, ["layer", "sublayer", "role"], "effective_components")


def _heights(maps, across):
    """Inches of each row of maps."""
    n_reads = [cells.groupby(["layer", "sublayer", "role"]).ngroups for cells in maps.values()]
    rows = [max(n_reads[i : i + across]) for i in range(0, len(n_reads), across)]
    wanted = [0.55 + 0.105 * min(max(n, 20), 45) for n in rows]
    room = min(1.0, (PAGE - 2.2) / sum(wanted))
    return [height * room for height in wanted]


def _maps(where, maps, heights, across):
    # The first reads are all embedding: a scale that held them would leave the others pale.
    later = pd.concat([cells[cells["component_index"] > 0] for cells in maps.values()])
    top = float(later["signed_share"].abs().quantile(0.98)) or 1.0
    shades = SIGNED.copy()
    shades.colorbar_extend = "both"
    axes = where.subplots(len(heights), across, squeeze=False, height_ratios=heights)
    for number, (ax, (arm, cells)) in enumerate(zip(axes.flat, maps.items(), strict=False)):
        named = cells.assign(reader=cells["layer"].astype(str) + cells["sublayer"] + cells["role"])
        mesh = weight_map(
            ax,
            named,
            "signed_share",
            row="reader",
            column="component_index",
            norm=Normalize(-top, top),
            cmap=shades,
            written=False,
            title=arm,
        )
        _depth_axes(ax, named)
        if number + across >= len(maps):
            ax.set_xlabel("embedding (e); attention and\nMLP output of each layer")
    for ax in axes.flat[len(maps) :]:
        ax.set_axis_off()
    for ax in axes[:, 0]:
        ax.set_ylabel("reading layer")
    colour_bar(list(axes.flat), mesh, "share of the read, signed", aspect=40)
    ring_note(where, later)


def _depth_axes(ax, cells):
    """Layers on both axes with a line between them, and which reads a layer has."""
    reads = cells.drop_duplicates("reader")
    reads = reads.assign(place=range(len(reads)))
    inside = reads[reads["sublayer"] != "out"]
    places = inside.groupby("layer")["place"]
    first, middle = places.min(), (places.min() + places.max() + 1) / 2
    step = max(1, len(first) // 12)
    rows = [(place, str(layer)) for layer, place in middle.items()][::step]
    rows += [(place + 0.5, "out") for place in reads["place"][reads["sublayer"] == "out"]]
    ax.set_yticks(*map(list, zip(*rows, strict=True)))
    across = range(0, len(first), step)
    ax.set_xticks([0.5, *(2 * k + 2 for k in across)], ["e", *map(str, across)])
    ax.hlines(
        first[1:], 0, [2 * layer + 1 for layer in first.index[1:]], color=MUTED, linewidth=0.5
    )
    roles = inside[inside["layer"] == inside["layer"].iloc[-1]]
    names = [
        role if role != "shared" else SUBLAYERS[sublayer]
        for sublayer, role in zip(roles["sublayer"], roles["role"], strict=True)
    ]
    text = f"rows of a layer:\n{', '.join(names)}"
    ax.text(1, 0.98, text, transform=ax.transAxes, ha="right", va="top", fontsize=6.5)


def _effective(where, counts):
    ax = where.subplots()
    series = {arm: (cells, "effective_components") for arm, cells in counts.items()}
    per_layer(ax, series, baseline="effective_components_init")
    ax.set_ylabel("exp(entropy)")
    ax.set_title("Effective number of components in MLP reads")
    from_zero(ax)
    ax.legend(loc="upper left", ncols=2)


def _plotted(maps, counts):
    parts = []
    for arm in maps:
        for cells, stat in ((maps[arm], "signed_share"), (counts[arm], "effective_components")):
            renamed = {name: name.replace(stat, "value") for name in cells if name.startswith(stat)}
            parts.append(cells.rename(columns=renamed).assign(arm=arm, number=stat))
    return pd.concat(parts, ignore_index=True).astype({"component_index": "Int64"})
