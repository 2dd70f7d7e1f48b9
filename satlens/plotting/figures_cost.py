"""What variants cost: training speed and activation memory against the transformer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from satlens.plotting.style import DOUBLE, INK, Frame, Parts, colour, new_figure, styled


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
