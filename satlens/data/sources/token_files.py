"""Token files of nanoGPT and of llm.c: documents between end-of-text tokens.

* nanoGPT: uint16 tokens and nothing else.
* llm.c: a header of 256 int32 (magic, version, number of tokens), then tokens: uint16 (magic
  20240520, version 1) or uint32 (magic 20240801, version 7).

All little-endian. A document is a run of tokens without a separator: the tokenizer's
end-of-document token, or a begin-of-text token, which llm.c puts between Llama's documents.
Separators before, after and between documents may repeat; they belong to no document. A file
begins a new document: one that llm.c cut at the end of a shard counts as two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from satlens.data.corpora import Document, check_text
from satlens.data.shards import MAGIC as OWN_MAGIC
from satlens.data.sources.base import (
    Piece,
    file_stamp,
    identity_of,
    number_pieces,
    unreadable,
)
from satlens.data.tokenizers import decode, end_id
from satlens.errors import DataError

PIECE_TOKENS = 1 << 23
_HEADER_BYTES = 256 * 4
_LLMC = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
_LLMC_EVALUATION = 20240522
_NANOGPT = np.dtype("<u2")
_BEGIN_NAMES = ("<|begin_of_text|>", "<s>", "<bos>")
_BLOCK = 1 << 16


class Layout(NamedTuple):
    """Where the tokens of a file lie."""

    dtype: np.dtype
    offset: int
    n_tokens: int


class TokenSource:
    """Token files, one after another.

    A piece is a range of tokens and has the documents that begin in it. A document's id is
    ``file#position``, the position of its first token among the tokens of the file; its text is
    decoded, its tokens are those of the file.
    """

    def __init__(
        self, name: str, files: Sequence[tuple[str, Path]], tokenizer: Tokenizer | None
    ) -> None:
        if tokenizer is None:
            raise DataError(f"{files[0][1]}: a token file needs the tokenizer it was made with")
        self.info = {"name": name}
        self._files = dict(files)
        self._tokenizer = tokenizer
        self._separators = _separators(tokenizer)
        self._known = _known_ids(tokenizer)
        stamps = [file_stamp(path, file_name) for file_name, path in files]
        parts: list[tuple[str, int, int]] = []
        for file_name, path in files:
            n_tokens = layout_of(path).n_tokens
            starts = range(0, n_tokens, PIECE_TOKENS)
            parts += [(file_name, start, min(start + PIECE_TOKENS, n_tokens)) for start in starts]
        self.pieces = number_pieces(parts)
        self.identity = identity_of("tokens", stamps, self.pieces)

    def read(self, piece: Piece) -> Iterator[Document]:
        """The documents that begin at tokens [start, stop) of a file."""
        path = self._files[piece.name]
        tokens = _map(path)
        if len(tokens) < piece.stop:
            raise DataError(f"{path}: became shorter while it was read")
        for start, stop in _runs(tokens, piece.start, piece.stop, self._separators):
            ids = np.array(tokens[start:stop], dtype=np.int64)
            self._check(ids, path, start)
            text = decode(self._tokenizer, ids)
            check_text(text, f"{path}: document at token {start}")
            yield Document(f"{piece.name}#{start}", text, None, ids)

    def _check(self, ids: np.ndarray, path: Path, start: int) -> None:
        known = self._known
        bad = np.flatnonzero((ids >= len(known)) | ~known[np.minimum(ids, len(known) - 1)])
        if len(bad):
            raise DataError(
                f"{path}: token {start + bad[0]}: id {ids[bad[0]]} is not in the tokenizer's "
                f"vocabulary ({int(known.sum())} tokens)"
            )


def layout_of(path: Path) -> Layout:
    """Where the tokens of a nanoGPT or llm.c file lie.

    Raises:
        DataError: another format, a size that does not fit the header, or no tokens.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(_HEADER_BYTES)
    except OSError as error:
        raise unreadable(path, error) from None
    if head.startswith(OWN_MAGIC):
        raise DataError(f"{path}: a shard of prepared data; it needs no preparation")
    numbers = np.frombuffer(head[: len(head) // 4 * 4], dtype="<i4")
    magic = int(numbers[0]) if len(numbers) else 0
    if magic == _LLMC_EVALUATION:
        raise DataError(f"{path}: magic {magic}: llm.c's multiple-choice questions, not a corpus")
    layout = _nanogpt(path, size) if magic not in _LLMC else _llmc(path, size, numbers)
    if layout.n_tokens == 0:
        raise DataError(f"{path}: no tokens")
    return layout


def _nanogpt(path: Path, size: int) -> Layout:
    if size % _NANOGPT.itemsize:
        raise DataError(f"{path}: size: {size} bytes are no whole number of uint16 tokens")
    return Layout(_NANOGPT, 0, size // _NANOGPT.itemsize)


def _llmc(path: Path, size: int, header: np.ndarray) -> Layout:
    if len(header) * 4 < _HEADER_BYTES:
        raise DataError(f"{path}: header: truncated ({len(header) * 4} of {_HEADER_BYTES} bytes)")
    magic, version, n_tokens = (int(number) for number in header[:3])
    expected, dtype = _LLMC[magic]
    if version != expected:
        raise DataError(f"{path}: version: {version}, llm.c's magic {magic} goes with {expected}")
    if n_tokens < 0:
        raise DataError(f"{path}: number of tokens: {n_tokens}")
    right = _HEADER_BYTES + n_tokens * dtype.itemsize
    if size != right:
        fault = "truncated" if size < right else "has trailing bytes"
        raise DataError(f"{path}: size: {fault} ({size} bytes, {right} by its header)")
    return Layout(dtype, _HEADER_BYTES, n_tokens)


def _map(path: Path) -> np.ndarray:
    """The tokens of a file, mapped read-only."""
    layout = layout_of(path)
    try:
        return np.memmap(path, layout.dtype, "r", layout.offset, (layout.n_tokens,))
    except OSError as error:
        raise unreadable(path, error) from None


def _runs(
    tokens: np.ndarray, start: int, stop: int, separators: np.ndarray
) -> Iterator[tuple[int, int]]:
    """[first, end) of the runs without a separator that begin in [start, stop)."""
    ends = start + np.flatnonzero(np.isin(tokens[start:stop], separators))
    first = start
    if start > 0 and tokens[start - 1] not in separators:
        # Here an earlier piece's document goes on: skip the rest of it.
        first = int(ends[0]) + 1 if len(ends) else stop
        ends = ends[1:]
    for end in map(int, ends):
        if end > first:
            yield first, end
        first = end + 1
    if first < stop:
        yield first, _next_separator(tokens, stop, separators)


def _next_separator(tokens: np.ndarray, start: int, separators: np.ndarray) -> int:
    """Position of the first separator from ``start`` on, or the number of tokens."""
    for at in range(start, len(tokens), _BLOCK):
        found = np.flatnonzero(np.isin(tokens[at : at + _BLOCK], separators))
        if len(found):
            return at + int(found[0])
    return len(tokens)


def _separators(tokenizer: Tokenizer) -> np.ndarray:
    begins = [tokenizer.token_to_id(name) for name in _BEGIN_NAMES]
    return np.array([end_id(tokenizer), *(k for k in begins if k is not None)], dtype=np.int64)


def _known_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Whether each id is a token's; (largest id + 1,)."""
    ids = list(tokenizer.get_vocab(with_added_tokens=True).values())
    known = np.zeros(max(ids) + 1, dtype=bool)
    known[ids] = True
    return known
