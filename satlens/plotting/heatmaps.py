"""Maps over layers: heads of gates, sources of routes, effects of a sweep.

Rows are layers, the first on top. Every function fills one Axes from a result table.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import QuadMesh
from matplotlib.colors import Colormap, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from satlens.plotting.style import AMOUNT, INK, MUTED, SIGNED, Frame

_ANNOTATED_CELLS = 64
ANNOTATED_ROWS = 16
"""Maps of more rows have no numbers in their cells."""
_ALL_TICKS = 12
_EMBEDDING_WIDTH = 2
MINUS = "\N{MINUS SIGN}"


def head_grid(table: Frame, stat: str) -> tuple[np.ndarray, list[int], list[int]]:
    """``stat`` as a matrix (layers, heads) with the layers and heads it has; NaN for gaps."""
    rows = table.dropna(subset=["head"])
    wide = rows.pivot_table(index="layer", columns="head", values=stat, dropna=False, sort=True)
    return (
        wide.to_numpy(dtype=float),
        [int(layer) for layer in wide.index],
        [int(head) for head in wide.columns],
    )


def head_map(
    ax: Axes,
    table: Frame,
    stat: str,
    *,
    limits: tuple[float, float],
    signed: bool = False,
    dead: str | None = None,
    framed: Frame | None = None,
    title: str = "",
) -> QuadMesh:
    """Heat map of one statistic over (layer, head); values are written where there is room.

    Args:
        limits: ends of the colour scale, given so that panels can share them.
        dead: column that says which heads never open; those are crossed out.
        framed: one boolean a row; those cells get a frame.
    """
    values, layers, heads = head_grid(table, stat)
    cmap = SIGNED if signed else AMOUNT
    mesh = _mesh(ax, values, limits, cmap)
    crossed = np.zeros(values.shape, dtype=bool)
    if dead is not None and dead in table:
        crossed = head_grid(table.assign(**{dead: table[dead].astype(float)}), dead)[0] > 0.5
        _cross_out(ax, crossed)
    if values.size <= _ANNOTATED_CELLS:
        _write_values(ax, np.where(crossed, np.nan, values), limits, cmap)
    if framed is not None:
        chosen = head_grid(table.assign(framed=framed.astype(float)), "framed")[0] > 0.5
        _frame(ax, chosen)
    _ticks(ax, "x", heads)
    _ticks(ax, "y", layers)
    ax.set_xlabel("KV head")
    ax.set_ylabel("layer")
    ax.set_title(title)
    return mesh


def _mesh(
    ax: Axes,
    values: np.ndarray,
    limits: tuple[float, float],
    cmap: Colormap,
    empty: str = "#eceff1",
) -> QuadMesh:
    ax.set_facecolor(empty)  # a cell without a value
    mesh = ax.pcolormesh(
        np.ma.masked_invalid(values),
        cmap=cmap,
        vmin=limits[0],
        vmax=limits[1],
        edgecolors="white",
        linewidth=0.5 if values.size <= 300 else 0.0,
    )
    ax.set_ylim(len(values), 0)
    for side in ax.spines.values():
        side.set_visible(False)
    return mesh


def _write_values(
    ax: Axes, values: np.ndarray, limits: tuple[float, float], cmap: Colormap
) -> None:
    span = (limits[1] - limits[0]) or 1.0
    for (row, column), value in np.ndenumerate(values):
        if not np.isfinite(value):
            continue
        shade = cmap(float(np.clip((value - limits[0]) / span, 0, 1)))
        ax.text(
            column + 0.5,
            row + 0.5,
            _short(value),
            ha="center",
            va="center",
            fontsize=6.5,
            color=_ink_on(shade),
        )


def _short(value: float) -> str:
    """At most four characters: 0.43, 1.22, 12.5, and a typographic minus."""
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    if text.strip("-0.") == "":
        text = "0" if value == 0 else "0.00"
    return text.replace("-", MINUS)


def _cross_out(ax: Axes, dead: np.ndarray) -> None:
    """A cross through each dead head, light and dark so that it shows on any colour."""
    for row, column in np.argwhere(dead):
        for width, ink in ((2.2, "white"), (0.9, INK)):
            for ends in ((0.1, 0.9), (0.9, 0.1)):
                ax.plot(
                    [column + 0.1, column + 0.9],
                    [row + ends[0], row + ends[1]],
                    color=ink,
                    linewidth=width,
                    solid_capstyle="round",
                )


def _frame(ax: Axes, chosen: np.ndarray) -> None:
    """A dark frame inside each chosen cell."""
    for row, column in np.argwhere(chosen):
        ax.add_patch(
            Rectangle(
                (column + 0.06, row + 0.06), 0.88, 0.88, fill=False, edgecolor=INK, linewidth=0.9
            )
        )


def _ticks(ax: Axes, which: str, labels: list[int]) -> None:
    """Numbers at the middle of cells, thinned when there are many."""
    places = np.arange(len(labels)) + 0.5
    step = max(1, -(-len(labels) // (_ALL_TICKS if which == "y" else _ALL_TICKS // 2)))
    set_ticks = ax.set_xticks if which == "x" else ax.set_yticks
    set_ticks(places[::step], [str(label) for label in labels[::step]])
    ax.tick_params(axis="both", length=0)


def limits_of(tables: list[Frame], stats: list[str], signed: bool = False) -> Any:
    """Common ends of a colour scale over several tables and columns."""
    found = [
        table[stat].astype(float).to_numpy() for table in tables for stat in stats if stat in table
    ]
    values = np.concatenate(found) if found else np.zeros(1)
    values = values[np.isfinite(values)]
    if not len(values):
        return (0.0, 1.0)
    if signed:
        top = float(np.abs(values).max()) or 1.0
        return (-top, top)
    top = float(values.max())
    return (min(0.0, float(values.min())), top if top > 0 else 1.0)


# -- routes ----------------------------------------------------------------------------------------


class Span(NamedTuple):
    """What a source label says: kind of source, first and last sublayer (-1 is the embedding)."""

    kind: str
    first: int
    last: int


_LABEL = re.compile(r"(block|partial) (\d+)\.\.(\d+)")
_STATE = re.compile(r"state \.\.(\d+)")


def span_of(label: str) -> Span | None:
    """``embed``, ``block 0..3``, ``partial 4..5``, ``state ..5``; None for anything else.

    A state after a layer stands at that layer's two sublayers.
    """
    if label == "embed":
        return Span("embedding", -1, -1)
    state = _STATE.fullmatch(label)
    if state is not None:
        return Span("state", int(state[1]) - 1, int(state[1]))
    match = _LABEL.fullmatch(label)
    return None if match is None else Span(match[1], int(match[2]), int(match[3]))


def route_map(
    ax: Axes,
    table: Frame,
    weight: str,
    *,
    limits: tuple[float, float],
    signed: bool = False,
    deepest: int | None = None,
    ringed: str | None = None,
    title: str = "",
) -> ScalarMappable:
    """Mass that the reads of one role give to each source.

    ``table`` has one row a (read, source) with columns ``row`` (label of the read), ``source`` and
    ``weight``, reads in order. The horizontal axis is depth, sublayer by sublayer after the
    embedding; a source that sums several sublayers is one cell as wide as they are, with the mass
    of the whole source written once. The block still being written has a dotted frame.

    Args:
        deepest: number of sublayers on the axis, given so that panels can share it.
        ringed: column that says which cells get a small ring in their corner.
    """
    cmap = SIGNED if signed else AMOUNT
    labels = list(dict.fromkeys(table["row"]))
    place = {label: row for row, label in enumerate(labels)}
    write = len(labels) <= ANNOTATED_ROWS
    spans = [span_of(str(label)) for label in table["source"]]
    if deepest is None:
        deepest = max((span.last + 1 for span in spans if span is not None), default=0)
    rings = table[ringed].astype(bool) if ringed is not None else np.zeros(len(table), dtype=bool)
    cells = zip(spans, table["row"], table[weight].astype(float), rings, strict=True)
    for span, label, value, marked in cells:
        if span is not None and np.isfinite(value):
            shade = cmap(float(np.clip((value - limits[0]) / (limits[1] - limits[0] or 1), 0, 1)))
            _source_cell(ax, place[label], span, value, shade, write, marked)
    ax.set_xlim(0, deepest + _EMBEDDING_WIDTH)
    ax.set_ylim(len(labels), 0)
    for side in ax.spines.values():
        side.set_visible(False)
    _depth_ticks(ax, deepest)
    _layer_ticks(ax, labels)
    ax.set_title(title)
    return ScalarMappable(Normalize(*limits), cmap)


def _source_cell(
    ax: Axes, row: int, span: Span, value: float, shade: Any, write: bool, ringed: bool
) -> None:
    """A source as a cell over its sublayers, its mass in per cent."""
    x, width = span.first + _EMBEDDING_WIDTH, span.last - span.first + 1
    if span.kind == "embedding":
        x, width = 0, _EMBEDDING_WIDTH
    edge = 1.0 if write else 0.3
    ax.add_patch(Rectangle((x, row), width, 1, facecolor=shade, edgecolor="white", linewidth=edge))
    ink = _ink_on(shade)
    if ringed:
        ring = {"markersize": 2.2, "markerfacecolor": "none", "markeredgewidth": 0.6}
        ax.plot(x + width - 0.2, row + 0.18, "o", markeredgecolor=ink, **ring)
    if span.kind == "partial":
        inner = Rectangle((x + 0.06, row + 0.09), width - 0.12, 0.82, fill=False)
        inner.set(edgecolor=ink, linewidth=0.8 if write else 0.4, linestyle=(0, (1, 1.2)))
        ax.add_patch(inner)
    if write:
        ax.text(
            x + width / 2,
            row + 0.5,
            f"{round(100 * value)}".replace("-", MINUS),
            ha="center",
            va="center",
            fontsize=5.5 if width == 1 else 6.5,
            color=ink,
        )


def _ink_on(shade: Any) -> str:
    """Dark or white text, whichever is readable on a colour."""
    red, green, blue = shade[:3]
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _depth_ticks(ax: Axes, deepest: int) -> None:
    """The embedding, then each layer under its two sublayers."""
    n_layers = -(-deepest // 2)
    step = max(1, -(-n_layers // _ALL_TICKS))
    shown = range(0 if step == 1 else step, n_layers, step)
    places = [_EMBEDDING_WIDTH / 2, *(_EMBEDDING_WIDTH + 2 * layer + 1 for layer in shown)]
    ax.set_xticks(places, ["emb", *(str(layer) for layer in shown)])
    ax.tick_params(axis="both", length=0)
    ax.set_xlabel("source layer (attention, MLP)")


def stream_map(
    ax: Axes,
    table: Frame,
    weight: str,
    *,
    limits: tuple[float, float],
    signed: bool = False,
    title: str = "",
) -> QuadMesh:
    """Weights of reads over parallel streams, which have no place in depth.

    ``table`` has one row a (read, stream) with columns ``row`` (label of the read, in order) and
    ``source_index``.
    """
    labels = list(dict.fromkeys(table["row"]))
    wide = table.pivot_table(index="row", columns="source_index", values=weight, dropna=False)
    values = wide.loc[labels].to_numpy(dtype=float)
    cmap = SIGNED if signed else AMOUNT
    mesh = _mesh(ax, values, limits, cmap)
    if values.size <= _ANNOTATED_CELLS:
        _write_values(ax, values, limits, cmap)
    _ticks(ax, "x", [int(index) for index in wide.columns])
    _layer_ticks(ax, labels)
    ax.set_xlabel("stream")
    ax.set_title(title)
    return mesh


def component_map(
    ax: Axes,
    table: Frame,
    stat: str,
    *,
    limits: tuple[float, float],
    n_components: int,
    labelled: bool = True,
    title: str = "",
) -> QuadMesh:
    """A signed statistic of the reads of one role over the embedding and every sublayer.

    ``table`` has one row a (read, component) with columns ``row`` (label of the read, in order) and
    ``component_index``; what a read cannot contain has no cell.

    Args:
        n_components: of the model, given so that panels can share the axis.
        labelled: whether the horizontal axis has its labels.
    """
    labels = list(dict.fromkeys(table["row"]))
    values = np.full((len(labels), n_components), np.nan)
    rows = table["row"].map({label: row for row, label in enumerate(labels)})
    values[rows.to_numpy(dtype=int), table["component_index"].to_numpy(dtype=int)] = table[stat]
    mesh = _mesh(ax, values, limits, SIGNED, empty="white")
    ax.set_xlim(0, n_components)
    _layer_ticks(ax, labels)
    n_layers = (n_components - 1) // 2
    step = max(1, -(-n_layers // _ALL_TICKS))
    shown = range(0 if step == 1 else step, n_layers, step)
    ax.set_xticks([0.5, *(2 * layer + 2 for layer in shown)], ["e", *map(str, shown)])
    if not labelled:
        ax.set_xticklabels([])
    # A line between layers, whose attention and MLP stand side by side, where there are cells.
    starts = np.arange(n_layers if n_layers <= _ALL_TICKS else 0) * 2 + 1
    top = np.isfinite(values[:, starts]).argmax(axis=0)
    seen = np.isfinite(values[:, starts]).any(axis=0)
    ax.vlines(starts[seen], top[seen], len(labels), color=MUTED, linewidth=0.4)
    ax.set_xlabel("embedding (e); attention and MLP of each layer" if labelled else "")
    ax.set_title(title)
    return mesh


def _layer_ticks(ax: Axes, labels: list[Any]) -> None:
    """Labels of rows at the middle of cells, thinned when there are many."""
    step = max(1, -(-len(labels) // _ALL_TICKS))
    ax.set_yticks(np.arange(0, len(labels), step) + 0.5, [str(label) for label in labels[::step]])
    ax.tick_params(axis="both", length=0)
    ax.set_ylabel("layer")


def colour_bar(ax: Axes | list[Axes], mappable: Any, label: str, aspect: float = 22) -> Any:
    """A thin colour bar beside ``ax``, returned."""
    first = ax[0] if isinstance(ax, list) else ax
    bar = first.figure.colorbar(mappable, ax=ax, shrink=0.9, aspect=aspect, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(length=2, colors=MUTED, labelcolor=INK)
    bar.locator = MaxNLocator(5)
    bar.update_ticks()
    return bar
