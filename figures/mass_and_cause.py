"""Mass and cause: the weight of a unit beside what removing it costs.

A unit is a head of a gate or a source of a route, its mass what the model puts there, its cost the
exact change in loss without it. Units that are heavy and cheap, or light and costly, are named.
"""

import pandas as pd

from satlens.plotting.figures_attribution import MASS, name_units, points, wide_axes
from satlens.plotting.intervals import forest
from satlens.plotting.style import (
    DOUBLE,
    INK,
    MARKERS,
    MUTED,
    carries,
    colour,
    new_figure,
    styled,
    zero_line,
)
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "mass and cause of routes (arXiv 2606.13168); satlens for gates"
_WIDE = (
    "Where few units cost far more than most the vertical axis is logarithmic in both directions, "
    "linear about 0. "
)
RANKS = {"mass": "mass_dnll", "second-order estimate": "fisher_dnll"}
_CORRELATION = "rank_correlation"
KEPT = ["mass", "mass_low", "mass_high", "dnll", "dnll_low", "dnll_high", "rank_difference"]


def draw(run):
    found, units = run.of("attribution"), {}
    for arm, seeds in found.items():
        rows = pd.concat([each.table.assign(seed=seed) for seed, each in seeds.items()])
        for (kind, measure), part in rows[rows["dnll"].notna()].groupby(["kind", "measure"]):
            units[arm, kind, measure] = part
    if not units:
        raise NotDrawnError("needs the attribution of an arm with units removed exactly")
    ranks = _ranks(found)
    n_panels = len(units) + 1
    across = 2 if n_panels in (2, 4) else 3
    figure = new_figure(DOUBLE, 2.7 * -(-n_panels // across))
    with styled():
        axes = figure.subplots(-(-n_panels // across), across, squeeze=False).ravel()
        for ax, ((arm, kind, measure), part) in zip(axes, units.items(), strict=False):
            _units(ax, part)
            ax.set_title(f"{arm}: {'gates' if kind == 'gate' else 'routes'}")
            ax.set_xlabel(MASS[measure])
        axes[0].set_ylabel("change in NLL without it (nats/token)")
        wide = any(ax.get_yscale() == "symlog" for ax in axes)
        _correlations(axes[len(units)], ranks)
        for ax in axes[n_panels:]:
            ax.set_axis_off()
        figure.supxlabel(
            "orange: mass and cost disagree; marker: seed", fontsize=6.5, x=0.99, ha="right"
        )
    most = max(len(seeds) for seeds in found.values())
    return Drawing(
        figure=figure,
        plotted=pd.concat([_plotted(units), ranks], ignore_index=True).astype({"layer": "Int64"}),
        tables=[each for seeds in found.values() for each in seeds.values()],
        caption="Each mark is one head's gate or one source of one read; its lines are 95 % "
        "intervals over documents. Coloured: units at least half of the ranks apart by mass and "
        "by cost and, by both intervals, on opposite sides of the median unit; the furthest are "
        f"named. {_WIDE if wide else ''}Last panel: rank correlation with the exact cost of every "
        f"checkpoint, 95 % over documents. {most} seed{'s' * (most > 1)}, a marker each. Cost is "
        "not usefulness: the rest of the model was trained with the unit.",
    )


def _units(ax, rows):
    apart = carries(rows, "disagrees", "mass")
    for number, seed in enumerate(sorted(rows["seed"].unique())):
        for chosen, shade in ((~apart, MUTED), (apart, colour(1))):
            points(
                ax,
                rows[chosen & (rows["seed"] == seed)],
                "mass",
                "dnll",
                shade,
                marker=MARKERS[number % len(MARKERS)],
                alpha=0.8,
                markeredgewidth=0,
            )
    zero_line(ax)
    ax.margins(y=0.1)
    wide_axes(ax, rows, "y")
    name_units(ax, rows[apart], "dnll", at_most=4)


def _ranks(found):
    """Rank correlations with the exact cost: a row a checkpoint, kind of unit and estimate."""
    rows = []
    for arm, seeds in found.items():
        for seed, result in seeds.items():
            for kind, facts in (result.summary.get("by_kind") or {}).items():
                for name, key in RANKS.items():
                    cell = facts.get(key) or {}
                    if cell.get("estimate") is not None:
                        place = {"arm": arm, "kind": kind, "seed": seed, "ranked": name}
                        ends = {f"{_CORRELATION}_{end}": cell.get(end) for end in ("low", "high")}
                        rows.append({**place, _CORRELATION: cell["estimate"], **ends})
    return pd.DataFrame(rows)


def _correlations(ax, ranks):
    several = ranks.groupby("arm")["kind"].nunique().max() > 1
    labels = ranks["arm"] + (" " + ranks["kind"] if several else "")
    ranks = ranks.assign(label=labels + " " + ranks["seed"].astype(str))
    order = list(dict.fromkeys(ranks["label"]))
    forest(
        ax,
        order,
        {
            name: (ranks[ranks["ranked"] == name].set_index("label").reindex(order), _CORRELATION)
            for name in RANKS
        },
        colours=dict(zip(RANKS, (INK, colour(0)), strict=True)),
    )
    ax.set_xlim(min(-0.05, ax.get_xlim()[0]), 1.02)
    ax.set_xlabel("rank correlation with the cost")
    ax.set_title("Agreement, arm and seed")
    ax.legend(loc="upper center", bbox_to_anchor=(0.4, -0.2))


def _plotted(units):
    place = ["site", "layer", "sublayer", "role", "head", "source"]
    parts = [
        rows[["seed", *place, *KEPT]].assign(
            arm=arm, kind=kind, measure=measure, disagrees=carries(rows, "disagrees", "mass")
        )
        for (arm, kind, measure), rows in units.items()
    ]
    return pd.concat(parts, ignore_index=True)
