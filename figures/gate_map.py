"""Gates of every layer and head.

Mean gate and fraction of open gates, untrained and trained, mean over seeds. Heads of different
seeds have only their number in common, so each model's heads are put in order within a layer first,
untrained ones too: the order alone makes a slope, and the trained one has to be steeper.
"""

import pandas as pd

from satlens.plotting.heatmaps import colour_bar, head_map, limits_of
from satlens.plotting.style import DOUBLE, new_figure, styled
from satlens.report.effects import count
from satlens.report.over_seeds import by_seed, over_seeds, own_gates, ranked_heads
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "SATFormer (arXiv 2605.03953)"
STATS = {"mean": "mean gate", "open_fraction": "fraction open"}
STATES = {"untrained": "_init", "trained": ""}


def draw(run):
    found = own_gates(run, "sparsity")
    if found is None:
        raise NotDrawnError("needs the sparsity of an arm with gates (satformer)")
    arm, results = found
    table = by_seed(results)
    table = table[table["kind"] == "gate"]
    if any(stat + suffix not in table for stat in STATS for suffix in STATES.values()):
        raise NotDrawnError(f"needs the sparsity of {arm} beside the untrained model")
    maps = []
    for stat in STATS:
        for state, suffix in STATES.items():
            column = stat + suffix
            cells = over_seeds(ranked_heads(table, column), ["layer", "rank"], column)
            maps.append(cells.assign(stat=stat, state=state))
    plotted = pd.concat(maps).sort_values(
        ["stat", "state", "layer", "rank"], ignore_index=True, ascending=[True, False, True, True]
    )
    return Drawing(
        figure=picture(plotted),
        plotted=plotted[["stat", "state", "layer", "rank", "value", "low", "high", "n_seeds"]],
        tables=list(results.values()),
        caption=f"Gates of {arm} by layer and head, mean over {count(len(results), 'seed')}. "
        "Heads are in order of the panel's own statistic within each layer and seed, largest "
        "first. Intervals over seeds (95 % t) are in the CSV.",
    )


def picture(plotted):
    figure = new_figure(DOUBLE, min(4.0, 1.15 + 0.2 * plotted["layer"].nunique()))
    with styled():
        axes = list(figure.subplots(1, 4, sharey=True))
        for pair, (stat, label) in zip((axes[:2], axes[2:]), STATS.items(), strict=True):
            of_stat = plotted[plotted["stat"] == stat]
            signed = bool((of_stat["value"] < 0).any())
            limits = limits_of([of_stat], ["value"], signed)
            if stat == "open_fraction":
                limits = (0.0, 1.0)
            for ax, state in zip(pair, STATES, strict=True):
                cells = of_stat[of_stat["state"] == state].assign(head=lambda rows: rows["rank"])
                title = f"{label},\n{state}"
                mesh = head_map(ax, cells, "value", limits=limits, signed=signed, title=title)
                ax.set_xlabel("rank of head")
                if ax is not axes[0]:
                    ax.set_ylabel("")
            colour_bar(pair, mesh, label)
    return figure
