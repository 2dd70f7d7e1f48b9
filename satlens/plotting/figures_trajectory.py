"""Statistics along training: a line a layer, from the untrained model to the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from satlens.plotting.curves import short_count
from satlens.plotting.figures_sites import read_name
from satlens.plotting.heatmaps import colour_bar
from satlens.plotting.style import (
    AMOUNT,
    INK,
    PAGE,
    Frame,
    Panel,
    Parts,
    no_data,
    point_range,
    stacked,
    zero_line,
)

TOKENS = "tokens_seen"
_ACROSS = 2
_HEIGHT = 1.9


_SPREADS = {
    "normalised_entropy": "entropy / log n",
    "effective_sources": "effective sources",
    "norm_effective_sources": "effective sources by norm",
}
"""How spread reads are, in order of preference: the first that a model has is drawn."""


class Lines(NamedTuple):
    """One picture: a statistic of some rows over training, a line a layer."""

    title: str
    rows: Frame
    stat: str
    label: str
    """Of the vertical axis."""


def sparsity_trajectory(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Gates: zero fraction and mean (static ones: mean and norm share), means over a layer's heads.

    Routes: the entropy of each kind of read, or the effective sources by norm of signed weights.
    Columns: those of ``sparsity`` and ``tokens_seen``.
    """
    gates, routes = (table[table["kind"] == kind] for kind in ("gate", "route"))
    pictures: list[Lines] = []
    if len(gates):
        static = gates["flags"].str.contains("static").all()
        pictures += [
            Lines("Norm share of V\N{SUBSCRIPT ONE}", gates, "norm_share", "norm share")
            if static
            else Lines("Closed gates", gates, "zero_fraction", "zero fraction"),
            Lines("Mean gate", gates, "mean", "mean"),
        ]
    if len(routes):
        several = routes[(routes["n_sources"] > 1) & (routes["sublayer"] != "out")]
        for stat, label in _SPREADS.items():
            if stat in several and several[stat].notna().any():
                pictures += _by_read(several, stat, label)
                break
    return _drawn(pictures)


