"""The scorecard of the positive controls: how far each number is from what was planted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from satlens.plotting.style import (
    COLUMN,
    DOUBLE,
    GRID,
    INK,
    MUTED,
    Frame,
    Panel,
    Parts,
    colour,
    point_range,
    stacked,
    zero_line,
)

PASSED, FAILED = colour(0), colour(1)
FLOOR = 1e-4
"""Share of the tolerance below which gaps are drawn alike, exact ones among them."""
_MOST_NAMED = 8
_SIGNS = {
    "at least": " \N{GREATER-THAN OR EQUAL TO}",
    "at most": " \N{LESS-THAN OR EQUAL TO}",
    "covers": ":",
}
_SIDES = {"at least": (-1, 0), "at most": (0, 1), "covers": (-1, 1)}
"""Where a number may lie beyond the planted one, in tolerances."""


def controls_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Any:
    """Gaps by tolerance of each analysis; rates and bounds with intervals; what failed.

    Columns: ``analysis, control, quantity, rule, planted, recovered`` with ends, ``tolerance``,
    ``passed``.
    """
    equal = table[table["rule"] == "equal"]
    rates = table[table["rule"] == "covers"]
    bounds = table[table["rule"].isin(["at least", "at most"])]
    failed = table[~table["passed"]]
    panels: list[Panel] = []
    if len(equal):
        height = 0.65 + 0.17 * equal["analysis"].nunique()
        panels.append((height, lambda where: _gaps(where, equal, table)))
    for rows, title in ((rates, "Rates over random draws"), (bounds, "Bounds")):
        if len(rows):
            panels.append((0.6 + 0.15 * len(rows), _apart(rows, title)))
    if len(failed):
        lines = min(len(failed), _MOST_NAMED) + (len(failed) > _MOST_NAMED)
        panels.append((0.3 + 0.13 * lines, lambda where: _named(where, failed)))
    return stacked(panels, width=DOUBLE if len(panels) > 1 else COLUMN, empty="no checks")


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['analysis']}: {row['control']}: {row['quantity']}"


def _marks(rows: Frame) -> list[str]:
    return [PASSED if passed else FAILED for passed in rows["passed"]]


def _gaps(where: Any, equal: Frame, table: Frame) -> None:
    """A row an analysis, a point a check: |recovered - planted| by its tolerance, on a log axis."""
    ax = where.subplots()
    names = list(dict.fromkeys(equal["analysis"]))
    for place, name in enumerate(names):
        rows = equal[equal["analysis"] == name]
        gap = (rows["recovered"] - rows["planted"]).abs().to_numpy(dtype=float)
        tolerance = rows["tolerance"].to_numpy(dtype=float)
        # A planted zero allows nothing: it is met exactly or missed altogether.
        ratio = np.divide(gap, tolerance, out=np.full(len(rows), np.inf), where=tolerance > 0)
        ratio[gap == 0] = 0.0
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        spread = np.linspace(-0.28, 0.28, len(rows)) if len(rows) > 1 else np.zeros(1)
        shown = np.clip(ratio, FLOOR, 1 / FLOOR)
        for fill in (PASSED, FAILED):
            chosen = np.array([mark == fill for mark in _marks(rows)])
            ax.scatter(
                shown[chosen],
                place + spread[chosen],
                s=9 if fill == PASSED else 18,
                marker="o" if fill == PASSED else "X",
                color=fill,
                linewidths=0,
                clip_on=False,
                zorder=3,
            )
    ax.axvline(1.0, color=INK, linewidth=0.9, zorder=1)
    ax.set_xscale("log")
    far = bool((~equal["passed"]).any())
    ax.set_xlim(FLOOR, 1 / FLOOR if far else 10.0)
    ticks = [FLOOR, 1e-3, 1e-2, 0.1, 1.0, 10.0] + ([100.0, 1000.0, 1 / FLOOR] if far else [])
    ax.set_xticks(ticks, [_tick(tick) for tick in ticks])
    ax.minorticks_off()
    counts = {name: table[table["analysis"] == name]["passed"] for name in names}
    labels = [f"{name}  {int(c.sum())}/{len(c)}" for name, c in counts.items()]
    ax.set_yticks(range(len(names)), labels)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")
    ax.set_xlabel("|recovered - planted| by tolerance; beyond 1 is a miss")
    n = len(table)
    ax.set_title(f"Planted numbers: {int(table['passed'].sum())} of {n} checks passed")


def _tick(value: float) -> str:
    sign = {FLOOR: _SIGNS["at most"], 1 / FLOOR: _SIGNS["at least"]}.get(value, "")
    return f"{sign.strip()}{value:g}"


def _apart(rows: Frame, title: str) -> Any:
    """What fills a panel with a row a check: recovered less planted, what is allowed in grey."""

    def fill(where: Any) -> None:
        ax = where.subplots()
        for place, row in enumerate(rows.to_dict("records")):
            allowed = row["tolerance"] * np.array(_SIDES[row["rule"]])
            ax.fill_betweenx([place - 0.4, place + 0.4], *allowed, color=GRID, linewidth=0)
            # Beside a bound the interval says nothing about passing, but how far away it is.
            found = [row.get(f"recovered{end}", np.nan) for end in ("", "_low", "_high")]
            point, low, high = (value - row["planted"] for value in found)
            point_range(
                ax,
                [place],
                [point],
                [low],
                [high],
                horizontal=True,
                colour=PASSED if row["passed"] else FAILED,
                marker="o" if row["passed"] else "X",
                size=3.2,
            )
        zero_line(ax, "x")
        labels = [
            f"{_name(row)}{_SIGNS[row['rule']]} {row['planted']:.3g}"
            for row in rows.to_dict("records")
        ]
        ax.set_yticks(range(len(rows)), labels, fontsize=6.5)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        if not (rows["rule"] == "covers").all():
            ax.set_xscale("symlog", linthresh=0.1)
            ax.xaxis.set_major_formatter("{x:g}")
        ax.grid(axis="x")
        ax.set_title(title)
        ax.set_xlabel("recovered - planted; grey: tolerance", color=MUTED)

    return fill


def _named(where: Any, failed: Frame) -> None:
    """The checks that failed, in words."""
    ax = where.subplots()
    ax.set_axis_off()
    ax.set_title("Failed", color=FAILED)
    rows = failed.to_dict("records")
    lines = [
        f"{_name(row)}: {row['recovered']:.6g}, planted {row['planted']:.6g}"
        for row in rows[:_MOST_NAMED]
    ]
    if len(rows) > _MOST_NAMED:
        lines.append(f"and {len(rows) - _MOST_NAMED} more")
    ax.text(0.0, 1.0, "\n".join(lines), va="top", fontsize=6.5, transform=ax.transAxes)
