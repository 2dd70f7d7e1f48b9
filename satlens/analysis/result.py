"""What every analysis returns: one tidy table with its provenance, saved as CSV and JSON.

A table has first the columns that say what a row is about (``AXES`` as far as they apply, then
other keys such as a category), then wide statistics, each ``stat, stat_low, stat_high``, then
``n_documents, n_tokens, flags``. Imports no torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from csv import QUOTE_MINIMAL, QUOTE_NONNUMERIC
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from satlens.errors import AnalysisError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = ("site", "layer", "sublayer", "role", "head")
COUNTS = ("n_documents", "n_tokens", "flags")
WHOLE = ("layer", "head", "n_documents", "n_tokens")
ENDS = ("_low", "_high")
SCHEMA_VERSION = 1


@dataclass(eq=False)
class Result:
    """The table of one analysis; construction puts its columns in order and checks them."""

    name: str
    """Name of the analysis, which names its files and chooses its figure."""
    table: pd.DataFrame
    """The wide table; numbers are float64, int64 (Int64 with gaps) or bool, text is str."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """From :func:`satlens.provenance.provenance`."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Headline numbers and settings; values that are not finite become null."""
    notes: list[str] = field(default_factory=list)
    """Sentences that a reader of the numbers has to know."""
    keys: tuple[str, ...] = ()
    """Numeric columns that identify rows beside ``AXES``, such as a step; text always does."""
    parts: tuple[Result, ...] = ()
    """Tables of another shape that belong to this one; saved and loaded with it."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.name):
            raise AnalysisError(f"result {self.name!r}: a name has letters, digits, _ and - only")
        self.keys = tuple(self.keys)
        self.table = _ordered(self.name, _typed(self.name, self.table), self.keys)
        self.provenance, self.summary = _plain(self.provenance), _plain(self.summary)
        self.notes = [str(note) for note in self.notes]

    def part(self, name: str) -> Result:
        """The part of that name.

        Raises :class:`AnalysisError` when there is none.
        """
        for part in self.parts:
            if part.name == name:
                return part
        known = ", ".join(part.name for part in self.parts) or "none"
        raise AnalysisError(f"result {self.name!r}: no part {name!r} (parts: {known})")

    def __repr__(self) -> str:
        return f"Result({self.name!r}, {len(self.table)} rows, statistics {self.statistics})"

    @property
    def key_columns(self) -> list[str]:
        """Columns that say what a row is about."""
        return _key_columns(self.table, self.keys)

    @property
    def statistics(self) -> list[str]:
        """Names of the wide statistics, without their ends."""
        return _statistics(self.table, self.keys)

    def to_frame(self, long: bool = False) -> pd.DataFrame:
        """A copy of the table; ``long`` has one row a statistic: keys, stat, value, low, high.

        Ends of statistics without an interval are NaN.
        """
        if not long:
            return self.table.copy()
        kept, rows = self.key_columns, self.table
        parts = []
        for stat in self.statistics:
            part = rows[kept].copy()
            part["stat"] = stat
            part["value"] = rows[stat].astype("float64")
            for end in ENDS:
                has_end = stat + end in rows
                part[end[1:]] = rows[stat + end].astype("float64") if has_end else math.nan
            parts.append(pd.concat([part, rows[list(COUNTS)]], axis=1))
        if not parts:
            raise AnalysisError(f"result {self.name!r}: the table has no statistics to melt")
        return pd.concat(parts, ignore_index=True)

    def figure(self) -> Figure:
        """The figure of this kind of result, drawn from the table and summary alone."""
        from satlens.plotting import figure_for

        parts = {part.name: part.table for part in self.parts}
        return figure_for(self.name, self.table, self.summary, parts)

    def save(self, directory: str | Path, figures: bool = True) -> list[Path]:
        """Write ``<name>.csv``, ``<name>.json`` and the figure, and return their paths.

        Everything is written beside its place and then moved there, so no file is ever half
        written; the JSON holds the sha256 of the CSV, so a mixed pair is noticed on loading. Parts
        are written beside it under their own names, without figures.
        """
        directory = Path(directory)
        files = {directory / name: content for name, content in self._files().items()}
        if figures:
            files |= {directory / name: content for name, content in self._pictures().items()}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            return _write_together(files)
        except OSError as error:
            raise AnalysisError(
                f"{directory}: cannot write {self.name}: {error.strerror}"
            ) from error

    def csv(self) -> bytes:
        """The table as :meth:`save` writes it."""
        # The writer quotes line feeds by itself, but a carriage return only if told to.
        texts = [column for _, column in self.table.items() if _kind(column.dtype) == "str"]
        returns = any("\r" in cell for column in texts for cell in column)
        quoting = QUOTE_NONNUMERIC if returns else QUOTE_MINIMAL
        return self.table.to_csv(index=False, lineterminator="\n", quoting=quoting).encode()

    def _files(self) -> dict[str, bytes]:
        """CSV and JSON of the table and of its parts, by file name."""
        csv = self.csv()
        record = {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "provenance": self.provenance,
            "summary": self.summary,
            "notes": self.notes,
            "keys": list(self.keys),
            "columns": {str(name): _kind(column.dtype) for name, column in self.table.items()},
            "rows": len(self.table),
            "csv_sha256": hashlib.sha256(csv).hexdigest(),
            "parts": [part.name for part in self.parts],
        }
        files = {
            f"{self.name}.csv": csv,
            f"{self.name}.json": (json.dumps(record, indent=2, allow_nan=False) + "\n").encode(),
        }
        for part in self.parts:
            files |= part._files()
        return files

    def _pictures(self) -> dict[str, bytes]:
        """The figure in every format, by file name."""
        from satlens.plotting import FORMATS, picture_bytes

        figure = self.figure()
        return {f"{self.name}.{kind}": picture_bytes(figure, kind) for kind in FORMATS}

    @classmethod
    def load(cls, path: str | Path, name: str | None = None) -> Result:
        """Read what :meth:`save` wrote: a folder and a name, or the CSV (or JSON) itself.

        Raises :class:`AnalysisError` when a file is missing, damaged or from another run.
        """
        path = Path(path)
        csv_path = path.with_suffix(".csv") if name is None else path / f"{name}.csv"
        record = _read_record(csv_path.with_suffix(".json"))
        if record["name"] != csv_path.stem:
            raise AnalysisError(f"{csv_path}: its JSON names the result {record['name']!r}")
        csv = _read(csv_path)
        if hashlib.sha256(csv).hexdigest() != record["csv_sha256"]:
            raise AnalysisError(
                f"{csv_path}: truncated or changed (csv_sha256 differs from its JSON)"
            )
        return cls(
            name=record["name"],
            table=_parse(csv_path, csv, record["columns"]),
            provenance=record["provenance"],
            summary=record["summary"],
            notes=record["notes"],
            keys=tuple(record["keys"]),
            parts=tuple(cls.load(csv_path.parent, part) for part in record["parts"]),
        )


def join_marks(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Two columns of flags as one, joined by ``;``."""
    return np.array([";".join(x for x in pair if x) for pair in zip(first, second, strict=True)])


