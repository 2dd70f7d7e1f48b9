"""Open gates by depth.

The fraction of tokens whose gate is open, averaged over the heads of a layer, beside the same model
untrained: a ReLU gate that never learned anything is open half of the time.
"""

import pandas as pd

from satlens.plotting.style import COLUMN, MUTED, colour, new_figure, point_range, styled
from satlens.report.effects import count
from satlens.report.over_seeds import by_seed, over_seeds, own_gates
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "SATFormer (arXiv 2605.03953)"
STATES = {
    "untrained": ("open_fraction_init", MUTED, 0.1, "s"),
    "trained": ("open_fraction", colour(0), -0.1, "o"),
}


def draw(run):
    found = own_gates(run, "sparsity")
    if found is None:
        raise NotDrawnError("needs the sparsity of an arm with gates (satformer)")
    arm, results = found
    gates = by_seed(results)
    gates = gates[gates["kind"] == "gate"]
    figure = new_figure(COLUMN, 2.4)
    plotted = []
    with styled():
        ax = figure.subplots()
        for state, (column, ink, shift, marker) in STATES.items():
            if column not in gates:
                continue
            seeds = gates.groupby(["seed", "layer"])[column].mean().rename("value").reset_index()
            means = over_seeds(seeds, ["layer"], "value")
            x = means["layer"] + shift
            for _, of_seed in seeds.groupby("seed"):
                ax.plot(
                    of_seed["layer"] + shift, of_seed["value"], color=ink, linewidth=0.6, alpha=0.45
                )
            ends = means["low"], means["high"]
            point_range(ax, x, means["value"], *ends, colour=ink, marker=marker, label=state)
            plotted += [
                means.assign(state=state, mark="mean over seeds"),
                seeds.assign(state=state, mark="one seed"),
            ]
        ax.set_ylim(0, 1)
        ax.set_xticks(sorted(gates["layer"].unique()))
        ax.set_xlabel("layer")
        ax.set_ylabel("fraction of open gates")
        ax.grid(axis="y")
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    of_one = (gates["open_fraction_high"] - gates["open_fraction_low"]).median() / 2
    columns = ["state", "mark", "seed", "layer", "value", "low", "high", "n_seeds"]
    return Drawing(
        figure=figure,
        plotted=pd.concat(plotted, ignore_index=True)[columns],
        tables=list(results.values()),
        caption=f"Fraction of tokens with an open gate in {arm}, mean over the heads of a layer. "
        f"Thin lines: {count(len(results), 'seed')}; points: their mean with its 95 % t interval, "
        "which speaks about other seeds, knows no bounds and is cut at 0 and 1. About other "
        "documents: one head of one seed is known to "
        f"\N{PLUS-MINUS SIGN}{of_one:.3f} (median half-width, 95 % bootstrap; not drawn).",
    )
