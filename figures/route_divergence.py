"""How far routes of one read diverge.

Jensen-Shannon divergence between the routes of two roles over the same sources, layer by layer:
of every token's routes, averaged over tokens, and of the routes averaged over tokens first. Every
seed is drawn; the mean over layers stands at the right.
"""

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from satlens.plotting.style import (
    COLUMN,
    DOUBLE,
    MARKERS,
    MUTED,
    colour,
    new_figure,
    point_range,
    styled,
)
from satlens.report.over_seeds import by_seed, over_seeds
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "RD-AttnRes (arXiv 2608.01075)"
STATS = {"js_token": "mean over tokens", "js_mean": "of mean routes"}
ALL = "layers' mean"
ACROSS = 3
WHAT = ["arm", "comparison", "stat", "layer", "mark"]


def draw(run):
    found = {
        arm: {k: each for k, each in seeds.items() if each.summary.get("over") == "sources"}
        for arm, seeds in run.of("divergence").items()
    }
    found = {arm: seeds for arm, seeds in found.items() if seeds}
    if all(result.table.empty for seeds in found.values() for result in seeds.values()):
        raise NotDrawnError("needs the divergence of routes over the same sources")
    plotted = pd.concat(
        [
            marks(by_seed(seeds), stat).assign(arm=arm)
            for arm, seeds in found.items()
            for stat in STATS
        ],
        ignore_index=True,
    )
    tables = [result for seeds in found.values() for result in seeds.values()]
    scales = {(result.summary["unit"], result.summary["ceiling"]) for result in tables}
    if len(scales) > 1:
        raise NotDrawnError("needs divergences in one unit")
    ((unit, ceiling),) = scales
    flags = pd.concat([result.table["flags"].fillna("") for result in tables])
    by_norm = bool(flags.str.contains("norm_rectified").any())
    return Drawing(
        figure=picture(plotted, unit),
        plotted=plotted[[*WHAT, "seed", "value", "low", "high", "n_seeds"]],
        tables=tables,
        caption=caption(plotted, f"in {unit} (at most {ceiling:.3f})", by_norm),
    )


def marks(table, stat):
    """Points of seeds, means over seeds and untrained levels of one statistic."""
    table = table.assign(value=table[stat], low=table[f"{stat}_low"], high=table[f"{stat}_high"])
    table["init"] = table.get(f"{stat}_init", np.nan)
    several = table[table["n_sources"] > 1]
    whole = several.groupby(["comparison", "seed"], sort=False)[["value", "init"]].mean()
    points = pd.concat([table, whole.reset_index()], ignore_index=True)
    points["place"] = points["layer"].fillna(-1).astype(int)  # keys have no gaps
    means = over_seeds(points, ["comparison", "place"], "value").assign(mark="mean of seeds")
    untrained = over_seeds(points, ["comparison", "place"], "init")[
        ["comparison", "place", "value"]
    ]
    kept = ["comparison", "place", "seed", "value", "low", "high"]
    parts = [points[kept].assign(mark="seed"), means, untrained.assign(mark="untrained")]
    rows = pd.concat(parts, ignore_index=True).assign(stat=stat)
    rows["layer"] = rows["place"].astype(str).where(rows["place"] >= 0, ALL)
    return rows.astype({"seed": "Int64", "n_seeds": "Int64"})


def picture(plotted, unit):
    panels = list(dict.fromkeys(zip(plotted["arm"], plotted["comparison"], strict=True)))
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    figure = new_figure(
        COLUMN if across == 1 else DOUBLE, 0.35 + (2.2 if down == 1 else 1.7) * down
    )
    with styled():
        axes = figure.subplots(down, across, squeeze=False, sharey=True, sharex=False)
        for ax, (arm, comparison) in zip(axes.flat, panels, strict=False):
            chosen = (plotted["arm"] == arm) & (plotted["comparison"] == comparison)
            panel(ax, plotted[chosen])
            ax.set_title(f"{arm}: {comparison.removeprefix('attn ').replace('|', ' against ')}")
        for spare in axes.flat[len(panels) :]:
            spare.set_axis_off()
        for ax in axes[:, 0]:
            ax.set_ylabel(f"JS divergence ({unit})")
        axes[0, 0].set_ylim(bottom=0)
        legend(figure, "untrained" in set(plotted["mark"]))
    return figure


