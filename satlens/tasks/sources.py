"""Where rows come from: local JSON Lines or parquet, or, if asked, the Hugging Face hub."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from satlens.errors import DataError
from satlens.tasks.rows import check_row
from satlens.tasks.suite import TaskSpec

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def local_rows(
    folder: str | Path, spec: TaskSpec, split: str, limit: int | None = None
) -> tuple[list[dict[str, Any]], Path]:
    """The rows of a split of a task in a local folder, and the file they are from.

    Args:
        folder: holds ``<name>.jsonl``, ``.jsonl.gz`` or ``.parquet`` (the split that is scored), or
            ``<name>/<split>`` with the same endings.
        spec: the task; a twice variant reads the file of its once variant.
        split: of the data set.
        limit: read no more rows than this.

    Raises:
        DataError: no file, two of them, an unreadable one, or a row without a field that the task
            needs; names file, line (of parquet: row, from 1) and field.
    """
    path = _find(Path(folder), spec, split)
    read = _parquet if path.suffix == ".parquet" else _jsonl
    rows = [check_row(row, spec.row, where) for where, row in islice(read(path), limit)]
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows, path


def _find(folder: Path, spec: TaskSpec, split: str) -> Path:
    if not folder.is_dir():
        raise DataError(f"{folder}: not a folder with data of tasks")
    stems = [f"{spec.data}/{split}"]
    if split == spec.split:
        stems.insert(0, spec.data)
    found = [f for stem in stems for end in SUFFIXES if (f := folder / (stem + end)).is_file()]
    if len(found) > 1:
        raise DataError(
            f"{found[0]}: {found[1]} has the same split of task {spec.name!r}; keep one"
        )
    if not found:
        endings = " or ".join(SUFFIXES)
        raise DataError(
            f"{folder}: no {' or '.join(stems)} ({endings}) for task {spec.name!r}; "
            f"fields of a row: {', '.join(spec.fields)}"
        )
    return found[0]


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, row) of each line that is not blank."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    where = f"{path}: line {number}"
                    yield where, _parse(line, where)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged gzip file ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and row, row) of each row."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: not readable as parquet ({reason})") from None


def hub_rows(spec: TaskSpec, split: str, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a split from the Hugging Face hub, through ``datasets`` and its cache.

    Raises:
        DataError: the hub cannot be reached or has no such data set, or its rows have other fields.
    """
    from datasets import load_dataset

    assert spec.hub is not None
    name, config = spec.hub
    try:
        table = load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{name}: task {spec.name!r} cannot be downloaded ({reason})") from None
    rows = enumerate(islice(table, limit), start=1)
    return [check_row(dict(row), spec.row, f"{name}: {split} row {n}") for n, row in rows]
