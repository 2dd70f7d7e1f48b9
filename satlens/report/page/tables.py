"""Tables of a page: text for the eye, and the whole table at full precision for the download.

A page holds each table as the CSV that :meth:`satlens.analysis.result.Result.save` writes, packed
with gzip. The rows in the markup are rounded text of its beginning; sorting and further rows come
from the packed table, so that rounding decides no order.
"""

from __future__ import annotations

import base64
import gzip
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from satlens.analysis.result import Result
from satlens.report.effects import MINUS, Frame, capital

MAX_ROWS = 500
"""Rows in the markup of a page; a script shows the others on demand."""
MAX_CELLS = 20_000
MAX_COLUMNS = 60
"""Wider tables are for programs: their further columns are in the download alone."""

Link = tuple[str, str]
"""Text and relative address."""

_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


class Column(NamedTuple):
    """A column as the page shows it."""

    name: str
    kind: str
    """text, number or bool."""
    index: int
    """Of the column in the CSV."""
    decimals: int | None = None
    """Of fractions; None shows the text of the CSV."""


@dataclass(frozen=True)
class Table:
    """A table as text, and packed."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    n_rows: int
    """Of the whole table; ``rows`` are its first."""
    n_hidden: int
    """Columns that are not empty and yet not shown."""
    file: str
    """Name of the download."""
    packed: str
    """The CSV, gzip, base64."""
    size: str
    """Of the CSV, in words."""
    files: tuple[Link, ...] = ()
    opened: bool = False


def result_table(
    result: Result, title: str, prefix: str = "", files: tuple[Link, ...] = (), opened: bool = False
) -> Table:
    """The table of a result; the download is ``<prefix><name>.csv``, the bytes of its CSV."""
    file = file_name(f"{prefix}{result.name}")
    return _table(result.table, result.csv(), capital(title), file, files, opened)


def table(
    frame: Frame, title: str, file: str, files: tuple[Link, ...] = (), opened: bool = False
) -> Table:
    """A frame that is no result, such as one that the page itself put together."""
    csv = frame.to_csv(index=False, lineterminator="\n").encode()
    return _table(frame, csv, title, file_name(file), files, opened)


def file_name(text: str) -> str:
    """``text`` as the name of a CSV file on any system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") + ".csv"


def _table(
    frame: Frame, csv: bytes, title: str, file: str, files: tuple[Link, ...], opened: bool
) -> Table:
    names = [name for name in frame if not _empty(frame[name])]
    shown = names[:MAX_COLUMNS]
    n_rows = min(len(frame), MAX_ROWS, max(20, MAX_CELLS // max(1, len(shown))))
    columns = [_column(frame, name) for name in shown]
    cells = [
        [_cell(value, column) for value in frame[column.name].head(n_rows)] for column in columns
    ]
    return Table(
        title=title,
        columns=tuple(columns),
        rows=tuple(zip(*cells, strict=True)),
        n_rows=len(frame),
        n_hidden=len(names) - len(shown),
        file=file,
        packed=base64.b64encode(gzip.compress(csv, 9, mtime=0)).decode("ascii"),
        size=_size(len(csv)),
        files=files,
        opened=opened,
    )


def _empty(column: Frame) -> bool:
    return bool((column.isna() | (column.astype(str) == "")).all())


def _column(frame: Frame, name: str) -> Column:
    """Decimals are the same down a column of fractions, so that they align."""
    column, index = frame[name], frame.columns.get_loc(name)
    if pd.api.types.is_bool_dtype(column):
        return Column(name, "bool", index)
    if not pd.api.types.is_numeric_dtype(column):
        return Column(name, "text", index)
    if not pd.api.types.is_float_dtype(column):
        return Column(name, "number", index)
    largest = float(column.abs().replace(math.inf, math.nan).max())
    decimals = 5 if not largest >= 1 else max(1, 4 - math.floor(math.log10(largest)))
    return Column(name, "number", index, decimals)


def _cell(value: object, column: Column) -> str:
    """One value as text; ``assets/page.js`` writes further rows in the same way."""
    if pd.isna(value):  # type: ignore[arg-type]
        return ""
    if column.kind == "bool":
        return "yes" if value else "no"
    if column.kind == "text":
        return visible(str(value))
    text = str(value) if column.decimals is None else f"{value:.{column.decimals}f}"
    return text.replace("-", MINUS)


def visible(text: str) -> str:
    """The text with characters that cannot be seen written out: line ends as a sign, others by
    number, such as ‹U+200B›."""
    return _UNSEEN.sub(lambda found: _written(found.group()), text)


def _written(character: str) -> str:
    return "\N{RETURN SYMBOL}" if character == "\n" else f"‹U+{ord(character):04X}›"


def _size(n_bytes: int) -> str:
    if n_bytes < 1000:
        return f"{n_bytes} bytes"
    return f"{n_bytes / 1e3:,.0f} kB" if n_bytes < 1e6 else f"{n_bytes / 1e6:,.1f} MB"
