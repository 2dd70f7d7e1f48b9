"""Paired differences of arms: every seed, the mean, and its two intervals over seeds.

Student's t and the percentile bootstrap are drawn side by side, never one in place of the other:
published bars are often bootstraps, which are too narrow for few seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from satlens.plotting.curves import short_count
from satlens.plotting.style import INK, MUTED, Frame, colour, point_range, zero_line

SEED = "one seed"
T = "mean, 95 % t interval over seeds"
BOOTSTRAP = "mean, 95 % bootstrap over seeds (percentile)"
IDENTITY = "zero by identity"
NOISE = "noise floor of a single run"
_LOOK: dict[str, dict[str, Any]] = {
    T: {"colour": colour(0), "marker": "D", "size": 3.6},
    BOOTSTRAP: {"colour": colour(1), "marker": "s", "size": 2.8},
}
_PLACES = {SEED: 0.26, BOOTSTRAP: 0.02, T: -0.22}
"""Of the marks of a row, in rows below its middle."""
_FEW = 3
"""Fewer seeds than this have t intervals so wide that they do not set the axis."""


_STATS = {T: "difference", BOOTSTRAP: "difference_percentile"}


def contrast_marks(row: Frame) -> Frame:
    """What is drawn of one row of a comparison: its seeds, and the mean with each interval.

    Columns: ``first, second, mark, seed, value, low, high, n_seeds``; an interval that the table
    withholds has no mark.
    """
    seeds = {int(name[5:]): row[name] for name in row.index if name.startswith("seed_")}
    marks = [{"mark": SEED, "seed": k, "value": d} for k, d in seeds.items() if pd.notna(d)]
    for mark, stat in _STATS.items():
        if pd.notna(row.get(f"{stat}_low")):
            ends = {end: row[f"{stat}_{end}"] for end in ("low", "high")}
            marks.append({"mark": mark, "value": row["difference"], **ends})
    columns = ["first", "second", "mark", "seed", "value", "low", "high", "n_seeds"]
    same = {name: row[name] for name in ("first", "second", "n_seeds")}
    return pd.DataFrame(marks).assign(**same).reindex(columns=columns)


def paired_rows(
    ax: Axes, labels: Sequence[str], marks: Frame, *, noise_floor: float | None = None
) -> None:
    """A row a contrast: small circles for seeds, the mean twice with one interval each.

    Args:
        labels: of the rows, the first on top.
        marks: a row a mark with ``row`` (position in ``labels``), ``mark`` (:data:`SEED`,
            :data:`T`, :data:`BOOTSTRAP` or :data:`IDENTITY`), ``value``, ``low``, ``high`` and
            ``n_seeds``.
        noise_floor: half-width of the grey band of differences that mean nothing by themselves.
    """
    if noise_floor:
        ax.axvspan(-noise_floor, noise_floor, color="#e9ecef", zorder=0, label=NOISE)
    for mark, shift in _PLACES.items():
        part = marks[marks["mark"] == mark]
        _draw(ax, part, part["row"].to_numpy(dtype=float) + shift, mark, horizontal=True)
    same = marks[marks["mark"] == IDENTITY]
    if len(same):
        ax.plot(same["value"], same["row"], "|", color=INK, markersize=7, label=IDENTITY)
    zero_line(ax, "x")
    ax.set_xlim(*limits(marks))
    _cut(ax, marks)
    ax.set_yticks(np.arange(len(labels)), list(labels))
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.grid(axis="x")


def paired_milestones(ax: Axes, marks: Frame, *, title: str = "") -> None:
    """Differences along training: a thin line a seed, the mean twice with one interval each.

    ``marks`` are as for :func:`paired_rows`, with ``tokens`` and ``seed`` in place of ``row``.
    """
    for _, line in marks[marks["mark"] == SEED].groupby("seed"):
        ax.plot(line["tokens"], line["value"], color=MUTED, linewidth=0.5, alpha=0.7, zorder=2)
    step = float(np.diff(np.unique(marks["tokens"])).min()) if marks["tokens"].nunique() > 1 else 1
    for mark, shift in ((BOOTSTRAP, 0.09), (T, -0.09)):
        part = marks[marks["mark"] == mark]
        _draw(ax, part, part["tokens"].to_numpy(dtype=float) + shift * step, mark)
    zero_line(ax)
    ax.xaxis.set_major_formatter(FuncFormatter(short_count))
    ax.xaxis.set_major_locator(MaxNLocator(3))
    ax.yaxis.set_major_locator(MaxNLocator(4))
    ax.grid(axis="y")
    ax.set_title(title, fontsize=6.5, fontweight="normal", pad=3)


def _draw(ax: Axes, part: Frame, place: np.ndarray, mark: str, horizontal: bool = False) -> None:
    if not len(part):
        return
    if mark == SEED:
        look: dict[str, Any] = {"colour": MUTED, "size": 2.6, "filled": False}
    else:
        look = dict(_LOOK[mark])
        if not horizontal:
            look["size"] *= 0.65
    values, low, high = (part[name].to_numpy(dtype=float) for name in ("value", "low", "high"))
    point_range(ax, place, values, low, high, horizontal=horizontal, label=mark, **look)


def limits(marks: Frame) -> tuple[float, float]:
    """Ends of an axis of differences: all points, and the intervals of three seeds or more."""
    kept = marks[marks["n_seeds"] >= _FEW]
    reach = np.concatenate(
        [marks["value"].to_numpy(float), kept["low"].to_numpy(float), kept["high"].to_numpy(float)]
    )
    reach = np.append(reach[np.isfinite(reach)], 0.0)
    margin = 0.06 * (float(np.ptp(reach)) or 1.0)
    return float(reach.min()) - margin, float(reach.max()) + margin


def is_cut(marks: Frame) -> bool:
    """Whether some interval goes on beyond :func:`limits`."""
    start, stop = limits(marks)
    return bool(((marks["low"] < start) | (marks["high"] > stop)).any())


def _cut(ax: Axes, marks: Frame) -> None:
    """An arrow head where a t interval leaves the axis; bootstraps stay among their seeds."""
    start, stop = ax.get_xlim()
    wide = marks[marks["mark"] == T]
    look: dict[str, Any] = {"color": colour(0), "markersize": 3, "clip_on": False, "zorder": 4}
    for beyond, edge, head in ((wide["low"] < start, start, "<"), (wide["high"] > stop, stop, ">")):
        rows = wide.loc[beyond, "row"].to_numpy(dtype=float) + _PLACES[T]
        ax.plot(np.full(len(rows), edge), rows, head, **look)
