"""Text files: one document a file, or documents between separator lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from satlens.data.corpora import Document, check_text
from satlens.data.sources.base import (
    PIECE_BYTES,
    Piece,
    decode_utf8,
    file_stamp,
    group_by_size,
    identity_of,
    number_pieces,
    read_lines,
)
from satlens.errors import DataError


class TextSource:
    """Text files; a piece is a group of neighbouring files. Each file is read whole."""

    def __init__(
        self, name: str, files: Sequence[tuple[str, Path]], separator: str | None = None
    ) -> None:
        if separator is not None and not separator.strip():
            raise DataError("separator: must be a line with visible characters")
        self.info = {"name": name}
        self._files = list(files)
        self._separator = separator
        stamps = [file_stamp(path, file_name) for file_name, path in self._files]
        runs = group_by_size([size for _, size, _ in stamps], PIECE_BYTES)
        self.pieces = number_pieces([(self._files[start][0], start, stop) for start, stop in runs])
        self.identity = identity_of("text", stamps, self.pieces)

    def read(self, piece: Piece) -> Iterator[Document]:
        """The documents of files ``start`` to ``stop``."""
        for name, path in self._files[piece.start : piece.stop]:
            yield from _read_text(path, name, self._separator)


def _read_text(path: Path, name: str, separator: str | None) -> Iterator[Document]:
    """The documents of one text file: the whole, or what lies between separator lines."""
    raw = b"".join(read_lines(path))
    try:
        text = decode_utf8(raw).removeprefix("\ufeff")
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if separator is None:
        yield Document(name, check_text(text, str(path)), None)
        return
    for number, part in enumerate(_cut(text, separator)):
        where = f"{path}: document {number + 1}"
        yield Document(f"{name}#{number:06d}", check_text(part, where), None)


def _cut(text: str, separator: str) -> list[str]:
    parts: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if line.strip() == separator.strip():
            parts.append([])
        else:
            parts[-1].append(line)
    texts = ["".join(part) for part in parts]
    # A separator before the first or after the last document is punctuation, not an empty document.
    if not texts[0].strip() and len(texts) > 1:
        texts = texts[1:]
    if not texts[-1].strip() and len(texts) > 1:
        texts = texts[:-1]
    return texts
