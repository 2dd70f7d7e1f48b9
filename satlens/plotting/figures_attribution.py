"""Mass versus cause: what units carry beside what removing them costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from satlens.plotting.intervals import ends
from satlens.plotting.style import (
    DOUBLE,
    INK,
    MUTED,
    Frame,
    Panel,
    Parts,
    carries,
    colour,
    no_data,
    stacked,
    zero_line,
)

MASS = {
    "norm_share": "share of V\N{SUBSCRIPT ONE} in the norm of the values",
    "weight": "mean weight",
    "rectified_share": "share of |w| ||X|| in the read",
}
COST = "exact change in NLL (nats/token)"
_SCREENED = "screened change in NLL (nats/token)"
_WIDE = 20.0
"""How far the largest cost is above the median, from which axes are logarithmic."""
_LABELS = 6
"""Units that are named in a panel at most."""


def attribution_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """A row a kind of site: mass against exact cost, and what screening says against it.

    Columns: ``kind, measure, site, head, source, mass, attribution, fisher, dnll`` with ends,
    ``flags``. Units that disagree are named. Without exact costs, mass stands against the second
    order alone.
    """
    groups = [(kind, rows) for kind, rows in table.groupby(["kind", "measure"], sort=False)]
    by_kind = summary.get("by_kind") or {}
    panels: list[Panel] = [
        (3.0, lambda where, k=kind, r=rows: _row(where, k, r, by_kind.get(k[0]) or {}))
        for kind, rows in groups
    ]
    return stacked(panels, width=DOUBLE, empty="no unit")


def _row(where: Any, kind: tuple[str, str], rows: Frame, agreement: Mapping[str, Any]) -> None:
    left, right = where.subplots(1, 2)
    removed = rows[rows["dnll"].notna()]
    name = "heads of gates" if kind[0] == "gate" else "sources of routes"
    if len(removed):
        _mass(left, removed, "dnll", COST, agreement.get("mass_dnll"))
        _screen(right, removed, agreement)
    else:
        _mass(left, rows, "fisher", _SCREENED, agreement.get("mass_fisher"))
        no_data(right, "no unit was removed exactly")
    left.set_xlabel(MASS[kind[1]] + left.get_xlabel())
    left.set_title(f"Mass against cost: {name}")


def _mass(ax: Any, rows: Frame, stat: str, label: str, rank: Mapping[str, Any] | None) -> None:
    """Mass across, cost up; units that disagree in colour and named."""
    apart = carries(rows, "disagrees", "mass")
    for some, shade in ((rows[~apart], MUTED), (rows[apart], colour(1))):
        points(ax, some, "mass", stat, shade)
    zero_line(ax)
    wide_axes(ax, rows, "y")
    ax.set_ylabel(label)
    name_units(ax, rows[apart], stat)
    ax.set_xlabel(_correlation(rank))


def _screen(ax: Any, rows: Frame, agreement: Mapping[str, Any]) -> None:
    """Both orders across, exact cost up, and the line where they are equal."""
    for name, label, shade in (("attribution", "first", MUTED), ("fisher", "second", colour(0))):
        points(ax, rows, name, "dnll", shade)
        rank = agreement.get(f"{name}_dnll") or {}
        said = "" if rank.get("estimate") is None else f" ({rank['estimate']:.2f})"
        said = said.replace("-", "\N{MINUS SIGN}")
        ax.plot([], [], linestyle="none", marker="o", color=shade, label=f"{label} order{said}")
    wide_axes(ax, rows, "xy")
    both = np.array([ax.get_xlim(), ax.get_ylim()])
    reach = np.linspace(both[:, 0].max(), both[:, 1].min(), 200)
    ax.plot(reach, reach, color=MUTED, linewidth=0.7, zorder=0.5, label="equal")
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=3,
        columnspacing=1.0,
        title="(rank correlation with the exact cost)",
        title_fontsize=7,
    )
    ax.set_xlabel(_SCREENED)
    ax.set_ylabel(COST)
    ax.set_title("Screened against exact cost")


def wide_axes(ax: Any, rows: Frame, axes: str) -> None:
    """Logarithmic axes, linear about zero, where a few units cost far more than most."""
    cost = rows["dnll"].abs().astype(float).dropna()
    cost = cost[cost > 0]
    if not len(cost) or cost.max() < _WIDE * cost.median():
        if "x" in axes:
            ax.xaxis.set_major_locator(MaxNLocator(4))
        return
    linear = 10.0 ** np.round(np.log10(cost.median()))
    for axis in axes:
        getattr(ax, f"set_{axis}scale")("symlog", linthresh=linear, linscale=0.5)


def points(
    ax: Any, rows: Frame, across: str, up: str, shade: str, marker: str = "o", **options: Any
) -> None:
    """Points with both intervals; ``options`` are those of the marks."""
    x, y = (rows[name].to_numpy(dtype=float) for name in (across, up))
    for name, lines, other in ((across, ax.hlines, y), (up, ax.vlines, x)):
        low, high = ends(rows, name)
        has = np.isfinite(low) & np.isfinite(high)
        lines(other[has], low[has], high[has], color=shade, linewidth=0.5, alpha=0.6, zorder=2)
    ax.plot(x, y, linestyle="none", marker=marker, markersize=3, color=shade, zorder=3, **options)


def name_units(ax: Any, rows: Frame, stat: str, at_most: int = _LABELS) -> None:
    """The units that lie furthest apart, by name, as far as the names do not cover each other."""
    place = ax.transScale + ax.transLimits
    named: list[Any] = []
    for _, row in rows.sort_values("rank_difference", key=lambda d: -d.abs()).iterrows():
        x, y = place.transform((row["mass"], row[stat]))
        if len(named) < at_most and all(abs(y - v) > 0.07 or abs(x - u) > 0.35 for u, v in named):
            named.append((x, y))
            ax.annotate(
                unit_name(row),
                (row["mass"], row[stat]),
                (4, 3) if x < 0.6 else (-4, 3),
                textcoords="offset points",
                ha="left" if x < 0.6 else "right",
                fontsize=6.5,
                color=INK,
                path_effects=[withStroke(linewidth=1.5, foreground="white")],
            )


def unit_name(row: Any) -> str:
    """``L3 head 1``; ``L3 mlp: block 0..3``; ``out: embed``."""
    if row["kind"] == "gate":
        return f"L{int(row['layer'])} head {int(row['head'])}"
    if row["sublayer"] == "out":
        return f"out: {row['source']}"
    role = "" if row["role"] == "shared" else f" {row['role']}"
    return f"L{int(row['layer'])} {row['sublayer']}{role}: {row['source']}"


def _correlation(rank: Mapping[str, Any] | None) -> str:
    """A line with Spearman's correlation and its interval; nothing where there is none."""
    if not rank or rank.get("estimate") is None:
        return ""
    text = f"\nrank correlation {rank['estimate']:.2f}"
    if rank.get("low") is not None:
        text += f" ({rank['low']:.2f} to {rank['high']:.2f})"
    return text.replace("-", "\N{MINUS SIGN}")
