"""Training curves of paired arms: the mean over seeds with their spread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from satlens.plotting.style import DASHES, Frame, arm_colours, zero_line


def training_curves(
    ax: Axes,
    table: Frame,
    stat: str,
    arms: Sequence[str],
    *,
    reference: str | None = None,
    from_reference: bool = False,
) -> None:
    """``stat`` over tokens, a line an arm (mean over seeds), a band from lowest to highest seed.

    Args:
        table: columns ``arm``, ``seed``, ``tokens`` and ``stat``.
        reference: arm drawn in ink.
        from_reference: draw paired differences, seed by seed, from the reference instead.
    """
    colours = arm_colours(arms, reference)
    wide = table.pivot_table(index=["arm", "seed"], columns="tokens", values=stat)
    for number, arm in enumerate(arms):
        if arm not in wide.index.get_level_values("arm") or (from_reference and arm == reference):
            continue
        rows = wide.loc[arm]
        if from_reference:
            rows = (rows - wide.loc[reference]).dropna(how="all")
        rows = rows.dropna(axis="columns", how="any")
        if rows.empty:
            continue
        tokens = rows.columns.to_numpy(dtype=float)
        values = rows.to_numpy(dtype=float)
        if len(values) > 1:
            low, high = values.min(axis=0), values.max(axis=0)
            ax.fill_between(tokens, low, high, color=colours[arm], alpha=0.18, linewidth=0)
        ax.plot(
            tokens,
            values.mean(axis=0),
            color=colours[arm],
            linestyle=DASHES[number % len(DASHES)],
            label=arm,
            zorder=2.5 if arm == reference else 3,
        )
    if from_reference:
        zero_line(ax)
    ax.grid(axis="y")
    ax.set_xlim(left=0)
    ax.xaxis.set_major_formatter(FuncFormatter(short_count))
    ax.set_xlabel("training tokens")


def focus_late(ax: Axes, table: Frame, stat: str, share: float = 0.15) -> None:
    """Limit the vertical axis to what happens after the first ``share`` of training."""
    late = table[table["tokens"] >= share * table["tokens"].max()][stat].to_numpy(dtype=float)
    late = late[np.isfinite(late)]
    if len(late) and np.ptp(late) > 0:
        margin = 0.06 * float(np.ptp(late))
        ax.set_ylim(late.min() - margin, late.max() + margin)


def short_count(value: float, _position: object = None) -> str:
    """1200 -> 1.2k, 600000 -> 600k, 2500000 -> 2.5M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"
