"""What interventions cost: the whole model, each layer, each head, each family of sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from satlens.plotting.heatmaps import colour_bar, component_map, head_map, limits_of
from satlens.plotting.intervals import bars, forest, per_layer
from satlens.plotting.style import (
    COLUMN,
    DOUBLE,
    PAGE,
    Frame,
    Panel,
    Parts,
    colour,
    stacked,
    zero_line,
)

DNLL = "change in NLL (nats/token)"
_MAPPED = ("layer", "head", "source", "component")
"""Scopes that are drawn over layers."""
_MAPS_A_ROW = 3
_BESIDE_TITLE = 3
"""Kinds that a legend has room for beside a title."""
_CAP = 4.0
"""Values beyond this many times the 95th percentile get the end of a colour scale."""


def ablation_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """dNLL of every intervention: bars for the whole model, points a layer, maps of the rest.

    Columns: ``kind, target, scope, dnll`` with ends; ``layer, head, role, site, source, component``
    where the scope has them; ``p_adjusted``.
    """
    table = table.assign(label=_labels(table))
    by_scope = {scope: table[table["scope"] == scope] for scope in _MAPPED}
    layered, headed = by_scope["layer"], by_scope["head"]
    whole = table[~table["scope"].isin(_MAPPED)]
    # A source of one site, as onehot has it, is in the table alone.
    masked = by_scope["source"][by_scope["source"]["site"].fillna("") == ""]
    colours = {kind: colour(i) for i, kind in enumerate(dict.fromkeys(table["label"]))}
    panels: list[Panel] = []
    if len(whole) or len(layered):
        height = 2.0 + 0.16 * max(0, len(whole) - 4)
        panels.append((height, lambda where: _upper(where, whole, layered, colours)))
    if len(headed):
        height = min(3.4, 0.95 + 0.2 * headed["layer"].nunique())
        panels.append((height, lambda where: _each_head(where, headed)))
    if len(masked):
        height = min(3.4, 0.95 + 0.2 * masked["layer"].nunique())
        panels.append((height, lambda where: _each_family(where, masked)))
    if len(by_scope["component"]):
        panels.append(_components(by_scope["component"]))
    total = sum(height for height, _ in panels)
    if total > PAGE:
        panels = [(height * PAGE / total, fill) for height, fill in panels]
    wide = len(headed) or len(by_scope["component"]) or (len(layered) and len(whole))
    narrow = len(panels) == 1 and not wide
    return stacked(panels, width=COLUMN if narrow else DOUBLE, empty="no intervention")


def by_category_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """dNLL of whole-model interventions (of layers, if there are none) by category of the target.

    Columns: ``kind, target, scope, layer, source, category, dnll`` with ends.
    """
    table = table.assign(label=_labels(table))
    whole = table[table["scope"] == "model"]
    if not len(whole):
        whole = table[table["scope"] == "layer"]
    if not len(whole):
        return stacked([], empty="no intervention on a whole layer or model")
    categories = list(dict.fromkeys(whole["category"]))
    names = [_row_name(row) for _, row in whole[whole["category"] == categories[0]].iterrows()]

    def fill(where: Any) -> None:
        ax = where.subplots()
        forest(ax, names, {c: (whole[whole["category"] == c], "dnll") for c in categories})
        ax.set_xlabel(DNLL)
        ax.set_title("By category of the token that is predicted")
        ax.legend(loc="best")

    height = 1.0 + 0.12 * len(names) * max(2, len(categories))
    return stacked([(min(height, PAGE), fill)], width=DOUBLE)


def _row_name(row: Frame) -> str:
    layer = "" if row["scope"] == "model" else f"layer {int(row['layer'])}"
    of = ", ".join(part for part in (row.get("source"), layer) if part)
    return f"{row['label']} ({of})" if of else str(row["label"])


def _labels(table: Frame) -> list[str]:
    """Names of interventions; they name their target where both kinds of site occur."""
    both = len({"gate", "route"} & set(table["target"])) > 1
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
        of = row.get("source") or row["site"] or row["role"]
        labels.append(row["label"] + (f" ({of})" if of else ""))
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
    if len(kinds) <= _BESIDE_TITLE:
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, columnspacing=1.0)
    else:
        ax.legend(loc="best", ncols=2, columnspacing=1.0)


def _each_head(where: Any, headed: Frame) -> None:
    """One map an intervention."""
    _maps(where, headed, "One head: ")


def _each_family(where: Any, masked: Frame) -> None:
    """One map an intervention: layers over the families of sources that it takes away."""
    names = list(dict.fromkeys(masked["source"]))
    place = {name: index for index, name in enumerate(names)}
    axes = _maps(where, masked.assign(head=masked["source"].map(place)), "Sources of one layer: ")
    for ax in axes:
        ax.set_xticks(np.arange(len(names)) + 0.5, names)
        ax.set_xlabel("sources taken away")
    layers = masked.drop_duplicates("layer").sort_values("layer")
    if len(layers) <= 12:
        output = layers["sublayer"].eq("out")
        shown = layers["layer"].astype(str).where(~output, "out")
        for ax in axes:
            ax.set_yticks(np.arange(len(shown)) + 0.5, list(shown))


def _maps(where: Any, rows: Frame, title: str) -> list[Any]:
    """A map over layers for each intervention, with one scale of colours."""
    rows, limits, label = _scaled(rows)
    kinds = list(dict.fromkeys(rows["label"]))
    axes = list(where.subplots(1, len(kinds), squeeze=False)[0])
    for ax, kind in zip(axes, kinds, strict=True):
        of_kind = rows[rows["label"] == kind]
        mesh = head_map(
            ax,
            of_kind,
            "dnll",
            limits=limits,
            signed=True,
            framed=of_kind["p_adjusted"].astype(float) < 0.05,
            title=f"{title}{kind}",
        )
        if ax is not axes[0]:
            ax.set_ylabel("")
    colour_bar(axes, mesh, label)
    where.supxlabel("framed: adjusted p < 0.05", fontsize=6.5, x=0.99, ha="right")
    return axes


def _scaled(rows: Frame) -> tuple[Frame, tuple[float, float], str]:
    """Rows, limits of colours and what they show: small numbers are in thousandths of a nat."""
    most = limits_of([rows], ["dnll"], signed=True)[1]
    usual = float(rows["dnll"].abs().astype(float).quantile(0.95))
    end, unit = min(most, _CAP * usual) or most, "nats/token"
    if end < 0.1:
        ends = [name for name in ("dnll", "dnll_low", "dnll_high") if name in rows]
        rows = rows.assign(**{name: 1000 * rows[name] for name in ends})
        most, end = 1000 * most, 1000 * end
        unit = "10\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT THREE} nats/token"
    beyond = f"\nlargest {most:.3g}" if end < most else ""
    return rows, (-end, end), f"change in NLL\n({unit}){beyond}"


def _components(rows: Frame) -> Panel:
    """Maps of reads over the components taken out of them, one a role."""
    rows, limits, label = _scaled(rows)
    names = list(dict.fromkeys(rows["component"]))
    layers = rows["layer"].astype(str).where(rows["sublayer"] != "out", "out")
    rows = rows.assign(component_index=rows["component"].map(names.index), row=layers)
    titles = _read_titles(rows)
    roles = list(dict.fromkeys(titles))

    n_rows = -(-len(roles) // _MAPS_A_ROW)
    n_columns = -(-len(roles) // n_rows)

    def fill(where: Any) -> None:
        axes = list(where.subplots(n_rows, n_columns, squeeze=False).ravel())
        for ax in axes[len(roles) :]:
            ax.set_axis_off()
        axes = axes[: len(roles)]
        for ax, role in zip(axes, roles, strict=True):
            mesh = component_map(
                ax,
                rows[np.equal(titles, role)],
                "dnll",
                limits=limits,
                n_components=len(names),
                title=f"Removed from {role}",
            )
            ax.set_ylabel("reading layer" if ax in axes[::n_columns] else "")
            ax.set_xlabel("")
        colour_bar(axes, mesh, label)
        where.supxlabel("taken out: embedding (e), attention and MLP of each layer", fontsize=7.5)

    return n_rows * min(3.4, 1.0 + 0.16 * rows["row"].nunique()), fill


def _read_titles(rows: Frame) -> list[str]:
    """What each row reads for: the output read stands with the MLP's."""
    return [
        "MLP and output"
        if sublayer in ("mlp", "out")
        else "attention"
        if role == "shared"
        else f"attention {role}"
        for sublayer, role in zip(rows["sublayer"], rows["role"], strict=True)
    ]
