"""The look of every figure, and figures that keep it wherever they are drawn or saved.

No pyplot: a figure belongs to whoever asked for it, so nothing is left open and threads and
notebooks do not meet. Colours are those of Okabe and Ito (2008) for arms and kinds, cividis for
amounts, a blue-orange scale for signed numbers: all readable without red-green vision. Text is at
least 6.5 points at the printed size, one column (3.3 in) or two (6.9 in).
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure

Frame = Any
"""A pandas DataFrame (or a row of one). Not annotated as such: pandas types every selection as a
union of all that it could be."""

COLUMN = 3.3
"""Width of one column of a paper in inches."""
DOUBLE = 6.9
"""Width of two columns in inches."""
PAGE = 8.9
"""Height in inches that a figure should not exceed."""
DPI = 200
SCREEN_DPI = 110
"""Of the pictures that a notebook keeps: they are read on a screen, and there are many of them."""
FORMATS = ("png", "pdf")

INK = "#1f2933"
MUTED = "#68737d"
GRID = "#e3e6e8"
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1.5, 1, 1.5)), (0, (8, 2)))
AMOUNT = mpl.colormaps["cividis"]
SIGNED: Colormap = LinearSegmentedColormap.from_list(
    "blue_white_orange", ["#08519c", "#6baed6", "#f7f7f7", "#fd9a4e", "#a63603"]
)

# Fixed metadata: the same table gives the same bytes, whenever and with whatever release.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": "satlens", "Producer": "satlens"},
    "svg": {"Date": None, "Creator": "satlens"},
}

STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.borderaxespad": 0.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "patch.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "axes.unicode_minus": True,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.constrained_layout.h_pad": 0.05,
    "figure.constrained_layout.w_pad": 0.05,
    "pdf.fonttype": 42,
    "svg.hashsalt": "satlens",
}


class StyledFigure(Figure):
    """A figure that is drawn and saved in the style above and with fixed metadata."""

    def draw(self, renderer: Any) -> None:
        with mpl.rc_context(STYLE):
            super().draw(renderer)

    def savefig(self, fname: Any, **options: Any) -> None:
        """As :meth:`matplotlib.figure.Figure.savefig`; no time of day enters the file."""
        kind = options.get("format") or (
            Path(fname).suffix[1:] if isinstance(fname, str | os.PathLike) else "png"
        )
        fixed = METADATA.get(kind, {})
        options["metadata"] = {**fixed, **(options.get("metadata") or {})} or None
        with mpl.rc_context(STYLE):
            super().savefig(fname, **options)

    def _repr_png_(self) -> bytes:
        """What notebooks show, with or without their plotting magic."""
        return picture_bytes(self, dpi=SCREEN_DPI)


def new_figure(width: float, height: float) -> StyledFigure:
    """An empty figure of ``width`` x ``height`` inches with a layout that avoids overlaps."""
    with mpl.rc_context(STYLE):
        figure = StyledFigure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
    return figure


def styled() -> Any:
    """Context in which axes are filled, so that text and lines are made in the style."""
    return mpl.rc_context(STYLE)


Parts = Mapping[str, Frame]
"""Tables that belong to a result, by name."""
Panel = tuple[float, Callable[[Any], None]]
"""A height in inches and the function that fills a subfigure of it."""


def stacked(panels: Sequence[Panel], width: float = DOUBLE, empty: str = "no data") -> StyledFigure:
    """Panels above each other; without any, a figure that says ``empty``."""
    heights = [height for height, _ in panels] or [1.0]
    figure = new_figure(width, sum(heights))
    with styled():
        if not panels:
            no_data(figure.subplots(), empty)
            return figure
        rows = figure.subfigures(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
        for where, (_, fill) in zip(rows, panels, strict=True):
            fill(where)
    return figure


def picture_bytes(
    figure: Figure,
    kind: str = "png",
    dpi: int = DPI,
    *,
    title: str | None = None,
    about: str | None = None,
) -> bytes:
    """The figure as a PNG or PDF file, the same bytes for the same figure.

    Args:
        title, about: written into the file's metadata.
    """
    names = {"title": "Title", "about": {"png": "Description", "pdf": "Subject"}[kind]}
    said = {names["title"]: title, names["about"]: about}
    metadata = METADATA[kind] | {name: text for name, text in said.items() if text is not None}
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    return buffer.getvalue()


# -- parts shared by several pictures --------------------------------------------------------------


def colour(index: int) -> str:
    """Colour of the index-th arm or kind."""
    return OKABE_ITO[index % len(OKABE_ITO)]


def arm_colours(arms: Iterable[str], reference: str | None = None) -> dict[str, str]:
    """A colour for each arm in the order given; the reference is ink."""
    others = [arm for arm in arms if arm != reference]
    colours = {arm: colour(i) for i, arm in enumerate(others)}
    return colours if reference is None else {reference: INK, **colours}


def carries(table: Frame, flag: str, stat: str) -> Frame:
    """Rows whose flags have ``flag`` for all statistics or for ``stat`` (``stat:flag``)."""
    wanted = {flag, f"{stat}:{flag}"}
    return table["flags"].map(lambda text: not wanted.isdisjoint(str(text).split(";"))).astype(bool)


def zero_line(ax: Axes, axis: str = "y") -> None:
    """The line of no effect."""
    draw = ax.axhline if axis == "y" else ax.axvline
    draw(0, color=MUTED, linewidth=0.7, zorder=0.5)


def point_range(
    ax: Axes,
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    low: Sequence[float] | np.ndarray | None = None,
    high: Sequence[float] | np.ndarray | None = None,
    *,
    horizontal: bool = False,
    colour: Any = INK,
    marker: str = "o",
    filled: bool = True,
    size: float = 3.5,
    label: str | None = None,
    zorder: float = 3,
) -> None:
    """Points with their intervals; a point whose ends are NaN has none and is drawn without.

    ``y`` is the estimate; ``horizontal`` puts it on the horizontal axis and ``x`` on the other.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if low is not None and high is not None:
        low, high = np.asarray(low, dtype=float), np.asarray(high, dtype=float)
        has = np.isfinite(low) & np.isfinite(high)
        lines = ax.hlines if horizontal else ax.vlines
        if has.any():
            lines(x[has], low[has], high[has], color=colour, linewidth=0.9, zorder=zorder)
    across, up = (y, x) if horizontal else (x, y)
    ax.plot(
        across,
        up,
        linestyle="none",
        marker=marker,
        markersize=size,
        color=colour,
        markerfacecolor=colour if filled else "white",
        markeredgewidth=0.9,
        label=label,
        zorder=zorder + 0.1,
        # A point on the axis shows whole. Without points the line would lie at the corner of the
        # figure, and the layout would make room for it.
        clip_on=len(y) == 0,
    )


def no_data(ax: Axes, why: str) -> None:
    """An empty panel that says why it is empty."""
    ax.set_axis_off()
    ax.text(0.5, 0.5, why, ha="center", va="center", color=MUTED, transform=ax.transAxes, wrap=True)
