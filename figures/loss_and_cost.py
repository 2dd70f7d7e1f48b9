"""Loss and cost.

Held-out loss of every timed arm, as the paired difference from the transformer, beside what
training it costs: tokens a second and activations kept for the backward pass.
"""

import pandas as pd

from satlens.plotting.figures_cost import loss_against_cost
from satlens.report.effects import count
from satlens.report.over_seeds import REFERENCE, cost_of_arms, held_out, over_seeds, paired_losses
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "SATFormer (arXiv 2605.03953), RD-AttnRes (arXiv 2608.01075)"


def draw(run):
    cost = cost_of_arms(run)
    if not len(cost):
        raise NotDrawnError("needs the timing of the arms (bench)")
    losses = paired_losses(held_out(run))
    losses = losses[losses["arm"].isin(cost["arm"]) & (losses["arm"] != REFERENCE)]
    if not len(losses):
        raise NotDrawnError("needs the comparison of a timed arm with the transformer")
    means = over_seeds(losses, ["arm"], "difference").merge(cost, on="arm")
    seeds = losses[["arm", "seed", "difference"]].rename(columns={"difference": "value"})
    seeds = seeds.merge(cost, on="arm")
    bench, compared = run.study["bench"], run.study["comparison"]
    floor = bench.summary.get("noise_floor")
    plotted = pd.concat(
        [means.assign(mark="mean over seeds"), seeds.assign(mark="one seed")], ignore_index=True
    )
    if floor:
        again = {"arm": REFERENCE, "mark": "timed again", "speed": floor[1], "value": 0.0}
        again |= {"speed_low": floor[0], "speed_high": floor[2], "memory": 1.0}
        plotted = pd.concat([plotted, pd.DataFrame([again])], ignore_index=True)
    names = ["mark", "arm", "seed", "value", "low", "high", "n_seeds"]
    return Drawing(
        figure=loss_against_cost(means, seeds, floor),
        plotted=plotted[[*names, "speed", "speed_low", "speed_high", "memory"]],
        tables=[bench, compared],
        caption="Held-out loss minus the transformer's of the same seed, against training "
        "throughput (right is faster) and activation memory (left is smaller) relative to the "
        f"transformer's. Upright bars, left: 95 % t interval over {_counts(means)}, with an arrow "
        "where it goes on; the right panel's are the same. Small dots: single seeds. Level bars: "
        "quartiles of interleaved steps; grey: the transformer timed against itself.",
    )


def _counts(means):
    low, high = means["n_seeds"].min(), means["n_seeds"].max()
    return count(low, "seed") if low == high else f"{low} to {high} seeds"
