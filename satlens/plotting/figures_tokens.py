"""The beginning of a token view on paper: losses of tokens, gates and routes below them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font

from satlens.plotting.style import (
    AMOUNT,
    INK,
    MUTED,
    SIGNED,
    STYLE,
    Frame,
    Parts,
    colour,
    stacked,
)

_TOKENS = 56
_ROWS = 40
"""Of a map; of more sites every second, third, ... is drawn, which its colour bar says."""
_LETTERS = 14
"""Of a token; longer ones are cut."""


def token_view_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """The first tokens of the first document.

    Columns: ``document, token, nll`` and ``dnll`` under an intervention. The parts
    ``token_channels`` and ``token_values`` give the maps: gates of every head (a mean over heads
    where there are many), the weight of each read on its first source.
    """
    if not len(table):
        return stacked([])
    start = table[table["document"] == table["document"].iloc[0]].index[:_TOKENS]
    rows, maps = table.loc[start], []
    if {"token_channels", "token_values"} <= parts.keys():
        values = parts["token_values"].loc[start]
        kinds = parts["token_channels"].groupby("kind", sort=False)
        maps = [_grid(str(kind), channels, values) for kind, channels in kinds]
    heights = [1.4, *(0.25 + 0.13 * len(labels) for _, labels, _ in maps)]

    def fill(where: Any) -> None:
        grid = where.subplots(
            len(heights), 2, squeeze=False, height_ratios=heights, width_ratios=[40, 1]
        )
        for ax in grid[:, 0]:
            ax.set(xlim=(0, len(rows)), xticks=[])
        grid[0, 1].set_axis_off()
        _losses(grid[0, 0], rows, summary)
        for (ax, bar), drawn in zip(grid[1:], maps, strict=True):
            _map(ax, bar, *drawn)
        _write_tokens(grid[-1, 0], rows["token"])

    return stacked([(sum(heights) + 0.8, fill)])


def _losses(ax: Axes, rows: Frame, summary: Mapping[str, Any]) -> None:
    places = np.arange(len(rows)) + 0.5
    ax.bar(places, rows["nll"].astype(float), width=0.8, color=MUTED, label="as it is")
    if "nll_intervened" in rows:
        label = str(summary.get("intervention") or "under the intervention")
        inside = rows["nll_intervened"].astype(float)
        ax.plot(places, inside, "_", color=colour(1), markersize=5, label=_drawable(label))
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    ax.set_ylabel("NLL (nats)")
    ax.set_title(f"First {len(rows)} tokens")


def _grid(kind: str, channels: Frame, values: Frame) -> tuple[np.ndarray, list[str], str]:
    """(rows, tokens) of values, what each row is, and what a value is."""
    if kind == "gate":
        meaning = "gate"
        if len(channels) <= _ROWS:
            names = channels["site"] + " " + channels["head"].astype(str)
            groups = [[name] for name in channels["channel"]]
        else:
            meaning, names = "gate, mean over heads", channels["site"].drop_duplicates()
            groups = [list(own["channel"]) for _, own in channels.groupby("site", sort=False)]
    else:
        first = channels.drop_duplicates("site")
        names, groups = first["site"], [[name] for name in first["channel"]]
        sources = first["source"].unique()
        meaning = f"weight on {sources[0] if len(sources) == 1 else 'the first source'}"
    step = -(-len(groups) // _ROWS)
    if step > 1:
        meaning += f" (1 of {step} rows)"
    grid = np.array([values[own].to_numpy(dtype=float).mean(axis=1) for own in groups[::step]])
    return grid, list(names)[::step], meaning


def _map(ax: Axes, bar: Axes, grid: np.ndarray, labels: list[str], meaning: str) -> None:
    low, high = float(np.nanmin(grid, initial=0.0)), float(np.nanmax(grid, initial=0.0))
    signed = low < 0
    top = max(high, -low) or 1.0
    limits = Normalize(-top, top) if signed else Normalize(0.0, top)
    mesh = ax.pcolormesh(np.ma.masked_invalid(grid), cmap=SIGNED if signed else AMOUNT, norm=limits)
    ax.set_ylim(len(labels), 0)
    ax.set_yticks(np.arange(len(labels)) + 0.5, labels, fontsize=6.5)
    ax.tick_params(length=0)
    bar.figure.colorbar(mesh, cax=bar, label=meaning)


def _write_tokens(ax: Axes, tokens: Frame) -> None:
    """The tokens under the last picture."""
    texts = [_drawable(str(text)) for text in tokens]
    cut = [t if len(t) <= _LETTERS else f"{t[: _LETTERS - 1]}\u2026" for t in texts]
    places = np.arange(len(texts)) + 0.5
    ax.set_xticks(places, cut, rotation=90, fontsize=6.5, color=INK, parse_math=False)
    ax.tick_params(axis="x", length=0)


def _drawable(text: str) -> str:
    """A token in letters that the font has; line ends, tabs and lone spaces made visible."""
    shown = text.replace("\n", "\u21b5").replace("\t", "\u21e5")
    shown = shown.strip(" ") or "\u2423" * len(shown)
    return "".join(c if ord(c) in _characters() else "\u25a1" for c in shown)


@cache
def _characters() -> frozenset[int]:
    """Characters of the font of all figures."""
    font = FontProperties(family=STYLE["font.sans-serif"])
    return frozenset(FT2Font(findfont(font)).get_charmap())