def flag_column(flags: Mapping[str, np.ndarray]) -> np.ndarray:
    """One flag per row out of the flags of several statistics, arrays of one shape.

    A flag that all of them carry is written once, any other as ``statistic:flag``.
    """
    arrays = list(flags.values())
    text = np.full(arrays[0].shape, "", dtype=object)
    for cell in np.ndindex(text.shape):
        words = [[word for word in str(array[cell]).split(";") if word] for array in arrays]
        shared = [word for word in words[0] if all(word in others for others in words)]
        own = [
            f"{name}:{word}"
            for name, mine in zip(flags, words, strict=True)
            for word in mine
            if word not in shared
        ]
        text[cell] = ";".join(shared + own)
    return text


# -- the table -------------------------------------------------------------------------------------


def _kind(dtype: Any) -> str:
    """float, int, bool or str, as written in the JSON."""
    if pd.api.types.is_bool_dtype(dtype):
        return "bool"
    if pd.api.types.is_integer_dtype(dtype):
        return "int"
    return "float" if pd.api.types.is_float_dtype(dtype) else "str"


def _typed(name: str, table: pd.DataFrame) -> pd.DataFrame:
    """One type for each kind of column, so that a table equals itself after a round trip."""
    if not table.columns.is_unique or not all(isinstance(column, str) for column in table):
        raise AnalysisError(f"result {name!r}: column names have to be text and distinct")
    columns = {}
    for label, series in table.items():
        column = series.reset_index(drop=True)
        if label in WHOLE:
            column = _whole(name, column)
        elif _kind(column.dtype) == "str":
            column = column.infer_objects()
        kind = _kind(column.dtype)
        if kind == "str":
            columns[label] = column.astype(object).where(column.notna(), "").astype(str)
        elif kind == "int":
            columns[label] = column.astype("Int64" if column.hasnans else "int64")
        else:
            columns[label] = column.astype({"float": "float64", "bool": "bool"}[kind])
    return pd.DataFrame(columns)


