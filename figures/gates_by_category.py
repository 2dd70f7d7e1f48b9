"""Gates by token category.

How far and how often gates open on content words, function words and the rest, and how the first
two differ in each head once frequency and position are held fixed.
"""

import pandas as pd

from satlens.plotting.intervals import heads_of_seeds, per_layer
from satlens.plotting.style import DOUBLE, colour, new_figure, styled, zero_line
from satlens.report.effects import ALPHA, MINUS, count
from satlens.report.over_seeds import by_seed, over_seeds, own_gates
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "SATFormer (arXiv 2605.03953)"
STATS = {"mean": "mean gate", "open_fraction": "fraction of open gates"}
CONTRAST = "delta_controlled"
SHADES = (colour(0), colour(5))
"""Of seeds in turn: two blues."""


def draw(run):
    found = own_gates(run, "categories")
    if found is None:
        raise NotDrawnError("needs the token categories of an arm with gates (satformer)")
    arm, results = found
    table = by_seed(results)
    table = table[(table["kind"] == "gate") & (table["category"] != "none")]
    if table.empty:
        raise NotDrawnError(f"needs the token categories of the gates of {arm}")
    if "by" in table:
        table = table[table["by"] == table["by"].iloc[0]]
    shown = [stat for stat in STATS if stat in table]
    keys = ["category", "layer"]
    means = {}
    for stat in shown:
        of_layers = table.groupby(["seed", *keys], sort=False)[stat].mean().reset_index()
        means[stat] = over_seeds(of_layers, keys, stat)
    contrasts = by_seed(results, "categories_contrasts")
    if len(contrasts):
        contrasts = contrasts[contrasts["kind"] == "gate"].reset_index(drop=True)
    if contrasts.empty:
        raise NotDrawnError(f"needs the contrasts of token categories of {arm}")
    contrasts["established"] = contrasts["p_controlled_adjusted"] < ALPHA
    figure = picture(means, contrasts)
    ends = {CONTRAST: "value", f"{CONTRAST}_low": "low", f"{CONTRAST}_high": "high"}
    plotted = [rows.assign(stat=stat, mark="mean over seeds") for stat, rows in means.items()]
    contrasts = contrasts.rename(columns=ends).assign(stat=CONTRAST, mark="one seed")
    plotted.append(contrasts)
    names = ["stat", "mark", "contrast", "category", "layer", "head", "seed"]
    names += ["value", "low", "high", "n_seeds", "established"]
    return Drawing(
        figure=figure,
        plotted=pd.concat(plotted, ignore_index=True)[names],
        tables=list(results.values()),
        caption=f"Gates of {arm} by category of the token. Above: mean over the heads of a layer "
        f"and {count(len(results), 'seed')} with its 95 % t interval over seeds, cut at "
        "values that no gate has. Below: "
        f"{contrasts['contrast'].iloc[0]} in mean gate with frequency and position held fixed, a "
        "point a head, a group a seed (in two shades), with 95 % bootstrap intervals over "
        "documents; filled where max-T adjusted p < 0.05 within the seed.",
    )


def picture(means, contrasts):
    figure = new_figure(DOUBLE, 4.3)
    name = contrasts["contrast"].iloc[0].replace("-", MINUS)
    with styled():
        upper, lower = figure.subfigures(2, 1, height_ratios=[1, 1.05])
        axes = upper.subplots(1, len(means), squeeze=False)[0]
        for ax, (stat, rows) in zip(axes, means.items(), strict=True):
            rows = rows.rename(columns={"low": "value_low", "high": "value_high"})
            names = dict.fromkeys(rows["category"])
            per_layer(ax, {name: (rows[rows["category"] == name], "value") for name in names})
            ax.set_ylabel(STATS[stat])
            if (rows["value"] >= 0).all():
                ax.set_ylim(0, 1 if stat == "open_fraction" else None)
        upper.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=4)
        ax = lower.subplots()
        heads_of_seeds(ax, contrasts, CONTRAST, colours=SHADES, established="established")
        zero_line(ax)
        ax.set_ylabel(f"{name}\nin mean gate, controlled")
    return figure
