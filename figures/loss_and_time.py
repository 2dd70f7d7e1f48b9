"""Loss along training time.

Validation loss against the time that training would take on one quiet machine: the tokens seen
times the seconds a token of the arm, which were timed apart, step by step in turn with the others.
"""

import pandas as pd

from satlens.plotting.figures_cost import loss_against_time
from satlens.report.effects import count
from satlens.report.over_seeds import REFERENCE, cost_of_arms, over_seeds, paired_losses
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "SATFormer (arXiv 2605.03953)"


def draw(run):
    cost = cost_of_arms(run)
    if not len(cost):
        raise NotDrawnError("needs the timing of the arms (bench)")
    curves = run.study.get("curves")
    if curves is None or REFERENCE not in set(curves.table["arm"]):
        raise NotDrawnError("needs losses along training (curves) of the transformer and others")
    losses = curves.table.rename(columns={"val_loss": "loss"})
    losses = paired_losses(losses[losses["arm"].isin(cost["arm"])], ["tokens"])
    if set(losses["arm"]) == {REFERENCE}:
        raise NotDrawnError("needs losses along training (curves) of the transformer and others")
    base = over_seeds(losses[losses["arm"] == REFERENCE], ["tokens"], "loss")
    rows = over_seeds(losses, ["arm", "tokens"], "difference")
    level = rows["tokens"].map(base.set_index("tokens")["value"])
    # An arm of fewer seeds is set off from the transformer's mean by its paired difference: seeds
    # that it lacks neither lift nor lower it.
    rows[["value", "low", "high"]] = rows[["value", "low", "high"]].add(level, axis=0)
    rows.loc[rows["arm"] == REFERENCE, ["low", "high"]] = float("nan")
    rows = rows.merge(cost, on="arm")
    share = rows["tokens"] / rows["tokens"].max()
    for name, speed in (("", "speed"), ("_low", "speed_high"), ("_high", "speed_low")):
        rows[f"time{name}"] = share / rows[speed]
    columns = ["arm", "tokens", "time", "time_low", "time_high", "value", "low", "high", "n_seeds"]
    plotted = pd.DataFrame(rows[columns])
    return Drawing(
        figure=loss_against_time(plotted),
        plotted=plotted,
        tables=[curves, run.study["bench"]],
        caption="Validation loss against training time, in units of the transformer's whole "
        "training: share of the tokens times the median ratio of seconds a token, measured by "
        "interleaved steps, not by the clocks of the training runs. Transformer: mean over "
        f"{count(base['n_seeds'].max(), 'seed')}; others: that mean plus the paired difference. "
        "Left: from the first evaluation after the start; right: the end, with 95 % t intervals "
        "of the paired difference over seeds (cut at the frame) and quartiles of time.",
    )
