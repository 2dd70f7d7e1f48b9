"""JSON Lines: an object a line. Plain files are cut into ranges of bytes, ``.gz`` is read whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from satlens.data.corpora import Document
from satlens.data.sources.base import (
    PIECE_BYTES,
    Piece,
    decode_utf8,
    file_stamp,
    identity_of,
    number_pieces,
    read_lines,
    unreadable,
)
from satlens.data.sources.records import Fields, RecordReader
from satlens.errors import DataError

_BLOCK = 1 << 20


class JsonLinesSource:
    """JSON Lines files, one after another.

    A piece of a plain file is a range of bytes and has the lines that begin in it; a line may
    end beyond the range. So pieces follow from the size of the file alone.
    """

    def __init__(self, name: str, files: Sequence[tuple[str, Path]], fields: Fields) -> None:
        self.info = {"name": name}
        self._files = dict(files)
        self._fields = fields
        stamps = [file_stamp(path, file_name) for file_name, path in files]
        parts: list[tuple[str, int, int]] = []
        for file_name, size, _ in stamps:
            if _is_packed(self._files[file_name]) or size <= PIECE_BYTES:
                parts.append((file_name, 0, size))
                continue
            starts = range(0, size, PIECE_BYTES)
            parts += [(file_name, start, min(start + PIECE_BYTES, size)) for start in starts]
        self.pieces = number_pieces(parts)
        self.identity = identity_of("jsonl", stamps, self.pieces)

    def read(self, piece: Piece) -> Iterator[Document]:
        """The documents of the lines that begin in bytes [start, stop) of a file."""
        path = self._files[piece.name]
        if _is_packed(path):
            lines = enumerate(read_lines(path), start=1)
            reader = RecordReader(self._fields, str(path), lambda number: f"line {number}")
        else:
            lines = _lines_from(path, piece.start, piece.stop)
            reader = RecordReader(
                self._fields, str(path), lambda offset: f"line {_line_number(path, offset)}"
            )
        for at, raw in lines:
            try:
                record = _record(raw)
            except DataError as error:
                raise reader.error(error, at) from None
            if record is not None:
                yield reader.document(record, at)


def _is_packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _lines_from(path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines of a plain file that begin in [start, stop)."""
    try:
        with path.open("rb") as stream:
            offset = start
            if start > 0:
                # From the byte before: the rest of a line that began earlier, or its "\n" alone.
                stream.seek(start - 1)
                offset += len(stream.readline()) - 1
            while offset < stop:
                line = stream.readline()
                if not line:
                    raise DataError(f"{path}: became shorter while it was read")
                yield offset, line
                offset += len(line)
    except OSError as error:
        raise unreadable(path, error) from None


def _line_number(path: Path, offset: int) -> int:
    """Number of the line that begins at a byte of a file, from 1."""
    breaks = 0
    with path.open("rb") as stream:
        while offset > 0:
            block = stream.read(min(offset, _BLOCK))
            if not block:
                break
            breaks += block.count(b"\n")
            offset -= len(block)
    return breaks + 1


def _record(raw: bytes) -> dict[str, Any] | None:
    """The object of a line; None for a blank one."""
    line = decode_utf8(raw).removeprefix("\ufeff").strip()
    if not line:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{type(record).__name__}, not a JSON object")
    return record
