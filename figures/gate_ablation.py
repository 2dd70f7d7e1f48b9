"""What gates are worth.

Loss of trained models whose gates are replaced, for the whole model, for each layer and for each
head, beside the loss of the transformer that was trained without gates.
"""

import numpy as np
import pandas as pd

from satlens.plotting.intervals import heads_of_seeds
from satlens.plotting.style import (
    DOUBLE,
    MARKERS,
    MUTED,
    colour,
    new_figure,
    point_range,
    styled,
    zero_line,
)
from satlens.report.effects import ALPHA, count
from satlens.report.over_seeds import (
    REFERENCE,
    by_seed,
    held_out,
    over_seeds,
    own_gates,
    paired_losses,
)
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "SATFormer (arXiv 2605.03953)"
NEVER = "trained without access"
ENDS = {"dnll": "value", "dnll_low": "low", "dnll_high": "high"}


def draw(run):
    found = own_gates(run, "ablation")
    if found is None:
        raise NotDrawnError("needs the ablation of an arm with gates (satformer)")
    own, _ = found
    # Static gates beside them: what a model loses whose value residual is one number a layer.
    arms = {arm: rs for arm, rs in run.of("ablation").items() if arm == own or _static(run, arm)}
    table = pd.concat([by_seed(rs).assign(arm=arm) for arm, rs in arms.items()], ignore_index=True)
    table = table[table["target"] == "gate"].rename(columns=ENDS)
    table["established"] = table["p_adjusted"] < ALPHA
    whole = table[table["scope"] == "model"]
    if not len(whole):
        raise NotDrawnError(f"needs an ablation of all gates of {own}")
    parts = table[table["scope"].isin(["layer", "head"]) & (table["arm"] == own)]
    without = _without(run, list(arms))
    tables = [result for results in arms.values() for result in results.values()]
    if len(without):
        tables.append(run.study["comparison"])
    names = ["arm", "kind", "scope", "layer", "head", "seed", "value", "low", "high"]
    rows = [whole[names], parts[[*names, "established"]]]
    if len(without):
        rows.append(without.assign(kind=NEVER, scope="model"))
    seeds = sorted(parts["seed"].unique())
    tokens = f"{whole['n_tokens'].max():,} tokens"
    said = ""
    if len(without):
        said = " Diamonds: the transformer minus the arm over paired seeds with its 95 % t "
        said += f"interval, on {run.study['comparison'].table['n_tokens'].max():,} tokens."
    return Drawing(
        figure=picture(whole, parts, without),
        plotted=pd.concat(rows, ignore_index=True),
        tables=tables,
        caption="Change in held-out loss when gates of a trained model are replaced. Whole model: "
        "a point a seed with its 95 % bootstrap interval over documents, "
        f"{tokens}.{said}"
        f" Layers and heads of {own}: a point a seed, heads in groups, a group a seed "
        f"({count(len(seeds), 'seed')}); filled where max-T adjusted p < 0.05 within the seed. "
        "Shuffled gates come from any position of a context, later ones too.",
    )


def _static(run, arm):
    return run.variant(arm) == "resformer"


def _without(run, arms):
    """The transformer's loss minus each arm's: the cost of never having had gates."""
    losses = paired_losses(held_out(run))
    losses = losses[losses["arm"].isin(arms) & (losses["arm"] != REFERENCE)]
    losses = losses.assign(difference=-losses["difference"])
    return over_seeds(losses, ["arm"], "difference")


def picture(whole, parts, without):
    kinds = list(dict.fromkeys(whole["kind"]))
    looks = {kind: (colour(i), MARKERS[i % len(MARKERS)]) for i, kind in enumerate(kinds)}
    headed = parts[parts["scope"] == "head"]
    shown = [kind for kind in kinds if (headed["kind"] == kind).any()]
    heights = [1.9, *([0.95] * len(shown))]
    figure = new_figure(DOUBLE, sum(heights) + 0.4)
    with styled():
        ratios = [1.9, sum(heights[1:])] if shown else [1.0]
        top, *rest = figure.subfigures(len(ratios), 1, height_ratios=ratios, squeeze=False)[:, 0]
        left, right = top.subplots(1, 2, width_ratios=[1, 1.35])
        _whole(left, whole, without, looks)
        _layers(right, parts[parts["scope"] == "layer"], looks)
        if shown:
            axes = rest[0].subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
            for ax, kind in zip(axes, shown, strict=True):
                _points(ax, headed[headed["kind"] == kind], *looks[kind])
                ax.set_title(f"One head at a time: {kind}")
                ax.set_ylabel("")
                if ax is not axes[-1]:
                    ax.set_xlabel("")
            rest[0].supylabel("change in NLL (nats/token)", fontsize=7.5)
    return figure


def _whole(ax, whole, without, looks):
    labels = []
    for (arm, kind), rows in whole.groupby(["arm", "kind"], sort=False):
        ink, marker = looks[kind]
        place = len(labels) + np.linspace(-0.22, 0.22, len(rows)) * (len(rows) > 1)
        ends = rows["low"], rows["high"]
        point_range(ax, place, rows["value"], *ends, horizontal=True, colour=ink, marker=marker)
        labels.append(f"{arm}: {kind}")
    for _, row in without.iterrows():
        place, ends = [len(labels)], ([row["low"]], [row["high"]])
        point_range(ax, place, [row["value"]], *ends, horizontal=True, colour=MUTED, marker="D")
        labels.append(f"{row['arm']}: {NEVER}")
    zero_line(ax, "x")
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("change in NLL (nats/token)")
    ax.grid(axis="x")
    ratio = ax.secondary_xaxis("top", functions=(np.exp, _log))
    ratio.set_xlabel("perplexity ratio")
    ax.set_title("Whole model")


def _layers(ax, layers, looks):
    kinds = [kind for kind in looks if (layers["kind"] == kind).any()]
    for number, kind in enumerate(kinds):
        rows = layers[layers["kind"] == kind]
        ink, marker = looks[kind]
        shift = (number - (len(kinds) - 1) / 2) * 0.8 / len(kinds)
        shifted = rows.assign(layer=rows["layer"].astype(float) + shift)
        _points(ax, shifted, ink, marker, kind, width=0.6 / len(kinds))
    ticks = sorted(layers["layer"].dropna().unique())
    ax.set_xticks([int(tick) for tick in ticks])
    ax.legend(loc="upper left")
    ax.set_title("One layer at a time")


def _points(ax, rows, ink, marker, label=None, **options):
    rows = rows.rename(columns={"low": "value_low", "high": "value_high"})
    options |= {"established": "established", "marker": marker, "label": label}
    heads_of_seeds(ax, rows, "value", colours=[ink], **options)
    zero_line(ax)
    ax.set_ylabel("change in NLL (nats/token)")


def _log(ratio):
    """The logarithm, also of the limits from 0 that an axis has before anything is drawn."""
    return np.log(np.maximum(ratio, 1e-9))