def panel(ax, rows):
    layers = sorted(int(layer) for layer in rows["layer"].unique() if layer != ALL)
    place = {str(layer): layer for layer in layers} | {ALL: layers[-1] + 2.0}
    rows = rows.assign(x=rows["layer"].map(place).astype(float))
    level = rows[(rows["mark"] == "untrained") & (rows["stat"] == "js_token")]
    dashes = {"color": MUTED, "linewidth": 1.6, "clip_on": False}
    ax.hlines(level["value"], level["x"] - 0.35, level["x"] + 0.35, **dashes)
    for number, stat in enumerate(STATS):
        statistic(ax, rows[rows["stat"] == stat], number)
    ax.set_xticks([*layers, place[ALL]], [*map(str, layers), "mean"])
    ax.set_xlim(layers[0] - 0.6, place[ALL] + 0.9)
    ax.set_xlabel("layer")
    ax.grid(axis="y")


def statistic(ax, rows, number):
    """Seeds side by side, a line through their means, a diamond for the mean over layers."""
    side = 2 * number - 1
    look = {"colour": colour(number), "marker": MARKERS[number]}
    apart = np.where(rows["layer"] == ALL, 0.38, 0.17) * side
    rows = rows.assign(x=rows["x"] + apart)
    seeds = rows[rows["mark"] == "seed"]
    order = seeds["seed"].rank(method="dense") - (seeds["seed"].nunique() + 1) / 2
    _points(
        ax, seeds.assign(x=seeds["x"] + 0.04 * order.astype(float)), filled=False, size=2, **look
    )
    means = rows[rows["mark"] == "mean of seeds"]
    inside = means[means["layer"] != ALL]
    ax.plot(inside["x"], inside["value"], color=look["colour"], linewidth=0.9)
    whole = means[means["layer"] == ALL]
    _points(ax, whole.assign(x=whole["x"] + 0.26 * side), size=3.2, **look | {"marker": "D"})


def _points(ax, rows, **look):
    low, high = (rows[end].to_numpy(dtype=float) for end in ("low", "high"))
    point_range(ax, rows["x"], rows["value"], low, high, **look)


def legend(figure, untrained):
    marks = [
        Line2D([], [], color=colour(i), marker=MARKERS[i], markersize=3, markerfacecolor="white")
        for i in range(len(STATS))
    ]
    names = [*STATS.values()]
    if untrained:
        marks.append(Line2D([], [], color=MUTED, linewidth=1.6))
        names.append("untrained")
    figure.legend(marks, names, loc="outside upper left", ncols=3, columnspacing=1.2)


def caption(plotted, scale, by_norm):
    n = plotted.loc[plotted["mark"] == "mean of seeds", ["arm", "n_seeds"]]
    counts = n.groupby("arm", sort=False)["n_seeds"].max()
    said = (
        f"Jensen-Shannon divergence {scale} between routes over the same sources. Small marks: "
        "single seeds, bars their 95 % bootstrap over documents (seeds: "
        f"{', '.join(f'{arm} {k}' for arm, k in counts.items())}); lines: mean over seeds; "
        "diamonds: mean over the layers that read several sources, with the 95 % t interval over "
        "seeds. "
    )
    if "untrained" in set(plotted["mark"]):
        said += "Grey: untrained. "
    said += "A read of one source is 0 by definition."
    if by_norm:
        said += " Signed weights are compared by the share of norms that each source brings."
    return said
