"""Open gates by depth.

The fraction of tokens whose gate is open, averaged over the heads of a layer, beside the same model
untrained: a ReLU gate that never learned anything is open half of the time.
"""

import pandas as pd

from satlens.plotting.style import COLUMN, MUTED, colour, new_figure, point_range, styled
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "SATFormer (arXiv 2605.03953)"


def draw(run):
    found = run.of("sparsity").get("satformer", {})
    if not found:
        raise NotDrawnError("needs the sparsity of an arm satformer")
    rows = []
    for seed, result in found.items():
        gates = result.table[result.table["kind"] == "gate"]
        for state, column in (("trained", "open_fraction"), ("untrained", "open_fraction_init")):
            means = gates.groupby("layer")[column].mean()
            rows += [
                {"state": state, "seed": seed, "layer": layer, "open_fraction": value}
                for layer, value in means.items()
            ]
    plotted = pd.DataFrame(rows)
    figure = new_figure(COLUMN, 2.3)
    with styled():
        ax = figure.subplots()
        for state, line in (("untrained", MUTED), ("trained", colour(0))):
            of_seeds = plotted[plotted["state"] == state].groupby("layer")["open_fraction"]
            mean, low, high = of_seeds.mean(), of_seeds.min(), of_seeds.max()
            ax.plot(mean.index, mean, color=line, linewidth=0.8)
            point_range(ax, mean.index, mean, low, high, colour=line, label=state)
        ax.set_ylim(0, 1)
        ax.set_xlabel("layer")
        ax.set_ylabel("fraction of open gates")
        ax.legend(loc="lower right")
    return Drawing(
        figure=figure,
        plotted=plotted,
        tables=list(found.values()),
        caption=f"Fraction of tokens with an open gate, mean over heads; bars span {len(found)} "
        "seeds. Grey: the same models untrained.",
    )
