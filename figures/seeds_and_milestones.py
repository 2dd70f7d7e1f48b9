"""Paired differences by seed and along training.

Every contrast of a study that has two seeds or more. Above: held-out loss of the final
checkpoints. Below: validation loss while training. The mean over seeds stands there twice, with
Student's interval and with the bootstrap that published bars are often made of.
"""

import numpy as np
import pandas as pd

from satlens.analysis.stats import MIN_SEEDS, seed_comparison
from satlens.plotting.paired import (
    BOOTSTRAP,
    SEED,
    T,
    contrast_marks,
    is_cut,
    limits,
    paired_milestones,
    paired_rows,
)
from satlens.plotting.style import DOUBLE, new_figure, styled
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "RD-AttnRes (arXiv 2608.01075)"
ACROSS = 4
MINUS = "\N{MINUS SIGN}"
FINAL, TRAINING = "held-out test", "validation, while training"


def draw(run):
    if "comparison" not in run.study or "curves" not in run.study:
        raise NotDrawnError("needs the comparison and the curves of a study")
    comparison, curves = run.study["comparison"], run.study["curves"]
    several = comparison.table[comparison.table["n_seeds"] >= 2]
    if several.empty:
        raise NotDrawnError("needs a contrast with two seeds or more")
    pairs = list(zip(several["first"], several["second"], strict=True))
    final = pd.concat([contrast_marks(row) for _, row in several.iterrows()], ignore_index=True)
    final = final.assign(loss=FINAL, tokens=None)
    along = pd.concat([training_marks(curves.table, *pair) for pair in pairs], ignore_index=True)
    columns = ["first", "second", "loss", "tokens", "mark", "seed", "value", "low", "high"]
    plotted = pd.concat([final, along], ignore_index=True)[[*columns, "n_seeds"]]
    return Drawing(
        figure=picture(pairs, final, along, comparison.summary.get("noise_floor")),
        plotted=plotted.astype({"seed": "Int64", "tokens": "Int64"}),
        tables=[comparison, curves],
        caption=caption(final, along, int(comparison.table["n_documents"].max())),
    )


def training_marks(table, first, second):
    """Marks of one contrast at every evaluation that its runs share."""
    wide = table.pivot_table(index=["arm", "seed"], columns="tokens", values="val_loss")
    mine, theirs = wide.loc[first], wide.loc[second]
    seeds = mine.index.intersection(theirs.index)
    mine, theirs = mine.loc[seeds], theirs.loc[seeds]
    tokens = [n for n in wide if mine[n].notna().all() and theirs[n].notna().all()]
    found = seed_comparison(mine[tokens].to_numpy(), theirs[tokens].to_numpy())
    marks = [
        pd.DataFrame({"mark": SEED, "seed": k, "tokens": tokens, "value": line})
        for k, line in zip(seeds, found.differences, strict=True)
    ]
    intervals = {T: found.t, BOOTSTRAP: found.percentile}
    for mark, interval in intervals.items():
        if len(seeds) >= (MIN_SEEDS if mark == BOOTSTRAP else 2):
            of = {"value": interval.estimate, "low": interval.low, "high": interval.high}
            marks.append(pd.DataFrame({"mark": mark, "tokens": tokens, **of}))
    same = {"first": first, "second": second, "n_seeds": len(seeds)}
    return pd.concat(marks, ignore_index=True).assign(loss=TRAINING, **same)


def picture(pairs, final, along, noise_floor):
    n_rows = -(-len(pairs) // ACROSS)
    heights = [0.95 + 0.21 * len(pairs), 0.2 + 1.22 * n_rows]
    figure = new_figure(DOUBLE, sum(heights))
    with styled():
        above, below = figure.subfigures(2, 1, height_ratios=heights)
        ax = above.subplots()
        place = {pair: row for row, pair in enumerate(pairs)}
        rows = [place[pair] for pair in zip(final["first"], final["second"], strict=True)]
        labels = [f"{first} {MINUS} {second}" for first, second in pairs]
        paired_rows(ax, labels, final.assign(row=rows), noise_floor=noise_floor)
        ax.set_xlabel("difference in held-out NLL of the final checkpoints (nats/token)")
        above.legend(loc="outside upper left", ncols=2)
        axes = below.subplots(
            n_rows, min(ACROSS, len(pairs)), sharex=True, sharey=True, squeeze=False
        )
        for ax, (first, second) in zip(axes.flat, pairs, strict=False):
            chosen = along[(along["first"] == first) & (along["second"] == second)]
            paired_milestones(ax, chosen, title=f"{first}\n{MINUS} {second}")
        for spare in axes.flat[len(pairs) :]:
            spare.set_axis_off()
        for ax in axes.flat[: len(pairs)][-axes.shape[1] :]:
            ax.tick_params(labelbottom=True)
        axes[0, 0].set_ylim(*limits(along))
        below.supylabel("difference in validation NLL (nats/token)", fontsize=7.5)
        below.supxlabel("training tokens", fontsize=7.5)
    return figure


def caption(final, along, n_documents):
    seeds = np.unique(final["n_seeds"])
    counts = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    said = (
        f"Paired differences in loss, first minus second arm, over {counts} seeds that share "
        "initial weights, data order and evaluation tokens. Above: NLL of final checkpoints on "
        f"{n_documents} held-out documents. Below: validation NLL while training, grey lines the "
        "seeds. Blue: 95 % Student's t interval of the mean over seeds. Orange: 95 % percentile "
        f"bootstrap over seeds, which needs {MIN_SEEDS} seeds and is too narrow for few."
    )
    if is_cut(final) or is_cut(along):
        said += " Intervals of two seeds may go on beyond the axis; the CSV has their ends."
    return said
