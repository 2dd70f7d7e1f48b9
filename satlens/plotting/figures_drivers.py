"""What gates depend on: variance that facts about tokens predict, and features of V_1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from satlens.plotting.heatmaps import colour_bar, head_map
from satlens.plotting.intervals import per_layer
from satlens.plotting.style import (
    INK,
    MARKERS,
    MUTED,
    OKABE_ITO,
    Frame,
    Panel,
    Parts,
    colour,
    no_data,
    stacked,
)

_LABELS = {
    "token": "token",
    "previous_token": "previous token",
    "category": "category",
    "position": "position",
    "all": "all four",
}
_MANY_HEADS = 4
"""More of them need wider maps, in two rows."""


def drivers_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Share of variance that each driver predicts out of sample.

    Columns: ``kind, layer, sublayer, role, head, driver, r2`` with ends.
    """
    return stacked(driver_panels(table))


def driver_panels(table: Frame) -> list[Panel]:
    """Maps over heads for gates, points by layer for reads."""
    panels: list[Panel] = []
    for kind, rows in table.groupby("kind", sort=False):
        rows = rows[rows["r2"].notna()]
        if not len(rows):
            panels.append((1.0, lambda where: no_data(where.subplots(), "no variance over tokens")))
        elif kind == "gate":
            n_rows = 1 + (rows["head"].nunique() > _MANY_HEADS)
            height = n_rows * min(3.2, 1.0 + 0.17 * rows["layer"].nunique())
            panels.append((height, lambda where, r=rows, n=n_rows: _gate_drivers(where, r, n)))
        else:
            panels.append((2.4, lambda where, r=rows: _route_drivers(where, r)))
    return panels


def _label(driver: Any) -> str:
    return _LABELS.get(driver, str(driver))


def _gate_drivers(where: Any, rows: Frame, n_rows: int) -> None:
    """A map a driver."""
    drivers = list(dict.fromkeys(rows["driver"]))
    grid = where.subplots(n_rows, -(-len(drivers) // n_rows), squeeze=False)
    axes = list(grid.ravel())
    for ax in axes[len(drivers) :]:
        ax.remove()
    axes = axes[: len(drivers)]
    for ax, driver in zip(axes, drivers, strict=True):
        own = rows[rows["driver"] == driver]
        own = own.assign(r2=own["r2"].clip(lower=0.0))
        mesh = head_map(ax, own, "r2", limits=(0.0, 1.0), title=_label(driver))
        if ax not in grid[:, 0]:
            ax.set_ylabel("")
    colour_bar(
        axes,
        mesh,
        "share of a gate's variance\nexplained out of sample (negative as 0)",
        aspect=18 * n_rows,
    )


def _route_drivers(where: Any, rows: Frame) -> None:
    """A panel a role, drivers side by side at each layer."""
    rows = rows[rows["sublayer"] != "out"]
    reads = list(rows.groupby(["sublayer", "role"], sort=True))[:3]
    axes = where.subplots(1, max(len(reads), 1), squeeze=False, sharey=True)[0]
    for ax, ((sublayer, role), read) in zip(axes, reads, strict=False):
        drivers = dict.fromkeys(read["driver"])
        per_layer(ax, {_label(d): (read[read["driver"] == d], "r2") for d in drivers})
        place = "MLP" if sublayer == "mlp" else "Attention"
        ax.set_title(f"{place} reads" + ("" if role == "shared" else f": {role.upper()}"))
    axes[0].set_ylabel("share of variance explained\nout of sample")
    where.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=5, columnspacing=1.0
    )


# -- features of V_1 -------------------------------------------------------------------------------


def features_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Mean gate of the tokens of each feature, by layer and group of features.

    Columns: ``layer, feature, group, mean, n_tokens``.
    """
    return stacked([(2.8, lambda where: _features(where, table))])


def _features(where: Any, table: Frame) -> None:
    ax = where.subplots()
    if "mean" not in table or not table["mean"].notna().any():
        no_data(ax, "no gates")
        return
    shown = table[table["mean"].notna()]
    groups = list(dict.fromkeys(shown.sort_values("group")["group"]))
    step = 0.8 / len(groups)
    most = float(shown["n_tokens"].max())
    for number, group in enumerate(groups):
        rows = shown[shown["group"] == group]
        centre = rows["layer"].to_numpy(float) + (number - (len(groups) - 1) / 2) * step
        # Spread by the golden ratio: the same table gives the same picture.
        spread = (rows["feature"].to_numpy(float) * 0.6180339887) % 1 - 0.5
        ink = MUTED if group.endswith("mixed") else colour(number % len(OKABE_ITO))
        ax.scatter(
            centre + 0.7 * step * spread,
            rows["mean"],
            s=3 + 40 * rows["n_tokens"].to_numpy(float) / most,
            color=ink,
            alpha=0.55,
            linewidths=0,
            marker=MARKERS[number % len(MARKERS)],
            label=group.removeprefix("sae "),
        )
        weighted = (
            rows.assign(total=rows["mean"] * rows["n_tokens"])
            .groupby("layer")[["total", "n_tokens"]]
            .sum()
        )
        level = (weighted["total"] / weighted["n_tokens"]).to_numpy(float)
        at = weighted.index.to_numpy(float) + (number - (len(groups) - 1) / 2) * step
        ax.hlines(level, at - 0.45 * step, at + 0.45 * step, color=INK, linewidth=1.4, zorder=4)
    layers = np.unique(shown["layer"].to_numpy(int))
    ax.set_xticks(layers[:: max(1, -(-len(layers) // 16))])
    ax.set_xlabel("layer")
    ax.set_ylabel("mean gate of a feature's tokens")
    ax.grid(axis="y")
    ax.set_title("Features of V_1")
    ax.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(groups),
        columnspacing=1.0,
        title=None,
    )
    ax.annotate(
        "area: tokens of the feature; line: mean of the group",
        (1.0, -0.16),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=6.5,
        color=MUTED,
    )
