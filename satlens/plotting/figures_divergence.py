"""How far two routes over the same sources differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from satlens.plotting.intervals import from_zero, per_layer
from satlens.plotting.style import (
    MARKERS,
    MUTED,
    PAGE,
    Frame,
    Panel,
    Parts,
    colour,
    no_data,
    stacked,
)

_LEGEND = 0.3
_STATS = {"mean over tokens": "js_token", "of the mean routes": "js_mean"}


def divergence_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Jensen-Shannon divergence a layer, both aggregations, beside the untrained model.

    Columns: ``layer, comparison, n_sources, js_token, js_mean`` with ends, ``base``, and
    ``<stat>_init``. Reads of one source are 0 by definition and drawn as such. A panel a
    comparison, as many as a page has room for.
    """
    names = [str(name).replace("|", " against ") for name in table["comparison"]]
    groups = {name: table[np.equal(names, name)] for name in dict.fromkeys(names)}
    base = str(table["base"].iloc[0]) if len(table) else "e"
    unit = {"e": "nats", "2": "bits"}.get(base, f"units of log base {base}")
    ceiling = math.log(2) / (1.0 if base == "e" else math.log(float(base)))
    across = 2 if len(groups) <= 6 else 3
    rows = [list(groups.items())[i : i + across] for i in range(0, len(groups), across)]
    height = min(2.4, (PAGE - _LEGEND) / max(len(rows), 1))
    several = len(groups) > 2
    panels: list[Panel] = [(_LEGEND, _legend)] if several else []
    panels += [
        (height, lambda where, row=row: _row(where, row, unit, ceiling, not several))
        for row in rows
    ]
    return stacked(panels, width=3.3 if len(groups) == 1 else 6.9, empty="no pair of routes")


def _legend(where: Any) -> None:
    """One legend for all panels, in the marks that :func:`per_layer` draws."""
    marks = [
        Line2D([], [], color=colour(i), marker=MARKERS[i], markersize=3.5, linestyle="none")
        for i in range(len(_STATS))
    ]
    marks.append(Line2D([], [], color=MUTED, linewidth=1.6))
    where.legend(marks, [*_STATS, "untrained"], loc="center left", ncols=3)


def _row(
    where: Any, groups: list[tuple[str, Frame]], unit: str, ceiling: float, legend: bool
) -> None:
    axes = where.subplots(1, len(groups), squeeze=False)[0]
    for ax, (name, rows) in zip(axes, groups, strict=True):
        if rows["js_token"].notna().sum() == 0:
            no_data(ax, f"{name}: undefined")
            continue
        per_layer(
            ax, {label: (rows, stat) for label, stat in _STATS.items()}, baseline="js_token_init"
        )
        from_zero(ax, room=0.3 if legend else 0.1)
        if ax.get_ylim()[1] > 0.8 * ceiling:
            ax.axhline(ceiling, color=MUTED, linewidth=0.7, linestyle=(0, (1, 2)))
        if ax is axes[0]:
            ax.set_ylabel(f"JS divergence ({unit})")
        ax.set_title(name)
        if legend:
            ax.legend(loc="upper left", ncols=2, columnspacing=1.0, handletextpad=0.4)
