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
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

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

    tokens: np.ndarray
    """All tokens, one after another (n_tokens,), mapped read-only."""
    ends: np.ndarray
    """Cumulative end of each document (n_documents,), int64, strictly increasing."""


class ShardWriter:
    """Writes a shard document by document; a context manager. ``info`` is set on a clean exit."""

    def __init__(self, path: str | Path, *, vocab_size: int, fingerprint: str) -> None:
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.info: ShardInfo
        self._fingerprint = bytes.fromhex(fingerprint)
        self._dtype = _DTYPES[2 if vocab_size <= 1 << 16 else 4]
        self._ends: list[int] = []
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
        if len(tokens) == 0:
            raise DataError(f"{self.path.name}: document {name!r}: no tokens")
        check_vocabulary(tokens, self.vocab_size, f"{self.path.name}: document {name!r}")
        self._stream.write(tokens.astype(self._dtype).tobytes())
        self._n_tokens += len(tokens)
        self._ends.append(self._n_tokens)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stream as stream:
            if kind is not None:
                return
            stream.write(np.array(self._ends, dtype="<u8").tobytes())
            size, n_documents = self._dtype.itemsize, len(self._ends)
            stream.seek(0)
            stream.write(
                _HEADER.pack(MAGIC, VERSION, size, n_documents, self._n_tokens, self._fingerprint)
            )
            stream.flush()
            os.fsync(stream.fileno())
        self.info = ShardInfo(file_sha256(self.path), len(self._ends), self._n_tokens)


def read_shard(
    path: str | Path, *, vocab_size: int, fingerprint: str, sha256: str | None = None
) -> Shard:
    """Open a shard and check header, size, digest, index and token ids.

    Args:
        path: the file.
        vocab_size: every token id must be smaller.
        fingerprint: of the tokenizer that must have made it (hex SHA-256).
        sha256: the digest that a manifest promises; None skips that check.

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
    check_vocabulary(tokens, vocab_size, str(path))
    return Shard(tokens, ends)


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
