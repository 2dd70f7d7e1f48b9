"""Scores on tasks against chance, and paired differences between models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from satlens.plotting.intervals import ends
from satlens.plotting.style import (
    DOUBLE,
    INK,
    MARKERS,
    MUTED,
    PAGE,
    Frame,
    Panel,
    Parts,
    colour,
    point_range,
    stacked,
    zero_line,
)

CHANCE = "chance"
_UNBOUNDED = ("perplexity", "bits_per_byte")
"""Metrics that are no shares and of which less is better, by how their names end."""
_LEGEND, _FRAME, _ROW, _SERIES = 0.22, 0.62, 0.11, 0.065
"""Heights in inches: a line of the legend, a panel's surroundings, a row, each model in it."""


def is_share(metric: str) -> bool:
    """Whether a metric is a share of questions, from 0 to 1, of which more is better."""
    return not str(metric).endswith(_UNBOUNDED)


def tasks_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """A row a task, a point a model: the score with its interval, chance as a grey dash.

    Shares of questions stand on one axis from 0 to 1, every other metric has a panel of its own;
    below are the paired differences where the result has them and a page has room for both.

    Columns: ``model, task, metric, score`` with ends, ``chance, n_questions, n_truncated,
    n_skipped``. Parts: ``task_differences`` as for :func:`task_differences_figure`.
    """
    panels = _panels(table, "model", "score", _score_axis)
    differences = parts.get("task_differences")
    if differences is not None and len(differences):
        both = panels + _difference_panels(differences)
        if sum(height for height, _ in both) <= PAGE:
            panels = both
    return stacked(panels, DOUBLE, "no task was scored")


def task_differences_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """A row a task, a point a pair of models: first minus baseline; hollow: the interval covers 0.

    Columns: ``model, baseline, task, metric, delta`` with ends.
    """
    return stacked(_difference_panels(table), DOUBLE, "no models were compared")


def _difference_panels(table: Frame) -> list[Panel]:
    pairs = table["model"] + " \N{MINUS SIGN} " + table["baseline"]
    return _panels(table.assign(pair=pairs), "pair", "delta", _difference_axis)


Finish = Callable[[Any, Frame, str], None]


def _panels(table: Frame, by: str, stat: str, finish: Finish) -> list[Panel]:
    """A legend of the series, then a panel a unit: shares together, any other metric alone."""
    series = list(dict.fromkeys(table[by]))
    units = table["metric"].map(lambda metric: "" if is_share(metric) else str(metric))
    panels: list[Panel] = []
    if len(series) > 1 or (len(series) and stat == "score"):
        chance = stat == "score" and bool(table["chance"].notna().any())
        lines = len(series) + chance
        panels.append((_LEGEND * lines, lambda where: _legend(where, series, chance)))
    for unit in dict.fromkeys(units):
        rows = table[units == unit]
        n = len(rows[["task", "metric"]].drop_duplicates())
        height = _FRAME + n * (_ROW + _SERIES * len(series))
        panels.append((height, _panel(rows, unit, by, series, stat, finish)))
    return panels


def _legend(where: Any, series: Sequence[str], chance: bool) -> None:
    marks: list[Line2D] = [
        Line2D([], [], color=colour(i), marker=_marker(i), markersize=3.5, linestyle="none")
        for i in range(len(series))
    ]
    names = list(series)
    if chance:
        marks.append(Line2D([], [], color=MUTED, linewidth=1.6))
        names.append(CHANCE)
    where.legend(marks, names, loc="center left", ncols=1)


def _marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def _panel(
    rows: Frame, unit: str, by: str, series: Sequence[str], stat: str, finish: Finish
) -> Callable[[Any], None]:
    """What fills a panel with a row a (task, metric) and a point a series."""

    def fill(where: Any) -> None:
        ax = where.subplots()
        keys = list(dict.fromkeys(zip(rows["task"], rows["metric"], strict=True)))
        place = {key: at for at, key in enumerate(keys)}
        step = 0.6 / max(len(series), 1)
        for number, name in enumerate(series):
            part = rows[rows[by] == name]
            at = np.array(
                [place[key] for key in zip(part["task"], part["metric"], strict=True)], dtype=float
            )
            at += (number - (len(series) - 1) / 2) * step
            low, high = ends(part, stat)
            covers = (low <= 0) & (high >= 0) if stat == "delta" else np.zeros(len(part), bool)
            for filled in (True, False):
                chosen = covers != filled
                point_range(
                    ax,
                    at[chosen],
                    part[stat].to_numpy(dtype=float)[chosen],
                    low[chosen],
                    high[chosen],
                    horizontal=True,
                    colour=colour(number),
                    marker=_marker(number),
                    filled=filled,
                    size=3.2,
                )
        finish(ax, rows, unit)
        ax.set_yticks(range(len(keys)), _labels(rows, keys, unit))
        ax.set_ylim(len(keys) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x")

    return fill


def _labels(rows: Frame, keys: Sequence[tuple[str, str]], unit: str) -> list[str]:
    """Task, its metric where the panel has several, and how many questions lost evidence."""
    several = rows["metric"].nunique() > 1
    labels = []
    for task, metric in keys:
        part = rows[(rows["task"] == task) & (rows["metric"] == metric)]
        lost = [
            f"{int(part[column].max())} {word}"
            for column, word in (("n_truncated", "cut short"), ("n_skipped", "left out"))
            if column in part and part[column].max() > 0
        ]
        label = f"{task}, {metric}" if several else str(task)
        labels.append(", ".join([label, *lost]))
    return labels


def _score_axis(ax: Any, rows: Frame, unit: str) -> None:
    """The scale of a metric, with chance behind the points of each row."""
    keys = list(dict.fromkeys(zip(rows["task"], rows["metric"], strict=True)))
    for place, (task, metric) in enumerate(keys):
        chosen = (rows["task"] == task) & (rows["metric"] == metric)
        for level in rows.loc[chosen, "chance"].dropna().unique():
            ax.vlines(level, place - 0.4, place + 0.4, color=MUTED, linewidth=1.6, clip_on=False)
    if unit:
        ax.set_xlabel(f"{unit.replace('_', ' ')} (less is better), 95 % interval")
        return
    ax.set_xlim(0, 1)
    ax.set_xlabel("share of questions, 95 % interval over passages")


def _difference_axis(ax: Any, rows: Frame, unit: str) -> None:
    zero_line(ax, "x")
    reach = np.abs([*rows["delta"], *(end for each in ends(rows, "delta") for end in each)])
    widest = float(reach[np.isfinite(reach)].max(initial=0.0)) or 0.01
    ax.set_xlim(-1.08 * widest, 1.08 * widest)
    what = f"{unit.replace('_', ' ')} (less is better)" if unit else "share of questions"
    ax.set_xlabel(f"difference in {what}, paired; hollow: the interval covers 0", color=INK)
    pairs = list(dict.fromkeys(zip(rows["model"], rows["baseline"], strict=True)))
    if len(pairs) == 1:
        ax.set_title(" \N{MINUS SIGN} ".join(pairs[0]))
