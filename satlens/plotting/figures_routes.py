"""What of each sublayer's own output every read receives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from satlens.plotting.heatmaps import colour_bar, component_map, limits_of
from satlens.plotting.intervals import from_zero, per_layer
from satlens.plotting.style import DOUBLE, PAGE, Frame, Parts, new_figure, stacked, styled

_STATS = {"coefficient": "mean coefficient", "signed_share": "share of norms, signed"}
_LIMIT = 3.0
"""Values beyond this many times the 95th percentile get the end of the colour scale."""


def routes_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """A row of two maps a role, reads over components: mean coefficients and signed norm shares.

    Columns: ``layer, sublayer, role, component_index, coefficient, signed_share``. Colours are
    centred at zero and shared by all maps of a statistic.
    """
    titles = [_title(s, r) for s, r in zip(table["sublayer"], table["role"], strict=True)]
    groups = {title: table[np.equal(titles, title)] for title in dict.fromkeys(titles)}
    n_components = int(table["component_index"].max()) + 1
    heights = [_height(rows["layer"].nunique(), len(groups)) for rows in groups.values()]
    figure = new_figure(DOUBLE, sum(heights) + 0.35)
    with styled():
        axes = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
        for column, (stat, label) in zip(axes.T, _STATS.items(), strict=True):
            limits = _limits(table, stat)
            for ax, (title, rows) in zip(column, groups.items(), strict=True):
                mesh = component_map(
                    ax,
                    rows.assign(
                        row=rows["layer"].astype(str).where(rows["sublayer"] != "out", "out")
                    ),
                    stat,
                    limits=limits,
                    n_components=n_components,
                    labelled=ax is column[-1],
                    title=f"{title}: {label}" if ax is column[0] else title,
                )
                ax.set_ylabel("reading layer" if stat == "coefficient" else "")
            colour_bar(list(column), mesh, label, aspect=22 * len(column))
        figure.align_ylabels(list(axes[:, 0]))
    return figure


def reads_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """The effective number of components of every read and the share with a negative coefficient.

    Columns: ``layer, sublayer, role, effective_components, negative_share`` with ends and starts.
    """
    return stacked([(2.2, lambda where: _reads(where, table))])


def _reads(where: Any, table: Frame) -> None:
    inside = table[table["sublayer"] != "out"]
    names = [_title(s, r) for s, r in zip(inside["sublayer"], inside["role"], strict=True)]
    names = [name.removesuffix(" and output") for name in names]
    axes = where.subplots(1, 2)
    labels = {
        "effective_components": ("Effective number of components", "exp(entropy)"),
        "negative_share": ("Negative share", "share of norms"),
    }
    for ax, (stat, (title, label)) in zip(axes, labels.items(), strict=True):
        series = {name: (inside[np.equal(names, name)], stat) for name in dict.fromkeys(names)}
        per_layer(ax, series, baseline=f"{stat}_init")
        ax.set_title(f"{title}, 95 % intervals")
        ax.set_ylabel(label)
        from_zero(ax, room=0.3)
    axes[0].legend(loc="upper left")


def _title(sublayer: str, role: str) -> str:
    if sublayer in ("mlp", "out"):
        return "MLP and output"
    if role == "r":
        return "Residual (r)"
    return "Attention" if role == "shared" else f"Attention {role.upper()}"


def _height(n_rows: int, n_groups: int) -> float:
    """Inches of a row of maps, so that all of them stay on a page."""
    return max(0.75, min(0.55 + 0.14 * n_rows, (PAGE - 0.5) / n_groups))


def _limits(table: Frame, stat: str) -> tuple[float, float]:
    """Ends of a colour scale centred at zero, from the reads of several components.

    A single component is all of its read, whatever the model.
    """
    several = table[~table["flags"].fillna("").str.contains("single_component")]
    high = limits_of([several], [stat], signed=True)[1]
    usual = float(several[stat].abs().astype(float).quantile(0.95)) if len(several) else 0.0
    high = min(high, _LIMIT * usual) or high
    return (-high, high)
