"""What interventions cost: the whole model, each layer, each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from satlens.plotting.heatmaps import colour_bar, head_map, limits_of
from satlens.plotting.intervals import bars, per_layer
from satlens.plotting.style import COLUMN, DOUBLE, Frame, Panel, Parts, colour, stacked, zero_line

DNLL = "change in NLL (nats/token)"


def ablation_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """dNLL of every intervention: bars for the whole model, points a layer, maps of heads.

    Columns: ``kind, target, scope, dnll`` with ends; ``layer, head, role, site`` where the scope
    has them; ``p_adjusted``.
    """
    table = table.assign(label=_labels(table))
    layered, headed = (table[table["scope"] == scope] for scope in ("layer", "head"))
    whole = table[~table["scope"].isin(["layer", "head"])]
    kinds = list(dict.fromkeys(table["label"]))
    colours = {kind: colour(i) for i, kind in enumerate(kinds)}
    panels: list[Panel] = []
    if len(whole) or len(layered):
        height = 2.0 + 0.16 * max(0, len(whole) - 4)
        panels.append((height, lambda where: _upper(where, whole, layered, colours)))
    if len(headed):
        height = min(3.4, 0.95 + 0.2 * headed["layer"].nunique())
        panels.append((height, lambda where: _each_head(where, headed)))
    narrow = not len(headed) and not (len(layered) and len(whole))
    return stacked(panels, width=COLUMN if narrow else DOUBLE, empty="no intervention")


def _labels(table: Frame) -> list[str]:
    """Names of interventions; they name their target where both kinds of site occur."""
    both = table["target"].nunique() > 1
    return [
        f"{target}: {kind}" if both else str(kind)
        for kind, target in zip(table["kind"], table["target"], strict=True)
    ]


def _upper(where: Any, whole: Frame, layered: Frame, colours: Mapping[str, str]) -> None:
    fills = [(1.0, _whole_model, whole), (1.5, _each_layer, layered)]
    fills = [fill for fill in fills if len(fill[2])]
    widths = [width for width, _, _ in fills]
    axes = where.subplots(1, len(fills), squeeze=False, width_ratios=widths)[0]
    for ax, (_, fill, rows) in zip(axes, fills, strict=True):
        fill(ax, rows, colours)


def _whole_model(ax: Any, whole: Frame, colours: Mapping[str, str]) -> None:
    labels = []
    for _, row in whole.iterrows():
        place = "" if row["scope"] == "model" else f" ({row['site'] or row['role']})"
        labels.append(row["label"] + place)
    bars(ax, labels, whole, "dnll", colours=[colours[label] for label in whole["label"]])
    ax.set_title("Whole model")
    ax.set_xlabel(DNLL)


def _each_layer(ax: Any, layered: Frame, colours: Mapping[str, str]) -> None:
    kinds = dict.fromkeys(layered["label"])
    series = {kind: (layered[layered["label"] == kind], "dnll") for kind in kinds}
    per_layer(ax, series, colours=colours)
    zero_line(ax)
    ax.set_title("One layer at a time")
    ax.set_ylabel(DNLL)
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, columnspacing=1.0)


def _each_head(where: Any, headed: Frame) -> None:
    """One map an intervention; small numbers are written in thousandths of a nat."""
    limits = limits_of([headed], ["dnll"], signed=True)
    small = limits[1] < 0.1
    if small:
        ends = [name for name in ("dnll", "dnll_low", "dnll_high") if name in headed]
        headed = headed.assign(**{name: 1000 * headed[name] for name in ends})
        limits = (1000 * limits[0], 1000 * limits[1])
    kinds = list(dict.fromkeys(headed["label"]))
    axes = list(where.subplots(1, len(kinds), squeeze=False)[0])
    for ax, kind in zip(axes, kinds, strict=True):
        rows = headed[headed["label"] == kind]
        mesh = head_map(
            ax,
            rows,
            "dnll",
            limits=limits,
            signed=True,
            framed=rows["p_adjusted"].astype(float) < 0.05,
            title=f"One head: {kind}",
        )
        if ax is not axes[0]:
            ax.set_ylabel("")
    unit = "10\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT THREE} nats/token" if small else "nats/token"
    colour_bar(axes, mesh, f"change in NLL\n({unit})")
    where.supxlabel("framed: adjusted p < 0.05", fontsize=6.5, x=0.99, ha="right")
