"""Arms against each other: training curves, paired differences, losses on held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from satlens.plotting.curves import focus_late, training_curves
from satlens.plotting.intervals import arm_differences
from satlens.plotting.style import COLUMN, DOUBLE, INK, Frame, Parts, colour, new_figure, styled


def curves_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Validation loss of every arm, and its paired difference from the first arm.

    Columns: ``arm, seed, tokens, val_loss``; ``summary["reference"]`` names another reference.
    """
    arms = list(dict.fromkeys(table["arm"]))
    reference = summary.get("reference") or arms[0]
    paired = len(arms) > 1
    figure = new_figure(DOUBLE if paired else COLUMN, 2.5)
    with styled():
        axes = figure.subplots(1, 2 if paired else 1, squeeze=False)[0]
        training_curves(axes[0], table, "val_loss", arms, reference=reference)
        focus_late(axes[0], table, "val_loss")
        axes[0].set_ylabel("validation NLL (nats/token)")
        axes[0].set_title("Held-out loss while training")
        axes[0].legend(loc="upper right")
        if paired:
            training_curves(
                axes[1], table, "val_loss", arms, reference=reference, from_reference=True
            )
            axes[1].set_ylabel("difference (nats/token)")
            axes[1].set_title(f"Paired difference from {reference}")
    return figure


def comparison_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Paired differences of arms in held-out NLL: every seed, the mean and its t interval.

    One row a contrast with columns ``first, second, difference`` (and ends) and the differences of
    single seeds in ``seed_<k>``.
    """
    pairs = [f"{row['first']} \N{MINUS SIGN} {row['second']}" for _, row in table.iterrows()]
    columns = [name for name in table if str(name).startswith("seed_")]
    seeds = {
        pair: [float(row[name]) for name in columns if pd.notna(row[name])]
        for pair, (_, row) in zip(pairs, table.iterrows(), strict=True)
    }
    figure = new_figure(DOUBLE * 0.75, 1.0 + 0.33 * len(table))
    with styled():
        ax = figure.subplots()
        arm_differences(
            ax, pairs, seeds, table, "difference", noise_floor=summary.get("noise_floor")
        )
        ax.set_xlabel("paired difference in held-out NLL (nats/token)")
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def evaluation_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Held-out NLL of every document, sorted, and the mean over tokens with its interval.

    One row a document with ``nll``; ``summary["nll"]`` has ``estimate, low, high`` over all tokens.
    """
    values = table["nll"].astype(float).dropna().sort_values().to_numpy()
    mean = {k: v for k, v in (summary.get("nll") or {}).items() if isinstance(v, int | float)}
    figure = new_figure(COLUMN, 2.0)
    with styled():
        ax = figure.subplots()
        if "low" in mean and "high" in mean:
            ax.axhspan(mean["low"], mean["high"], color=colour(0), alpha=0.2, linewidth=0)
        if "estimate" in mean:
            ax.axhline(mean["estimate"], color=colour(0), label="all tokens, 95 % interval")
            ax.legend(loc="upper left")
        size = 3.0 if len(values) <= 100 else 1.2
        ax.plot(range(1, len(values) + 1), values, "o", color=INK, markersize=size, alpha=0.7)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set_xlabel("document, from easiest to hardest")
        ax.set_ylabel("NLL (nats/token)")
        ax.grid(axis="y")
    return figure
