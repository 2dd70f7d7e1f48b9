"""Shards: the tokens of many documents in one file that can be mapped into memory.

Layout, little-endian: a 64-byte header (magic, format version, bytes per token, number of
documents, number of tokens, SHA-256 of the tokenizer), the tokens (uint16 where the vocabulary
allows, else uint32), then the document index: the cumulative end of each document as uint64.
Documents follow each other without separators. Reading checks all of it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from satlens.errors import DataError

MAGIC = b"SATLENSD"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQ32s")
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_END_BYTES = 8
_BLOCK = 1 << 22


class ShardInfo(NamedTuple):
    """What a manifest records of a shard."""

    sha256: str
    n_documents: int
    n_tokens: int


class Shard(NamedTuple):
    """A shard that passed every check."""

    tokens: np.ndarray | JoinedTokens
    """All tokens, one after another (n_tokens,), mapped read-only."""
    ends: np.ndarray
    """Cumulative end of each document (n_documents,), int64, strictly increasing."""


def join_shards(shards: Sequence[Shard]) -> Shard:
    """The documents of several shards as those of one; nothing is read or copied but the index."""
    if len(shards) == 1:
        return shards[0]
    sizes = [len(shard.tokens) for shard in shards]
    starts = np.cumsum([0, *sizes[:-1]])
    ends = np.concatenate([s.ends + start for s, start in zip(shards, starts, strict=True)])
    return Shard(JoinedTokens([np.asarray(shard.tokens) for shard in shards]), ends)


class JoinedTokens(Sequence[Any]):
    """The tokens of several shards (n,) as one read-only array: ``len``, indices and slices.

    A slice within a shard is a view of the mapped file, one across shards a copy.
    """

    ndim = 1

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self.dtype = np.result_type(*parts)

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            place = range(len(self))[index]
            number = int(np.searchsorted(self._ends, place, side="right"))
            return self._parts[number][place - self._begin(number)]
        start, stop, step = index.indices(len(self))
        if step != 1:
            return np.asarray(self)[index]
        return self._between(start, max(start, stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All tokens in memory."""
        return np.concatenate(self._parts, dtype=dtype or self.dtype)

    def _between(self, start: int, stop: int) -> np.ndarray:
        first = min(int(np.searchsorted(self._ends, start, side="right")), len(self._parts) - 1)
        found = []
        for number in range(first, len(self._parts)):
            begin = self._begin(number)
            found.append(self._parts[number][max(start - begin, 0) : max(stop - begin, 0)])
            if stop <= self._ends[number]:
                break
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _begin(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Type of a token on disk: uint16 where the vocabulary allows, else uint32."""
    return _DTYPES[2 if vocab_size <= 1 << 16 else 4]


class ShardWriter:
    """Writes a shard; a context manager. ``info`` is set on a clean exit."""

    def __init__(self, path: str | Path, *, vocab_size: int, fingerprint: str) -> None:
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.info: ShardInfo
        self._fingerprint = fingerprint
        self._dtype = token_dtype(vocab_size)
        self._ends: list[np.ndarray] = []
        self._n_tokens = 0

    def __enter__(self) -> ShardWriter:
        self._stream = self.path.open("wb")
        self._stream.write(bytes(_HEADER.size))
        return self

    def add(self, tokens: np.ndarray, name: str) -> None:
        """Append one document (n,); ``name`` identifies it in errors.

        Raises:
            DataError: no tokens, or an id outside the vocabulary.
        """
        check_document(tokens, self.vocab_size, f"{self.path.name}: document {name!r}")
        self.extend([tokens], np.array([len(tokens)]))

    def extend(self, tokens: Iterable[np.ndarray], lengths: np.ndarray) -> None:
        """Append documents that :func:`check_document` has passed.

        Args:
            tokens: their tokens in blocks of any size, one document after another.
            lengths: tokens of each document.
        """
        before = self._n_tokens
        for block in tokens:
            self._stream.write(np.ascontiguousarray(block, self._dtype).data)
            self._n_tokens += len(block)
        if self._n_tokens - before != int(lengths.sum()):
            raise DataError(f"{self.path.name}: tokens and lengths of documents disagree")
        self._ends.append(before + np.cumsum(lengths, dtype=np.int64))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stream as stream:
            if kind is not None:
                return
            ends = np.concatenate([np.empty(0, np.int64), *self._ends])
            stream.write(ends.astype("<u8").data)
            stream.seek(0)
            stream.write(_header(self._dtype, len(ends), self._n_tokens, self._fingerprint))
            stream.flush()
            os.fsync(stream.fileno())
        self.info = ShardInfo(file_sha256(self.path), len(ends), self._n_tokens)


def shard_sha256(
    tokens: Iterable[np.ndarray], lengths: np.ndarray, *, vocab_size: int, fingerprint: str
) -> str:
    """SHA-256 (hex) of the one shard that would hold these documents (as in ``extend``).

    It identifies the tokens of a split, whatever the sizes of the shards that they lie in.
    """
    dtype, n_tokens = token_dtype(vocab_size), int(lengths.sum())
    digest = hashlib.sha256(_header(dtype, len(lengths), n_tokens, fingerprint))
    for block in tokens:
        digest.update(np.ascontiguousarray(block, dtype).data)
    digest.update(np.cumsum(lengths, dtype=np.int64).astype("<u8").data)
    return digest.hexdigest()


def read_shard(
    path: str | Path,
    *,
    vocab_size: int,
    fingerprint: str,
    sha256: str | None = None,
    verify: bool = True,
) -> Shard:
    """Open a shard and check header, size, digest, index and token ids.

    Args:
        path: the file.
        vocab_size: every token id must be smaller.
        fingerprint: of the tokenizer that must have made it (hex SHA-256).
        sha256: the digest that a manifest promises; None skips that check.
        verify: False skips the token ids, which takes reading the whole file.

    Raises:
        DataError: any damage or mismatch, naming file and field.
    """
    path = Path(path)
    size = _size(path)
    item_size, n_documents, n_tokens = _read_header(path, fingerprint)
    expected = _HEADER.size + n_tokens * item_size + n_documents * _END_BYTES
    if size < expected:
        raise DataError(f"{path}: size: truncated, {size} of {expected} bytes")
    if size > expected:
        raise DataError(f"{path}: size: {size - expected} trailing bytes after {expected}")
    if sha256 is not None and file_sha256(path) != sha256:
        raise DataError(f"{path}: sha256: differs from the manifest, the file is damaged")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    split = _HEADER.size + n_tokens * item_size
    tokens = raw[_HEADER.size : split].view(_DTYPES[item_size])
    ends = np.frombuffer(raw[split:].tobytes(), dtype="<u8").astype(np.int64)
    if np.any(np.diff(ends, prepend=0) <= 0) or int(ends[-1]) != n_tokens:
        raise DataError(f"{path}: document index: not strictly increasing up to token count")
    if verify:
        for block in blocks(tokens):
            check_vocabulary(block, vocab_size, str(path))
    return Shard(tokens, ends)


def blocks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """The tokens of a mapped file (n,) in parts of a few megabytes."""
    for start in range(0, len(tokens), _BLOCK):
        yield tokens[start : start + _BLOCK]


def check_document(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    """Raise DataError if a document (n,) has no tokens or one outside ``[0, vocab_size)``."""
    if len(tokens) == 0:
        raise DataError(f"{where}: no tokens")
    check_vocabulary(tokens, vocab_size, where)


def check_vocabulary(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    """Raise DataError if a token id (any shape) lies outside ``[0, vocab_size)``."""
    if tokens.size == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        found = low if low < 0 else high
        raise DataError(f"{where}: token id {found} outside the vocabulary of {vocab_size}")


def file_sha256(path: str | Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def _header(dtype: np.dtype[Any], n_documents: int, n_tokens: int, fingerprint: str) -> bytes:
    size, made_by = dtype.itemsize, bytes.fromhex(fingerprint)
    return _HEADER.pack(MAGIC, VERSION, size, n_documents, n_tokens, made_by)


def _size(path: Path) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if size < _HEADER.size:
        raise DataError(f"{path}: header: truncated, {size} of {_HEADER.size} bytes")
    return size


def _read_header(path: Path, fingerprint: str) -> tuple[int, int, int]:
    """(bytes per token, number of documents, number of tokens) of a sound header."""
    try:
        with path.open("rb") as stream:
            header = stream.read(_HEADER.size)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    magic, version, item_size, n_documents, n_tokens, made_by = _HEADER.unpack(header)
    if magic != MAGIC:
        raise DataError(f"{path}: magic: not a satlens shard")
    if version != VERSION:
        advice = "; a newer satlens wrote it" if version > VERSION else ""
        raise DataError(f"{path}: version: {version}, this satlens reads {VERSION}{advice}")
    if item_size not in _DTYPES:
        raise DataError(f"{path}: dtype: {item_size} bytes a token, expected 2 or 4")
    if not 0 < n_documents <= n_tokens:
        raise DataError(f"{path}: document count: {n_documents} for {n_tokens} tokens")
    if made_by.hex() != fingerprint:
        raise DataError(f"{path}: tokenizer: made with another tokenizer ({made_by.hex()[:12]}...)")
    return item_size, n_documents, n_tokens
