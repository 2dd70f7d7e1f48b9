"""The HTML page: sections of sentences, figures and tables, in one file that needs no network."""

from __future__ import annotations

import base64
import math
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from satlens.plotting import picture_bytes
from satlens.plotting.style import COLUMN, DPI
from satlens.report.effects import Finding, Frame

TEMPLATE = "page.html.j2"
LABELS = {
    "found": "Found",
    "direction": "A direction",
    "open": "Not established",
    "missing": "Missing",
    "caveat": "Read with care",
}
_CSS_DPI = 96

Link = tuple[str, str]
"""Text and relative address."""


@dataclass(frozen=True)
class Picture:
    """A figure as the page shows it."""

    title: str
    caption: str
    alt: str
    png: str
    """Base64."""
    width: int
    height: int
    double: bool
    files: tuple[Link, ...] = ()


@dataclass(frozen=True)
class Table:
    """A result table as text: (name, "text" or "number") a column."""

    title: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, ...], ...]
    files: tuple[Link, ...] = ()
    opened: bool = False


@dataclass
class Part:
    """What is said and shown about one arm, or about all."""

    title: str = ""
    findings: list[Finding] = field(default_factory=list)
    nested: bool = False
    """One of several seeds, below a part about all of them."""
    folded: bool = False
    """Shown on demand, as further seeds are."""
    figures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass
class Section:
    """One question of the study."""

    id: str
    title: str
    caveats: list[Finding] = field(default_factory=list)
    headlines: list[Finding] = field(default_factory=list)
    """What the summary at the top repeats."""
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class Provenance:
    """Facts about one table."""

    title: str
    facts: tuple[tuple[str, str], ...]


def picture(
    figure: Figure, title: str, caption: str, alt: str, files: tuple[Link, ...] = ()
) -> Picture:
    """The figure as an inline PNG at its printed size."""
    return shown(picture_bytes(figure), title, caption, alt, files)


def shown(png: bytes, title: str, caption: str, alt: str, files: tuple[Link, ...] = ()) -> Picture:
    """A figure that was drawn as PNG before."""
    width, height = struct.unpack(">II", png[16:24])  # of the IHDR chunk, which comes first
    return Picture(
        title=title,
        caption=caption,
        alt=alt,
        png=base64.b64encode(png).decode("ascii"),
        width=round(width * _CSS_DPI / DPI * 1.25),
        height=round(height * _CSS_DPI / DPI * 1.25),
        double=width > 1.2 * COLUMN * DPI,
        files=files,
    )


def table(frame: Frame, title: str, files: tuple[Link, ...] = (), opened: bool = False) -> Table:
    """The frame as text; empty columns are left out (the CSV has them)."""
    kept = [name for name in frame if not _empty(frame[name])]
    kinds = ["number" if pd.api.types.is_numeric_dtype(frame[name]) else "text" for name in kept]
    columns = [_cells(frame[name]) for name in kept]
    return Table(
        title=title,
        columns=tuple(zip(map(str, kept), kinds, strict=True)),
        rows=tuple(zip(*columns, strict=True)),
        files=files,
        opened=opened,
    )


def _empty(column: Frame) -> bool:
    return bool((column.isna() | (column.astype(str) == "")).all())


def _cells(column: Frame) -> list[str]:
    """A column as text; decimals are the same down a column of fractions, so that they align."""
    if pd.api.types.is_bool_dtype(column):
        return ["yes" if value else "no" for value in column]
    if not pd.api.types.is_float_dtype(column):
        return ["" if pd.isna(value) else str(value) for value in column]
    largest = float(column.abs().replace(math.inf, math.nan).max())
    decimals = 5 if not largest >= 1 else max(1, 4 - math.floor(math.log10(largest)))
    return [
        "" if pd.isna(value) else f"{value:.{decimals}f}".replace("-", "\N{MINUS SIGN}")
        for value in column
    ]


def _unbroken(text: str) -> str:
    """Numbers and their per cent sign stay on one line."""
    return str(text).replace(" %", "\N{NO-BREAK SPACE}%")


def render(path: Path, **content: Any) -> Path:
    """Fill the template and put the page in its place in one move; everything is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
    )
    environment.filters["unbroken"] = _unbroken
    html = environment.get_template(TEMPLATE).render(labels=LABELS, **content)
    waiting = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        waiting.write_text(html + "\n", encoding="utf-8")
        os.replace(waiting, path)
    finally:
        waiting.unlink(missing_ok=True)
    return path
