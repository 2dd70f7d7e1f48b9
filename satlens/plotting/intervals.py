"""Estimates with their intervals: contrasts, divergences, ablations, differences of arms.

Every function fills one Axes from a result table; an interval is drawn wherever the table has
``<stat>_low`` and ``<stat>_high``, an estimate without one is drawn as a bare point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from satlens.plotting.style import (
    INK,
    MARKERS,
    MUTED,
    Frame,
    arm_colours,
    colour,
    point_range,
    zero_line,
)


def ends(table: Frame, stat: str) -> tuple[np.ndarray, np.ndarray]:
    """Low and high ends of ``stat``, NaN where the table has none."""
    missing = np.full(len(table), np.nan)
    low, high = (
        table[stat + end].to_numpy(dtype=float) if stat + end in table else missing
        for end in ("_low", "_high")
    )
    return low, high


def per_layer(
    ax: Axes,
    series: Mapping[str, tuple[Frame, str]],
    *,
    hollow: Sequence[str] = (),
    colours: Mapping[str, Any] | None = None,
    baseline: str | None = None,
) -> None:
    """Estimates over layers, side by side; each series is a table (one row a layer) and a column.

    ``hollow`` names the series that are baselines; ``baseline`` is a column of every series drawn
    as a grey dash behind its points.
    """
    width = 0.6 / max(len(series), 1)
    for number, (label, (table, stat)) in enumerate(series.items()):
        rows = table.sort_values("layer")
        shift = (number - (len(series) - 1) / 2) * width
        low, high = ends(rows, stat)
        x = rows["layer"].to_numpy(dtype=float) + shift
        if baseline is not None and baseline in rows:
            _dashes(ax, x, rows[baseline].to_numpy(dtype=float), width * 0.45)
        point_range(
            ax,
            x,
            rows[stat].to_numpy(dtype=float),
            low,
            high,
            colour=(colours or {}).get(label, colour(number)),
            marker=MARKERS[number % len(MARKERS)],
            filled=label not in hollow,
            label=label,
        )
    if baseline is not None and any(baseline in table for table, _ in series.values()):
        ax.plot([], [], color=MUTED, linewidth=1.6, label="untrained")
    _layer_axis(ax, [table for table, _ in series.values()])


def heads_by_layer(
    ax: Axes, table: Frame, stat: str, *, colour_: Any, baseline: str | None = None
) -> None:
    """One point a head, heads side by side within their layer; the baseline is a grey dash."""
    heads = sorted(table["head"].dropna().unique())
    place = {head: i for i, head in enumerate(heads)}
    spread = 0.7 / max(len(heads), 1)
    shift = table["head"].map(place).astype(float) - (len(heads) - 1) / 2
    x = table["layer"].to_numpy(dtype=float) + shift.to_numpy() * spread
    low, high = ends(table, stat)
    if baseline is not None and baseline in table:
        _dashes(ax, x, table[baseline].to_numpy(dtype=float), spread * 0.45)
        ax.plot([], [], color=MUTED, linewidth=1.6, label="untrained")
    size = 3.2 if len(heads) <= 8 else 1.8
    point_range(
        ax, x, table[stat].to_numpy(dtype=float), low, high, colour=colour_, size=size, label=None
    )
    _layer_axis(ax, [table])


def heads_of_seeds(
    ax: Axes,
    table: Frame,
    stat: str,
    *,
    colours: Sequence[Any],
    established: str | None = None,
    marker: str = "o",
    label: str | None = None,
    width: float = 0.76,
) -> None:
    """A point a row within its layer: heads side by side in groups, a group a seed.

    Args:
        table: columns ``layer, seed, stat`` with ends, and ``head`` where a layer has several.
        colours: of the seeds in turn, so that neighbouring groups can differ.
        established: column of booleans; points of the other rows are hollow.
        label: of the first colour's points.
        width: of all points of a layer, layers being 1 apart.
    """
    heads = sorted(table["head"].dropna().unique()) if "head" in table else []
    seeds = sorted(table["seed"].unique())
    n = max(len(heads), 1)
    slots = len(seeds) * n + (len(seeds) - 1) * (n > 1)  # a slot between groups
    for number, seed in enumerate(seeds):
        of_seed = table[table["seed"] == seed]
        filled = of_seed[established].astype(bool) if established else of_seed["seed"] == seed
        for full in (False, True):
            rows = of_seed[filled == full]
            slot = rows["head"].map({head: i for i, head in enumerate(heads)}) if heads else 0.0
            shift = number * (n + (n > 1)) + slot - (slots - 1) / 2
            x = rows["layer"].astype(float) + shift * (width / slots)
            point_range(
                ax,
                x.to_numpy(),
                rows[stat].to_numpy(dtype=float),
                *ends(rows, stat),
                colour=colours[number % len(colours)],
                marker=marker,
                filled=full,
                size=3.0 if slots <= 8 else 2.2,
                label=label if full and number == 0 else None,
            )
    _layer_axis(ax, [table])


def _dashes(ax: Axes, x: np.ndarray, level: np.ndarray, half: float) -> None:
    """A short grey line at each level of a baseline."""
    ax.hlines(level, x - half, x + half, color=MUTED, linewidth=1.6, zorder=2, clip_on=False)


def from_zero(ax: Axes, room: float = 0.18) -> None:
    """The vertical axis from zero, with room for a legend above the data."""
    low, high = ax.get_ylim()
    if low >= -0.05 * high:
        ax.set_ylim(0, high + room * high)


def _layer_axis(ax: Axes, tables: Sequence[Frame]) -> None:
    layers = sorted({int(layer) for table in tables for layer in table["layer"].dropna()})
    step = max(1, -(-len(layers) // 16))
    ax.set_xticks(layers[::step])
    if layers:
        ax.set_xlim(layers[0] - 0.6, layers[-1] + 0.6)
    ax.set_xlabel("layer")
    ax.grid(axis="y")


def forest(
    ax: Axes,
    labels: Sequence[str],
    series: Mapping[str, tuple[Frame, str]],
    *,
    colours: Mapping[str, Any] | None = None,
    hollow: Sequence[str] = (),
) -> None:
    """A row a label, an estimate with its interval for each series, zero marked.

    Tables have their rows in the order of ``labels``.
    """
    y = np.arange(len(labels), dtype=float)
    step = 0.5 / max(len(series), 1) if len(series) > 1 else 0.0
    for number, (label, (table, stat)) in enumerate(series.items()):
        low, high = ends(table, stat)
        point_range(
            ax,
            y + (number - (len(series) - 1) / 2) * step,
            table[stat].to_numpy(dtype=float),
            low,
            high,
            horizontal=True,
            colour=(colours or {}).get(label, colour(number)),
            marker=MARKERS[number % len(MARKERS)],
            filled=label not in hollow,
            size=3.2,
            label=label,
        )
    zero_line(ax, "x")
    ax.set_yticks(y, list(labels))
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")


def bars(
    ax: Axes,
    labels: Sequence[str],
    table: Frame,
    stat: str,
    *,
    colours: Sequence[Any] | None = None,
) -> None:
    """Horizontal bars from zero with their intervals, the value written at the end.

    ``table`` has its rows in the order of ``labels``; negative values point left.
    """
    y = np.arange(len(labels), dtype=float)
    values = table[stat].to_numpy(dtype=float)
    low, high = ends(table, stat)
    ax.barh(y, values, height=0.62, color=colours or colour(0), alpha=0.85, zorder=2)
    has = np.isfinite(low) & np.isfinite(high)
    ax.hlines(y[has], low[has], high[has], color=INK, linewidth=1.0, zorder=3)
    ax.vlines(
        np.concatenate([low[has], high[has]]),
        np.tile(y[has] - 0.12, 2),
        np.tile(y[has] + 0.12, 2),
        color=INK,
        linewidth=1.0,
        zorder=3,
    )
    zero_line(ax, "x")
    for place, value, end, start in zip(y, values, high, low, strict=True):
        if not np.isfinite(value):
            ax.annotate("undefined", (0, place), (3, 0), textcoords="offset points", va="center")
            continue
        outer = np.nanmax([value, end, 0.0]) if value >= 0 else np.nanmin([value, start, 0.0])
        ax.annotate(
            _short(value),
            (outer, place),
            (3 if value >= 0 else -3, 0),
            textcoords="offset points",
            va="center",
            ha="left" if value >= 0 else "right",
            fontsize=6.5,
        )
    ax.set_yticks(y, list(labels))
    ax.set_ylim(len(labels) - 0.45, -0.55)
    ax.tick_params(axis="y", length=0)
    _room_for_values(ax, values, low, high)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.grid(axis="x")


def _short(value: float) -> str:
    """+0.070, -0.0004, 0: a sign, three decimals, one more for what would be written as zero."""
    if value == 0:
        return "0"
    return f"{value:+.{3 if abs(value) >= 0.0005 else 4}f}".replace("-", "\N{MINUS SIGN}")


def _room_for_values(ax: Axes, values: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Limits that leave room for a number beyond the end of each bar, on its side."""
    reach = np.concatenate([values, low, high, [0.0]])
    reach = reach[np.isfinite(reach)]
    start, stop = float(reach.min()), float(reach.max())
    span = (stop - start) or 1.0
    left = 0.3 if (values < 0).any() else 0.04 * (start < 0)
    right = 0.3 if (values >= 0).any() else 0.04 * (stop > 0)
    ax.set_xlim(start - left * span, stop + right * span)


