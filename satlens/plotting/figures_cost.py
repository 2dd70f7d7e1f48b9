"""What variants cost: training speed and activation memory against the transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from satlens.plotting.curves import focus_late
from satlens.plotting.style import (
    DASHES,
    DOUBLE,
    INK,
    MARKERS,
    Frame,
    Parts,
    arm_colours,
    colour,
    new_figure,
    point_range,
    styled,
    zero_line,
)

BASELINE = "transformer"


def bench_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Ratios to each row's reference: speed with its quartiles, and saved activations.

    Columns: ``variant, reference, speed_ratio`` (and ends), ``memory_ratio``. The grey band is the
    transformer timed against itself, ``summary["noise_floor"]``.
    """
    rows = table[table["variant"] != table["reference"]]
    rows = rows[~rows["variant"].str.endswith("(again)")]
    labels = [f"{row['variant']} / {row['reference']}" for _, row in rows.iterrows()]
    figure = new_figure(DOUBLE, 0.9 + 0.33 * max(len(rows), 1))
    with styled():
        speed, memory = figure.subplots(1, 2, sharey=True)
        places = range(len(rows))
        low, _, high = summary.get("noise_floor") or (1.0, 1.0, 1.0)
        speed.axvspan(low, high, color=INK, alpha=0.12, linewidth=0)
        middle = rows["speed_ratio"].astype(float)
        ends = [middle - rows["speed_ratio_low"], rows["speed_ratio_high"] - middle]
        speed.errorbar(middle, places, xerr=ends, fmt="o", color=colour(0), capsize=2)
        memory.plot(rows["memory_ratio"].astype(float), places, "s", color=colour(1))
        for ax, title in ((speed, "training tokens/s"), (memory, "saved activations (bytes)")):
            ax.axvline(1.0, color=INK, linewidth=0.8)
            ax.set_title(title)
            ax.set_xlabel("ratio to the reference")
            ax.grid(axis="x")
        speed.set_yticks(list(places), labels)
        speed.invert_yaxis()
    return figure


# -- what a lower loss costs -----------------------------------------------------------------------


def loss_against_cost(means: Frame, seeds: Frame, noise_floor: Sequence[float] | None) -> Figure:
    """Loss differences from the transformer against ratios of throughput and of memory.

    Args:
        means: a row an arm with ``arm, value`` and its ends ``low, high``, ``speed`` and its ends
            ``speed_low, speed_high``, ``memory``.
        seeds: ``arm, value, speed, memory`` of every seed.
        noise_floor: lower quartile, median and upper quartile of the transformer's speed ratio to
            itself.
    """
    figure = new_figure(DOUBLE, 3.1)
    look = dict(zip(means["arm"], MARKERS, strict=False))
    inks = arm_colours([BASELINE, *means["arm"]], BASELINE)
    with styled():
        speed, memory = axes = figure.subplots(1, 2, sharey=True)
        if noise_floor:
            speed.axvspan(noise_floor[0], noise_floor[2], color=INK, alpha=0.12, linewidth=0)
        for ax, x in ((speed, "speed"), (memory, "memory")):
            zero_line(ax)
            ax.plot(1.0, 0.0, "*", color=INK, markersize=7, label=BASELINE, zorder=4)
            for arm, rows in means.groupby("arm", sort=False):
                own = seeds[seeds["arm"] == arm]
                ax.plot(own[x], own["value"], "o", color=inks[arm], markersize=2, alpha=0.5)
                if x + "_low" in rows:
                    ends = rows[x + "_low"], rows[x + "_high"]
                    ax.hlines(rows["value"], *ends, color=inks[arm], linewidth=0.9)
                # Arms of equal memory would cover each other's intervals.
                ends = (rows["low"], rows["high"]) if ax is speed else ()
                marker = look.get(arm, "o")
                point_range(
                    ax, rows[x], rows["value"], *ends, colour=inks[arm], marker=marker, label=arm
                )
            ax.grid()
        _within_seeds(speed, [0.0, *seeds["value"]])
        colours = [inks[arm] for arm in means["arm"]]
        _cut_ends(speed, means["speed"], means["low"], means["high"], colours)
        speed.set_xlabel("training tokens/s, ratio to the transformer")
        memory.set_xlabel("saved activations in bytes, ratio to the transformer")
        speed.set_ylabel("held-out NLL, difference\nfrom the transformer (nats/token)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def loss_against_time(table: Frame) -> Figure:
    """Validation losses along training against time, whole and at the end.

    Args:
        table: a row an arm and evaluation with ``arm, tokens``; ``time`` in units of the
            transformer's whole training, with quartiles ``time_low, time_high``; ``value`` with
            ends ``low, high``.
    """
    figure = new_figure(DOUBLE, 3.1)
    inks = arm_colours(dict.fromkeys(table["arm"]), BASELINE)
    with styled():
        whole, end = axes = figure.subplots(1, 2)
        late = table[table["tokens"] >= 0.6 * table["tokens"].max()]
        margin = 0.12 * (late["value"].max() - late["value"].min())
        bottom, top = late["value"].min() - margin, late["value"].max() + margin
        for number, arm in enumerate(inks):
            rows = table[table["arm"] == arm].sort_values("tokens")
            marker = "*" if arm == BASELINE else MARKERS[(number - 1) % len(MARKERS)]
            look = {"color": inks[arm], "linestyle": DASHES[number % len(DASHES)]}
            look |= {"marker": marker, "markersize": 5 if arm == BASELINE else 3.2}
            for ax in axes:
                ax.plot(rows["time"], rows["value"], linewidth=1.0, label=arm, **look)
            last = rows.iloc[[-1]]
            quartiles = last["time_low"], last["time_high"]
            end.hlines(last["value"], *quartiles, color=inks[arm], linewidth=0.9)
            end.vlines(rows["time"], rows["low"], rows["high"], color=inks[arm], linewidth=0.9)
        whole.set_xlim(0, table["time"].max() * 1.02)
        focus_late(whole, table[table["tokens"] > 0], "value", share=0.0)
        end.set_ylim(bottom, top)
        end.set_xlim(late["time"].min() * 0.97, late["time"].max() * 1.03)
        for ax, title in ((whole, "All of training"), (end, "End of training")):
            ax.set_xlabel("training time (transformer's whole training = 1)")
            ax.set_ylabel("validation NLL (nats/token)")
            ax.set_title(title)
            ax.grid()
        handles = whole.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4, handlelength=3)
    return figure


def _within_seeds(ax: Axes, values: Sequence[float]) -> None:
    """Vertical limits from single seeds: an interval from two seeds may be ten times as long."""
    low, high = float(np.min(values)), float(np.max(values))
    margin = 0.25 * (high - low) or 0.01
    ax.set_ylim(low - margin, high + margin)
    ax.yaxis.set_major_locator(MaxNLocator(6))


def _cut_ends(ax: Axes, x: Frame, low: Frame, high: Frame, inks: Sequence[str]) -> None:
    """An arrow head at the frame where an interval goes on beyond it."""
    bottom, top = ax.get_ylim()
    for place, start, stop, ink in zip(x, low, high, inks, strict=True):
        for goes_on, edge, head in ((start < bottom, bottom, "v"), (stop > top, top, "^")):
            if goes_on:
                ax.plot(place, edge, head, color=ink, markersize=3.5, clip_on=False, zorder=5)
