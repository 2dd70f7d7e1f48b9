"""Which tokens use the access: gates and routes by token category, and their contrast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from satlens.plotting.heatmaps import colour_bar, head_map, limits_of
from satlens.plotting.intervals import forest, per_layer
from satlens.plotting.style import Frame, Panel, Parts, carries, colour, stacked

_FOREST_ROWS = 40
_SERIES = {"raw": "delta", "frequency and position held fixed": "delta_controlled"}
_PS = {"delta": "p_adjusted", "delta_controlled": "p_controlled_adjusted"}
_MEANING = {"gate": "gate", "route": "weight on the embedding"}


def categories_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Means of every category; with the part ``categories_contrasts``, the contrast below.

    Columns: ``kind, layer, head, category, mean`` with ends.
    """
    panels: list[Panel] = []
    for kind, rows in table.groupby("kind", sort=False):
        names = [name for name in dict.fromkeys(rows["category"]) if name != "none"]
        if kind == "gate":
            height = min(3.4, 1.0 + 0.19 * rows["layer"].nunique())
            panels.append((height, lambda where, r=rows, n=names: _gate_means(where, r, n)))
        else:
            panels.append((2.4, lambda where, r=rows, n=names: _route_means(where, r, n)))
    if "categories_contrasts" in parts:
        panels += _contrast_panels(parts["categories_contrasts"])
    return stacked(panels)


def contrasts_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Difference of two categories at every gate or read, raw and controlled."""
    return stacked(_contrast_panels(table))


# -- means -----------------------------------------------------------------------------------------


def _gate_means(where: Any, rows: Frame, names: list[str]) -> None:
    """A map a category on one scale."""
    shown = names[:4]
    limits = limits_of([rows[rows["category"].isin(shown)]], ["mean"])
    signed = limits[0] < 0
    if signed:
        limits = limits_of([rows], ["mean"], signed=True)
    axes = list(where.subplots(1, len(shown), squeeze=False)[0])
    for ax, name in zip(axes, shown, strict=True):
        mesh = head_map(
            ax, rows[rows["category"] == name], "mean", limits=limits, signed=signed, title=name
        )
        if ax is not axes[0]:
            ax.set_ylabel("")
    colour_bar(axes, mesh, "mean gate")


def _route_means(where: Any, rows: Frame, names: list[str]) -> None:
    """Weight on the embedding a layer, a panel a role."""
    several = rows[(rows["sublayer"] != "out") & ~carries(rows, "constant", "mean")]
    reads = list(several.groupby(["sublayer", "role"], sort=True))[:3]
    axes = where.subplots(1, max(len(reads), 1), squeeze=False, sharey=True)[0]
    for ax, ((sublayer, role), read) in zip(axes, reads, strict=False):
        per_layer(ax, {name: (read[read["category"] == name], "mean") for name in names[:4]})
        place = "MLP" if sublayer == "mlp" else "Attention"
        ax.set_title(f"{place} reads" + ("" if role == "shared" else f": {role.upper()}"))
    axes[0].set_ylabel("weight on the embedding")
    axes[-1].legend(loc="lower right", bbox_to_anchor=(1.0, 1.08), ncols=4, columnspacing=1.0)


# -- contrasts -------------------------------------------------------------------------------------


def _contrast_panels(table: Frame) -> list[Panel]:
    panels: list[Panel] = []
    for kind, rows in table.groupby("kind", sort=False):
        rows = rows[rows["delta"].notna() & ~carries(rows, "constant", "delta")]
        if len(rows) and len(rows) <= _FOREST_ROWS:
            height = 0.95 + 0.125 * len(rows)
            panels.append((height, lambda where, r=rows, k=kind: _forest(where, r, str(k))))
        elif len(rows) and kind == "gate":
            height = min(3.6, 1.0 + 0.12 * rows["layer"].nunique())
            panels.append((height, lambda where, r=rows: _maps(where, r)))
    return panels


def _forest(where: Any, rows: Frame, kind: str) -> None:
    """Every gate or read in a row; for gates the maps stand beside."""
    contrast = str(rows["contrast"].iloc[0]).replace(" - ", " \N{MINUS SIGN} ")
    labels = [
        f"L{row.layer} head {row.head}" if kind == "gate" else str(row.site)
        for row in rows.itertuples()
    ]
    ax = where.subplots()
    series = {label: (rows, stat) for label, stat in _SERIES.items()}
    forest(ax, labels, series, hollow=["frequency and position held fixed"])
    for number, stat in enumerate(_SERIES.values()):
        _mark_significant(ax, rows, stat, number)
    ax.set_xlabel(
        f"difference of the mean {_MEANING[kind]}, 95 % intervals   (* adjusted p < 0.05)"
    )
    ax.set_title(contrast)
    ax.legend(loc="lower left", bbox_to_anchor=(0.3, 1.0), ncols=2)


def _mark_significant(ax: Any, rows: Frame, stat: str, number: int) -> None:
    """A star at the right edge where the adjusted sign-flip p is below 0.05."""
    for place, p in enumerate(rows[_PS[stat]].astype(float)):
        if p < 0.05:
            ax.annotate(
                "*",
                (1.0, place),
                (4 + 7 * number, -1.8),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=colour(number),
                ha="center",
                va="center",
                annotation_clip=False,
            )


def _maps(where: Any, rows: Frame) -> None:
    """Raw and controlled differences of many heads on one signed scale."""
    limits = limits_of([rows], list(_PS), signed=True)
    axes = list(where.subplots(1, 2))
    for ax, (label, stat) in zip(axes, _SERIES.items(), strict=True):
        framed = rows[_PS[stat]].astype(float) < 0.05
        mesh = head_map(ax, rows, stat, limits=limits, signed=True, framed=framed, title=label)
    contrast = str(rows["contrast"].iloc[0]).replace(" - ", " \N{MINUS SIGN} ")
    colour_bar(axes, mesh, f"{contrast}\nmean gate")
    where.supxlabel("framed: adjusted p < 0.05", fontsize=6.5, x=0.99, ha="right")
