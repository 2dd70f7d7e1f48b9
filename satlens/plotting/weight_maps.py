"""Maps of weights that may be negative, averaged over seeds: what a read takes of each source.

    tables of seeds -> mean_and_range (mean, range, untrained) -> weight_map

A cell has a place in the model (layer, source), so the same cell of two seeds can be averaged; a
ring marks cells whose sign differs between seeds, whose mean says little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Colormap, Normalize, SymLogNorm

from satlens.plotting.heatmaps import MINUS, span_of
from satlens.plotting.style import INK, SIGNED, Frame

_WRITTEN = 100
"""Maps of more cells have no numbers in them."""
_TICKS = 18


def mean_and_range(tables: Mapping[int, Frame], keys: Sequence[str], stat: str) -> Frame:
    """One row a cell, in the order of the first table: its mean over seeds and their range.

    Args:
        tables: by seed, each with a row a cell.
        keys: columns that say which cell a row is.

    Returns:
        ``keys``, ``<stat>``, ``<stat>_low``, ``<stat>_high`` (lowest and highest seed; NaN with a
        single one), ``<stat>_init`` (mean of the untrained models, where the tables have it),
        ``n_seeds`` and ``signs_differ``.
    """
    rows = pd.concat([table.assign(seed=seed) for seed, table in tables.items()])
    cells = rows.groupby(list(keys), sort=False, dropna=False)
    values = cells[stat]
    low: Frame = values.min()
    high: Frame = values.max()
    several = len(tables) > 1
    columns = {
        stat: values.mean(),
        f"{stat}_low": low if several else np.nan,
        f"{stat}_high": high if several else np.nan,
    }
    if f"{stat}_init" in rows:
        columns[f"{stat}_init"] = cells[f"{stat}_init"].mean()
    columns |= {"n_seeds": values.count(), "signs_differ": (low < 0) & (high > 0)}
    return pd.DataFrame(columns).reset_index()


def state_label(source: str) -> str:
    """``emb`` or the layer after which a state stands: ``state ..3`` is that after layer 1."""
    span = span_of(source)
    if span is None:
        return source
    return "emb" if span.kind == "embedding" else str(span.last // 2)


def spread(n_seeds: int, what: str = "") -> str:
    """What a caption says of seeds: ``mean of 3 seeds, bars span them``; ``one seed``."""
    if n_seeds == 1:
        return "one seed"
    return f"mean of {n_seeds} seeds" + (f", {what} span them" if what else "")


def symmetric(cells: Frame | Sequence[Frame], stat: str, *, decades: bool = False) -> Normalize:
    """A colour scale centred at zero that holds every cell; ``decades``: logarithmic beyond 1."""
    frames = [cells] if isinstance(cells, pd.DataFrame) else list(cells)
    values = np.concatenate([frame[stat].to_numpy(dtype=float) for frame in frames])
    top = float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) or 1.0
    if not decades or top <= 1:
        return Normalize(-top, top)
    top = 10.0 ** np.ceil(np.log10(top))
    return SymLogNorm(linthresh=1.0, linscale=1.0, vmin=-top, vmax=top, base=10)


def weight_map(
    ax: Axes,
    cells: Frame,
    stat: str,
    *,
    row: str,
    column: str,
    norm: Normalize,
    cmap: Colormap = SIGNED,
    columns: Sequence[Any] | None = None,
    written: bool = True,
    title: str = "",
) -> QuadMesh:
    """Heat map of one number a (``row``, ``column``), the first row on top; gaps are white.

    Args:
        cells: rows in the order in which the map has them; a column ``signs_differ`` sets rings.
        columns: labels of the horizontal axis in order; by default as they come.
        written: whether cells have their numbers, where there is room.
    """
    down = list(dict.fromkeys(cells[row]))
    across = list(dict.fromkeys(cells[column])) if columns is None else list(columns)
    wide = cells.pivot(index=row, columns=column, values=stat).reindex(index=down, columns=across)
    values = wide.to_numpy(dtype=float)
    mesh = ax.pcolormesh(
        np.ma.masked_invalid(values),
        cmap=cmap,
        norm=norm,
        edgecolors="white",
        linewidth=0.5 if values.size <= 300 else 0.2,
    )
    ax.set_ylim(len(down), 0)
    for side in ax.spines.values():
        side.set_visible(False)
    written = written and values.size <= _WRITTEN
    if written:
        _write(ax, values, norm, cmap)
    if "signs_differ" in cells:
        rings = cells.pivot(index=row, columns=column, values="signs_differ")
        marked = rings.reindex(index=down, columns=across).to_numpy() == True  # noqa: E712 (gaps are NaN)
        _rings(ax, marked, corner=written)
    thin_ticks(ax, "x", across)
    thin_ticks(ax, "y", down)
    ax.set_title(title)
    return mesh


def thin_ticks(ax: Axes, which: str, labels: Sequence[Any]) -> None:
    """Labels at the middle of cells, every n-th where there are many."""
    step = max(1, -(-len(labels) // _TICKS))
    set_ticks = ax.set_xticks if which == "x" else ax.set_yticks
    set_ticks(np.arange(0, len(labels), step) + 0.5, [str(label) for label in labels[::step]])
    ax.tick_params(axis="both", length=0)


def ring_note(figure: Any, cells: Frame) -> None:
    """The line that explains rings, where a map has any."""
    if cells["signs_differ"].any():
        figure.supxlabel("ring: the sign differs between seeds", fontsize=6.5, x=0.99, ha="right")


def _write(ax: Axes, values: np.ndarray, norm: Normalize, cmap: Colormap) -> None:
    """Each value in its cell, dark or white, whichever is readable there."""
    for (row, column), value in np.ndenumerate(values):
        if not np.isfinite(value):
            continue
        red, green, blue, _ = cmap(float(norm(value)))
        text = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
        text = text if text.strip("-0.") else "0.00"
        ax.text(
            column + 0.5,
            row + 0.54,
            text.replace("-", MINUS),
            ha="center",
            va="center",
            fontsize=6.5,
            color=INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white",
        )


def _rings(ax: Axes, marked: np.ndarray, *, corner: bool) -> None:
    """A small ring in the corner of written cells, in the middle of others."""
    row, column = np.nonzero(marked)
    ax.plot(
        column + (0.9 if corner else 0.5),
        row + (0.15 if corner else 0.5),
        linestyle="none",
        marker="o",
        markersize=2.0,
        markerfacecolor="none",
        markeredgewidth=0.6,
        markeredgecolor=INK,
    )
