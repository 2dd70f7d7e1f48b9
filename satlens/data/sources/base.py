"""What all sources share: pieces, the identity of files, and reading bytes."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from satlens.data.corpora import Document
from satlens.errors import DataError

PIECE_BYTES = 32 << 20
"""About how much text a piece holds: small enough to lose little, large enough to be worth a task.

Part of a source's identity, as are the pieces that follow from it.
"""


class Piece(NamedTuple):
    """A part of a corpus that one worker reads alone, in a fixed order.

    The pieces of a source depend on the corpus only, never on the number of workers: read one
    after another they are the corpus, each document exactly once.
    """

    index: int
    """Place among the pieces of the source."""
    name: str
    """File or shard that it is of (of several files, the first)."""
    start: int
    """First unit of the piece: a byte, file, row group, token or shard, as the source counts."""
    stop: int
    """One after its last unit."""


class Source(Protocol):
    """A corpus that can be read piece by piece, in any process: sources can be pickled."""

    info: dict[str, str]
    """Name and, where known, version, licence and citation: what provenance records."""
    identity: str
    """Hex digest of what a resumed preparation must find unchanged: names, sizes and times of
    change of the files (or the revision of a data set), and the pieces."""
    pieces: list[Piece]
    """In the order of the corpus."""

    def read(self, piece: Piece) -> Iterator[Document]:
        """The documents of a piece, in order.

        Raises:
            DataError: unreadable, damaged or empty input, naming file, line and field.
            ConnectionError: the network failed, where there is one; trying again may help.
        """
        ...


def number_pieces(parts: Sequence[tuple[str, int, int]]) -> list[Piece]:
    """Pieces of (name, start, stop), numbered in this order."""
    return [Piece(index, *part) for index, part in enumerate(parts)]


def group_by_size(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Runs [start, stop) of neighbours whose sizes sum to at most ``limit`` (or a single one)."""
    runs: list[tuple[int, int]] = []
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            runs.append((start, index))
            start, total = index, 0
        total += size
    if sizes:
        runs.append((start, len(sizes)))
    return runs


def identity_of(kind: str, stamps: Sequence[object], pieces: Sequence[Piece]) -> str:
    """Hex digest of a source: its kind, what stands for its content, and its pieces."""
    content = json.dumps([kind, list(stamps), list(pieces)], separators=(",", ":"))
    return hashlib.sha256(content.encode("ascii")).hexdigest()


def file_stamp(path: Path, name: str) -> tuple[str, int, int]:
    """(name, bytes, time of the last change in ns): differs after a file was written anew.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return name, status.st_size, status.st_mtime_ns


def unreadable(path: Path, error: OSError) -> DataError:
    """The one line of a file that the system refuses."""
    return DataError(f"{path}: cannot be read ({error.strerror or error})")


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines of a plain or gzipped file; damage and refusals become one line.

    Raises:
        DataError: a damaged gzip file, or one that cannot be read.
    """
    try:
        opener = gzip.open if path.suffix.lower() == ".gz" else open
        with opener(path, "rb") as stream:
            yield from stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged gzip file ({error})") from None
    except OSError as error:
        raise unreadable(path, error) from None


def decode_utf8(raw: bytes) -> str:
    """Bytes as text.

    Raises:
        DataError: not UTF-8; the caller adds where.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 (byte {raw[error.start]:#04x} at {error.start})") from None


def first_line(error: BaseException) -> str:
    """The first line of a library's message, or its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
