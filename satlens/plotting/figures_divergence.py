"""How far two routes over the same sources differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from satlens.plotting.intervals import from_zero, per_layer
from satlens.plotting.style import MUTED, Frame, Panel, Parts, no_data, stacked

_STATS = {"mean over tokens": "js_token", "of the mean routes": "js_mean"}


def divergence_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Jensen-Shannon divergence a layer, both aggregations, beside the untrained model.

    Columns: ``layer, sublayer, role, n_sources, js_token, js_mean`` with ends, ``base``, and
    ``<stat>_init``. Reads of one source are 0 by definition and drawn as such.
    """
    names = [
        "output" if sublayer == "out" else f"{'MLP' if sublayer == 'mlp' else 'attention'} {role}"
        for sublayer, role in zip(table["sublayer"], table["role"], strict=True)
    ]
    groups = {name: table[np.equal(names, name)] for name in dict.fromkeys(names)}
    base = str(table["base"].iloc[0]) if len(table) else "e"
    unit = {"e": "nats", "2": "bits"}.get(base, f"units of log base {base}")
    ceiling = math.log(2) / (1.0 if base == "e" else math.log(float(base)))
    rows = [list(groups.items())[i : i + 2] for i in range(0, len(groups), 2)]
    panels: list[Panel] = [
        (2.4, lambda where, row=row: _row(where, row, unit, ceiling)) for row in rows
    ]
    return stacked(panels, width=3.3 if len(groups) == 1 else 6.9, empty="no pair of routes")


def _row(where: Any, groups: list[tuple[str, Frame]], unit: str, ceiling: float) -> None:
    axes = where.subplots(1, len(groups), squeeze=False)[0]
    for ax, (name, rows) in zip(axes, groups, strict=True):
        if rows["js_token"].notna().sum() == 0:
            no_data(ax, f"{name}: undefined")
            continue
        per_layer(
            ax, {label: (rows, stat) for label, stat in _STATS.items()}, baseline="js_token_init"
        )
        from_zero(ax, room=0.3)
        if ax.get_ylim()[1] > 0.8 * ceiling:
            ax.axhline(ceiling, color=MUTED, linewidth=0.7, linestyle=(0, (1, 2)))
        ax.set_ylabel(f"JS divergence ({unit})")
        ax.set_title(name.replace("|", " against "))
        ax.legend(loc="upper left", ncols=2, columnspacing=1.0, handletextpad=0.4)