def routes_trajectory(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """The embedding's share of every read, and the effective number of components.

    Columns: those of ``routes`` and ``tokens_seen``; the part ``trajectory_routes_reads`` adds the
    second.
    """
    inside = table[(table["sublayer"] != "out") & (table["component_index"] == 0)]
    pictures = _by_read(inside, "share", "share of the embedding")
    reads = parts.get("trajectory_routes_reads")
    if reads is not None:
        reads = reads[reads["sublayer"] != "out"]
        pictures += _by_read(reads, "effective_components", "effective components")
    return _drawn(pictures)


def divergence_trajectory(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """The mean divergence over tokens, a picture a comparison; reads of one source are left out.

    Columns: those of ``divergence`` and ``tokens_seen``.
    """
    several = table[table["n_sources"] > 1]
    base = str(table["base"].iloc[0]) if len(table) else "e"
    unit = {"e": "nats", "2": "bits"}.get(base, f"units of log base {base}")
    pictures = [
        Lines(
            str(name).replace("|", " against "),
            several[several["comparison"] == name],
            "js_token",
            f"JS divergence ({unit})",
        )
        for name in dict.fromkeys(several["comparison"])
    ]
    return _drawn(pictures)


def categories_trajectory(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """The contrast of two categories, raw and with frequency and position held fixed.

    Means over a layer's heads, from the part ``trajectory_categories_contrasts``.
    """
    contrasts = parts.get("trajectory_categories_contrasts")
    if contrasts is None:
        return _drawn([])
    titles = {"delta": "Contrast", "delta_controlled": "Frequency and position held fixed"}
    return _drawn(
        [
            Lines(title, contrasts, stat, "difference of means")
            for stat, title in titles.items()
            if stat in contrasts
        ]
    )


def circuits_trajectory(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Direct attribution and copying of V_1, means over a layer's heads."""
    titles = {
        "dla_v_first": ("Direct attribution of V\N{SUBSCRIPT ONE}", "nats"),
        "copying": ("Copying by V\N{SUBSCRIPT ONE}", "share of tokens"),
    }
    return _drawn(
        [Lines(title, table, s, label) for s, (title, label) in titles.items() if s in table]
    )


def evaluation_trajectory(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """The loss of every checkpoint with its interval, from the summary."""
    return stacked([(_HEIGHT, lambda where: _losses(where, summary))], width=3.3)


def _losses(where: Any, summary: Mapping[str, Any]) -> None:
    ax = where.subplots()
    found = summary.get("checkpoints", {})
    if not found:
        no_data(ax, "no losses in the summary")
        return
    cells = [found[str(tokens)]["nll"] for tokens in summary[TOKENS]]
    ends = {
        key: np.array([np.nan if cell[key] is None else cell[key] for cell in cells], float)
        for key in ("estimate", "low", "high")
    }
    point_range(ax, summary[TOKENS], ends["estimate"], ends["low"], ends["high"])
    ax.plot(summary[TOKENS], ends["estimate"], color=INK, linewidth=0.9)
    _training_axis(ax, summary[TOKENS])
    ax.set_title("Loss, 95 % intervals")
    ax.set_ylabel("nats a token")


def _by_read(rows: Frame, stat: str, label: str) -> list[Lines]:
    """A picture a kind of read."""
    names = [
        read_name(s, r).replace(" and output", "")
        for s, r in zip(rows["sublayer"], rows["role"], strict=True)
    ]
    return [Lines(name, rows[np.equal(names, name)], stat, label) for name in dict.fromkeys(names)]


def _drawn(pictures: Sequence[Lines]) -> Figure:
    """Pictures in rows of two, with one colour a layer in all of them."""
    defined = [p for p in pictures if p.rows[p.stat].notna().any()]
    layers = sorted({int(layer) for p in defined for layer in p.rows["layer"].dropna()})
    rows = [defined[i : i + _ACROSS] for i in range(0, len(defined), _ACROSS)]
    height = min(_HEIGHT, PAGE / max(len(rows), 1))
    across = min(len(defined), _ACROSS)
    panels: list[Panel] = [
        (height, lambda where, row=row: _row(where, row, across, layers)) for row in rows
    ]
    width = 3.7 if len(defined) == 1 else 6.9
    return stacked(panels, width=width, empty="nothing to follow over training")


def _row(where: Any, pictures: Sequence[Lines], across: int, layers: Sequence[int]) -> None:
    shades = ScalarMappable(Normalize(layers[0], max(layers[-1], layers[0] + 1)), AMOUNT)
    axes = list(where.subplots(1, across, squeeze=False)[0])
    for ax, picture in zip(axes, pictures, strict=False):
        _lines(ax, picture, shades)
    for ax in axes[len(pictures) :]:
        ax.set_axis_off()
    bar = colour_bar(axes, shades, "layer")
    bar.set_ticks(layers[:: max(1, -(-len(layers) // 8))])


def _lines(ax: Axes, picture: Lines, shades: Any) -> None:
    # Heads (and attention beside MLP) of a layer are one line: their mean.
    mean = picture.rows.groupby(["layer", TOKENS])[picture.stat].mean()
    for layer in mean.index.get_level_values("layer").unique():
        values = mean.loc[layer].dropna()
        ax.plot(
            values.index.to_numpy(dtype=float),
            values.to_numpy(dtype=float),
            color=shades.to_rgba(float(layer)),
            marker="o",
            markersize=2.5,
        )
    if mean.min() < 0:
        zero_line(ax)
    else:
        ax.set_ylim(bottom=0.0)
    ax.set_title(picture.title)
    ax.set_ylabel(picture.label)
    _training_axis(ax, sorted(set(picture.rows[TOKENS])))


def _training_axis(ax: Axes, tokens: Sequence[int]) -> None:
    """Tokens on a scale that is linear up to the first checkpoint and logarithmic beyond."""
    trained = [count for count in tokens if count > 0]
    if trained:
        ax.set_xscale("symlog", base=2, linthresh=trained[0], linscale=1.0)
        ax.set_xlim(left=min(tokens) - 0.05 * trained[0], right=trained[-1] * 1.1)
    ax.xaxis.set_major_locator(FixedLocator(_spread(tokens)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(short_count))
    ax.set_xlabel("training tokens")
    ax.grid(axis="y")


def _spread(tokens: Sequence[int], ratio: float = 1.5) -> list[int]:
    """Checkpoints far enough from each other to be labelled."""
    chosen: list[int] = []
    for count in tokens:
        if not chosen or count >= ratio * chosen[-1]:
            chosen.append(count)
    return chosen
