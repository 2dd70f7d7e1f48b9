"""Which tokens use the access: gates and routes by token category, and their contrast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure

from satlens.plotting.figures_drivers import driver_panels
from satlens.plotting.heatmaps import colour_bar, head_map, limits_of
from satlens.plotting.intervals import forest, per_layer
from satlens.plotting.style import (
    AMOUNT,
    PAGE,
    SIGNED,
    Frame,
    Panel,
    Parts,
    carries,
    colour,
    stacked,
)

_FOREST_ROWS = 40
_MAPS = 4
"""Categories that get a map or a series each; more of them share one matrix."""
_MATRIX_ROWS = 20
_SERIES = {"raw": "delta", "frequency and position held fixed": "delta_controlled"}
_PS = {"delta": "p_adjusted", "delta_controlled": "p_controlled_adjusted"}
_MEANING = {"gate": "gate", "route": "weight on the embedding"}


def categories_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Means by category; below, the contrast, what drives the values, and further breakdowns.

    Parts that a page has no room for are left to their own figures. Columns: ``kind, layer, head,
    category, mean`` with ends, ``by`` where there are several breakdowns.
    """
    breakdowns = [rows for _, rows in table.groupby("by", sort=False)] if "by" in table else [table]
    panels = _means(breakdowns[0])
    if "categories_contrasts" in parts:
        room = PAGE - sum(height for height, _ in panels)
        panels += _contrast_panels(parts["categories_contrasts"], room)
    more: list[Panel] = []
    if "categories_drivers" in parts:
        more += driver_panels(parts["categories_drivers"])
    for rows in breakdowns[1:]:
        more += _means(rows)
    for panel in more:
        if sum(height for height, _ in [*panels, panel]) <= PAGE:
            panels.append(panel)
    return stacked(panels)


def _means(table: Frame) -> list[Panel]:
    """The means of one breakdown."""
    panels: list[Panel] = []
    for kind, rows in table.groupby("kind", sort=False):
        names = [name for name in dict.fromkeys(rows["category"]) if name != "none"]
        if len(names) > _MAPS:
            if kind == "route":
                rows = _several_sources(rows)
            names = _most_frequent(rows, names)
            height = 0.9 + 0.15 * len(names)
            panels.append((height, lambda where, r=rows, n=names: _matrix(where, r, n)))
        elif kind == "gate":
            height = min(3.4, 1.0 + 0.19 * rows["layer"].nunique())
            panels.append((height, lambda where, r=rows, n=names: _gate_means(where, r, n)))
        else:
            panels.append((2.4, lambda where, r=rows, n=names: _route_means(where, r, n)))
    return panels


def contrasts_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Difference of two categories at every gate or read, raw and controlled."""
    return stacked(_contrast_panels(table))


# -- means -----------------------------------------------------------------------------------------


def _gate_means(where: Any, rows: Frame, names: list[str]) -> None:
    """A map a category on one scale."""
    limits = limits_of([rows[rows["category"].isin(names)]], ["mean"])
    signed = limits[0] < 0
    if signed:
        limits = limits_of([rows], ["mean"], signed=True)
    axes = list(where.subplots(1, len(names), squeeze=False)[0])
    for ax, name in zip(axes, names, strict=True):
        mesh = head_map(
            ax, rows[rows["category"] == name], "mean", limits=limits, signed=signed, title=name
        )
        if ax is not axes[0]:
            ax.set_ylabel("")
    colour_bar(axes, mesh, "mean gate")


def _route_means(where: Any, rows: Frame, names: list[str]) -> None:
    """Weight on the embedding a layer, a panel a role."""
    reads = list(_several_sources(rows).groupby(["sublayer", "role"], sort=True))[:3]
    axes = where.subplots(1, max(len(reads), 1), squeeze=False, sharey=True)[0]
    for ax, ((sublayer, role), read) in zip(axes, reads, strict=False):
        per_layer(ax, {name: (read[read["category"] == name], "mean") for name in names})
        place = "MLP" if sublayer == "mlp" else "Attention"
        ax.set_title(f"{place} reads" + ("" if role == "shared" else f": {role.upper()}"))
    axes[0].set_ylabel("weight on the embedding")
    axes[-1].legend(loc="lower right", bbox_to_anchor=(1.0, 1.08), ncols=4, columnspacing=1.0)


def _several_sources(rows: Frame) -> Frame:
    """Reads of sublayers, without those of a single source, whose weight is always 1."""
    return rows[(rows["sublayer"] != "out") & ~carries(rows, "constant", "mean")]


def _most_frequent(rows: Frame, names: Sequence[str]) -> list[str]:
    """Categories by how many tokens they have, most first."""
    counts = rows.groupby("category")["n_tokens"].max()
    return sorted((name for name in names if name in counts), key=lambda n: -counts[n])[
        :_MATRIX_ROWS
    ]


def _matrix(where: Any, rows: Frame, names: Sequence[str]) -> None:
    """A row a category, a column a head or read, layer by layer."""
    ax = where.subplots()
    cells = [f"{r.layer}/{r.sublayer}/{r.role}/{r.head}" for r in rows.itertuples()]
    columns = list(dict.fromkeys(cells))
    wide = rows.assign(cell=cells).pivot(index="category", columns="cell", values="mean")
    values = wide.reindex(index=list(names), columns=columns).to_numpy(dtype=float)
    limits = limits_of([rows], ["mean"])
    signed = limits[0] < 0
    if signed:
        limits = limits_of([rows], ["mean"], signed=True)
    ax.set_facecolor("#eceff1")  # a category without a value
    mesh = ax.pcolormesh(
        np.ma.masked_invalid(values),
        cmap=SIGNED if signed else AMOUNT,
        # Rare categories reach far; the root leaves the others some contrast.
        norm=Normalize(*limits) if signed else PowerNorm(0.5, *limits),
        edgecolors="white",
        linewidth=0.3 if values.size <= 1000 else 0.0,
    )
    ax.set_ylim(len(names), 0)
    for side in ax.spines.values():
        side.set_visible(False)
    layers = np.array([int(cell.split("/")[0]) for cell in columns])
    starts = np.flatnonzero(np.diff(layers, prepend=-1))
    ends = np.append(starts[1:], len(layers))
    step = max(1, -(-len(starts) // 16))
    ax.vlines(starts[1:], 0, len(names), color="white", linewidth=1.6)
    ax.set_xticks(((starts + ends) / 2)[::step], [str(layers[k]) for k in starts[::step]])
    ax.set_yticks(np.arange(len(names)) + 0.5, list(names))
    ax.tick_params(axis="both", length=0)
    kind = str(rows["kind"].iloc[0])
    ax.set_xlabel(
        "layer, its heads side by side" if kind == "gate" else "layer, its reads in order"
    )
    colour_bar(ax, mesh, f"mean {_MEANING[kind]}")


# -- contrasts -------------------------------------------------------------------------------------


def _contrast_panels(table: Frame, room: float = PAGE) -> list[Panel]:
    """A row a gate or read where that fits into ``room`` inches; maps of gates where not."""
    panels: list[Panel] = []
    for kind, rows in table.groupby("kind", sort=False):
        rows = rows[rows["delta"].notna() & ~carries(rows, "constant", "delta")]
        height = 0.95 + 0.125 * len(rows)
        fits = len(rows) <= _FOREST_ROWS and (kind == "route" or height <= room)
        if len(rows) and fits:
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