def arm_differences(
    ax: Axes,
    pairs: Sequence[str],
    seeds: Mapping[str, Sequence[float]],
    means: Frame,
    stat: str,
    *,
    noise_floor: float | None = None,
) -> None:
    """Paired differences: a small circle a seed, a diamond with the interval for the mean.

    Args:
        pairs: row labels, in the order of ``means``.
        seeds: differences of each pair, one a seed.
        noise_floor: half-width of the grey band within which a difference means nothing.
    """
    if noise_floor:
        ax.axvspan(-noise_floor, noise_floor, color="#e9ecef", zorder=0, label="noise floor")
    palette = arm_colours(pairs)
    low, high = ends(means, stat)
    values = means[stat].to_numpy(dtype=float)
    for row, pair in enumerate(pairs):
        single = np.asarray(seeds.get(pair, ()), dtype=float)
        ax.plot(
            single,
            np.full(len(single), row + 0.22),
            linestyle="none",
            marker="o",
            markersize=3,
            markerfacecolor="white",
            markeredgewidth=0.8,
            color=palette[pair],
            label="one seed" if row == 0 else None,
            zorder=3,
        )
        point_range(
            ax,
            [row - 0.1],
            [values[row]],
            [low[row]],
            [high[row]],
            horizontal=True,
            colour=palette[pair],
            marker="D",
            size=4,
            label="mean, 95 % t interval" if row == 0 else None,
        )
    zero_line(ax, "x")
    ax.set_yticks(np.arange(len(pairs)), list(pairs))
    ax.set_ylim(len(pairs) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")
