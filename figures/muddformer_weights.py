"""MUDDFormer's mean dynamic weights, way by way.

What the queries, keys, values and residual of each layer take of the embedding and of every
earlier state, averaged over tokens; the last read of the residual is the model's output.
"""

from satlens.plotting.heatmaps import colour_bar
from satlens.plotting.intervals import per_layer
from satlens.plotting.style import DOUBLE, new_figure, styled
from satlens.plotting.weight_maps import (
    mean_and_range,
    ring_note,
    spread,
    state_label,
    symmetric,
    weight_map,
)
from satlens.report.paper_figures import Drawing, of_variant

SOURCE = "MUDDFormer (arXiv 2502.12170)"
WAYS = {"q": "Queries", "k": "Keys", "v": "Values", "r": "Residual"}


def draw(run):
    arm, seeds = of_variant(run, "sparsity", "muddformer")
    weights = {seed: result.part("route_weights") for seed, result in seeds.items()}
    tables = {seed: part.table for seed, part in weights.items()}
    keys = ["layer", "sublayer", "role", "source", "source_index"]
    cells = mean_and_range(tables, keys, "weight")
    heights = [2 * (0.55 + 0.16 * min(max(cells["layer"].nunique(), 6), 16)), 2.4]
    figure = new_figure(DOUBLE, sum(heights))
    with styled():
        maps, below = figure.subfigures(2, 1, height_ratios=heights)
        _maps(maps, cells)
        _by_layer(below, cells)
        ring_note(maps, cells)
    return Drawing(
        figure=figure,
        plotted=cells.assign(arm=arm),
        tables=list(weights.values()),
        caption=f"Mean dynamic weights over tokens ({spread(len(tables), 'bars')}). Untrained, "
        "every way has 1 on the newest state and 0 elsewhere, a plain transformer.",
    )


def _maps(where, cells):
    rows = cells.assign(
        state=cells["source"].map(state_label),
        reader=cells["layer"].astype(str).where(cells["sublayer"] != "out", "out"),
    )
    axes = where.subplots(2, 2)
    norm, states = symmetric(cells, "weight"), list(dict.fromkeys(rows["state"]))
    for ax, (way, title) in zip(axes.flat, WAYS.items(), strict=True):
        mesh = weight_map(
            ax,
            rows[rows["role"] == way],
            "weight",
            row="reader",
            column="state",
            columns=states if way == "r" else states[:-1],
            norm=norm,
            title=f"{title} ({way})",
        )
    for ax in axes[:, 0]:
        ax.set_ylabel("reading layer")
    for ax in axes[1]:
        ax.set_xlabel("embedding, state after layer")
    colour_bar(list(axes.flat), mesh, "mean weight", aspect=40)


def _by_layer(where, cells):
    inside = cells[cells["sublayer"] != "out"]
    newest = inside["source_index"] == inside.groupby("layer")["source_index"].transform("max")
    chosen = {"embedding": inside["source_index"] == 0, "newest state": newest}
    for ax, (name, rows) in zip(where.subplots(1, 2), chosen.items(), strict=True):
        part = inside[rows]
        series = {way: (part[part["role"] == way], "weight") for way in WAYS}
        per_layer(ax, series, baseline="weight_init")
        ax.set_title(f"Weight of the {name}")
        ax.set_xlabel("reading layer")
        ax.set_ylabel("mean weight")
        if name == "embedding":
            ax.legend(loc="best", ncols=2)
