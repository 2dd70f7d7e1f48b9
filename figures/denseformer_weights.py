"""DenseFormer's weights over depth.

What the average after each layer takes of the embedding and of every earlier layer's state, and
how the weights of the embedding and of the newest state run over depth.
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

SOURCE = "DenseFormer (arXiv 2402.02622)"


def draw(run):
    arm, seeds = of_variant(run, "sparsity", "denseformer")
    weights = {seed: result.part("route_weights") for seed, result in seeds.items()}
    tables = {seed: part.table for seed, part in weights.items()}
    cells = mean_and_range(tables, ["layer", "source", "source_index"], "weight")
    figure = new_figure(DOUBLE, 2.6)
    with styled():
        left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
        _map(left, cells)
        newest = cells["source_index"] == cells.groupby("layer")["source_index"].transform("max")
        series = {"newest state": cells[newest], "embedding": cells[cells["source_index"] == 0]}
        per_layer(
            right,
            {name: (rows, "weight") for name, rows in series.items()},
            baseline="weight_init",
        )
        right.set_title("Embedding and newest state")
        right.set_xlabel("average after layer")
        right.set_ylabel("weight")
        right.legend(loc="best")
        ring_note(figure, cells)
    return Drawing(
        figure=figure,
        plotted=cells.assign(arm=arm),
        tables=list(weights.values()),
        caption=f"Weights of the average after each layer ({spread(len(tables), 'bars')}); a plain "
        "transformer, and the untrained model, have 1 on the newest state and 0 elsewhere.",
    )


def _map(ax, cells):
    mesh = weight_map(
        ax,
        cells.assign(state=cells["source"].map(state_label)),
        "weight",
        row="layer",
        column="state",
        norm=symmetric(cells, "weight"),
        title="Weight of each state",
    )
    ax.set_xlabel("embedding, state after layer")
    ax.set_ylabel("average after layer")
    colour_bar(ax, mesh, "weight")