def _whole(name: str, column: pd.Series) -> pd.Series:
    """Whole numbers with gaps, also from floats, which is what a gap makes of them."""
    if _kind(column.dtype) == "int":
        return column
    numbers = pd.Series(pd.to_numeric(column, errors="coerce"))
    if numbers.notna().equals(column.notna()) and (numbers.dropna() % 1 == 0).all():
        return numbers.astype("Int64")
    raise AnalysisError(f"result {name!r}: column {column.name!r} has to be whole numbers")


def _key_columns(table: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """AXES that apply, then named keys and text columns in the order of the table."""
    others = [
        name
        for name in table
        if name not in AXES + COUNTS and (name in keys or _kind(table[name].dtype) == "str")
    ]
    return [name for name in AXES if name in table] + others


def _statistics(table: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Every other column but the ends of intervals."""
    apart = {*_key_columns(table, keys), *COUNTS}
    return [name for name in table if name not in apart and not name.endswith(ENDS)]


def _ordered(name: str, table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The table with its columns in the order of this module, or an error naming a column."""
    missing = [column for column in (*COUNTS, *keys) if column not in table]
    if missing:
        raise AnalysisError(f"result {name!r}: the table lacks the column {missing[0]!r}")
    columns = list(_key_columns(table, keys))
    for stat in _statistics(table, keys):
        ends = [stat + end for end in ENDS if stat + end in table]
        if len(ends) == 1:
            raise AnalysisError(f"result {name!r}: column {ends[0]!r} without the other end")
        columns += [stat, *ends]
    columns += COUNTS
    orphans = [column for column in table if column not in columns]
    if orphans:
        raise AnalysisError(f"result {name!r}: column {orphans[0]!r} is the end of no statistic")
    return table.reindex(columns=columns)


def _parse(path: Path, csv: bytes, kinds: Mapping[str, str]) -> pd.DataFrame:
    """The CSV as text, each column then read as its kind; floats come back to the bit."""
    text = pd.read_csv(io.BytesIO(csv), dtype=str, keep_default_na=False)
    if list(text) != list(kinds):
        raise AnalysisError(f"{path}: columns differ from the field columns of its JSON")
    readers: dict[str, Callable[[pd.Series], Any]] = {
        "float": lambda column: np.array([float(cell or "nan") for cell in column], float),
        "int": lambda column: pd.array([int(c) if c else None for c in column], dtype="Int64"),
        "bool": lambda column: np.array([cell == "True" for cell in column], bool),
        "str": lambda column: column,
    }
    columns = {}
    for name, column in text.items():
        kind = kinds[str(name)]
        try:
            columns[name] = readers[kind](column)
        except (KeyError, ValueError) as error:
            raise AnalysisError(f"{path}: column {name} is not of kind {kind}") from error
    return pd.DataFrame(columns)


# -- files -----------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """JSON types only, as they come back from a file; numbers that are not finite are null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise AnalysisError(f"a {type(value).__name__} cannot be written to JSON")


def _write_together(files: Mapping[Path, bytes]) -> list[Path]:
    """Write every file beside its place, then move all of them there."""
    waiting = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for path, content in files.items():
            with waiting[path].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path in files:
            os.replace(waiting[path], path)
    finally:
        for left_over in waiting.values():
            left_over.unlink(missing_ok=True)
    return list(files)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AnalysisError(f"{path}: cannot read it: {error.strerror}") from error


def _read_record(path: Path) -> dict[str, Any]:
    """The JSON beside a table, with every field that loading needs."""
    try:
        record = json.loads(_read(path))
    except ValueError as error:
        raise AnalysisError(f"{path}: not JSON, truncated or damaged ({error})") from error
    fields = {
        "schema_version": int,
        "name": str,
        "provenance": dict,
        "summary": dict,
        "notes": list,
        "keys": list,
        "parts": list,
        "columns": dict,
        "csv_sha256": str,
    }
    for name, kind in fields.items():
        if not isinstance(record, dict) or not isinstance(record.get(name), kind):
            raise AnalysisError(f"{path}: field {name} is missing or no {kind.__name__}")
    if record["schema_version"] != SCHEMA_VERSION:
        raise AnalysisError(
            f"{path}: schema_version is {record['schema_version']}, this reads {SCHEMA_VERSION}"
        )
    return record
