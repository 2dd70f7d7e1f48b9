"""What a worker does with one piece of a corpus: read and check it, then tokenise it.

Files of piece 12, in the folder of its stage, all little-endian:

    00012.ids             first 16 bytes of the SHA-256 of each document's id
    00012.sample.gz       documents that the tokenizer may be trained on: id and text, as JSON lines
    00012.{split}.tokens  tokens of the split's documents, as in a shard
    00012.{split}.lengths tokens of each document, uint64
    00012.{split}.texts.gz
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from satlens.data.corpora import LARGE_CORPUS, SPLITS, Document, SplitName, split_of
from satlens.data.dataset import text_line
from satlens.data.jobs import Tick
from satlens.data.shards import check_document, token_dtype
from satlens.data.sources import Piece, Source
from satlens.data.tokenizers import encode, load_tokenizer, vocab_size
from satlens.errors import DataError

ID_BYTES = 16
_BATCH_CHARACTERS = 1_000_000
_FAST = 1
"""Compression of what only lasts until the shards are written."""


class UnfinishedError(DataError):
    """The work was stopped by something that may pass: what is done is kept."""


def piece_file(folder: Path, number: int, ending: str) -> Path:
    """A file of a piece."""
    return folder / f"{number:05d}.{ending}"


def id_digest(doc_id: str) -> bytes:
    """What stands for an id: 16 bytes a document, so that ten million fit anywhere."""
    return hashlib.sha256(doc_id.encode("utf-8")).digest()[:ID_BYTES]


def in_sample(doc_id: str, share: float) -> bool:
    """Whether the tokenizer sees a document of the train split.

    ``u < share``, where u in [0, 1) is the first eight bytes of the SHA-256 of ``"tokenizer:"`` and
    the id, read as a big-endian integer over 2^64: independent of the split's own hash.
    """
    head = hashlib.sha256(f"tokenizer:{doc_id}".encode()).digest()[:8]
    return int.from_bytes(head, "big") < share * 2**64


# -- reading --------------------------------------------------------------------------------------


def read_piece(
    tick: Tick, source: Source, piece: Piece, folder: Path, share: float | None
) -> dict[str, Any]:
    """Check every document of a piece; keep its ids and its part of the tokenizer's sample.

    Args:
        tick: counts pieces.
        folder: where its files go.
        share: of the train split that the tokenizer is trained on; None: it is trained on nothing.

    Returns:
        ``n_documents``; how many fall into each split of a ``small`` and of a ``large`` corpus
        (only the whole corpus tells which it is), and into the sample of either.
    """
    small: Counter[str] = Counter()
    large: Counter[str] = Counter()
    sampled: Counter[str] = Counter()
    with ExitStack() as stack:
        ids = stack.enter_context(piece_file(folder, piece.index, "ids").open("wb"))
        sample = stack.enter_context(_packed(folder, piece, "sample.gz")) if share else None
        for batch in _batches(source, piece):
            for document in batch:
                ids.write(id_digest(document.id))
                splits = split_of(document.id, 0), split_of(document.id, LARGE_CORPUS + 1)
                small[splits[0]] += 1
                large[splits[1]] += 1
                if sample and share and "train" in splits and in_sample(document.id, share):
                    line = json.dumps([document.id, document.text], ensure_ascii=False)
                    sample.write(line.encode("utf-8") + b"\n")
                    sampled["small"] += splits[0] == "train"
                    sampled["large"] += splits[1] == "train"
            tick(0)
    _sync(folder, piece)
    tick(1)
    return {
        "n_documents": small.total(),
        "small": small,
        "large": large,
        "sampled": sampled,
    }


def sample_texts(folder: Path, number: int, n_documents: int) -> Iterator[str]:
    """Texts of a piece that the tokenizer is trained on: of the train split of the corpus."""
    with gzip.open(piece_file(folder, number, "sample.gz"), "rb") as lines:
        for line in lines:
            doc_id, text = json.loads(line)
            if split_of(doc_id, n_documents) == "train":
                yield text


def _batches(source: Source, piece: Piece) -> Iterator[list[Document]]:
    """The documents of a piece in batches of about a million characters."""
    batch: list[Document] = []
    size = 0
    for document in _documents(source, piece):
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _documents(source: Source, piece: Piece) -> Iterator[Document]:
    documents = iter(source.read(piece))
    while True:
        try:
            document = next(documents, None)
        except OSError as error:
            reason = error.strerror or error
            raise UnfinishedError(f"{piece.name}: cannot be read ({reason})") from None
        if document is None:
            return
        yield document


# -- tokenising -----------------------------------------------------------------------------------


class EncodeOptions(NamedTuple):
    """What the tokenising of every piece shares."""

    tokenizer: Path
    fingerprint: str
    read: Path
    """Folder of the first reading, whose ids must be found again."""
    folder: Path
    n_documents: int
    """Of the whole corpus."""
    texts: tuple[SplitName, ...]
    """Splits whose texts are kept."""


def encode_piece(
    tick: Tick, source: Source, piece: Piece, options: EncodeOptions
) -> dict[str, dict[str, int]]:
    """Tokenise a piece; counts documents.

    Returns:
        by split: ``n_documents``, ``n_tokens``, ``n_characters``.
    """
    tokenizer, n_vocab = _tokenizer(options.tokenizer, options.fingerprint)
    known = piece_file(options.read, piece.index, "ids").read_bytes()
    ids = hashlib.sha256()
    n_read = 0
    with ExitStack() as stack:
        parts = {
            name: stack.enter_context(_SplitPart(options, piece, name, n_vocab)) for name in SPLITS
        }
        for batch in _batches(source, piece):
            for document, tokens in zip(batch, _tokens(tokenizer, batch), strict=True):
                ids.update(id_digest(document.id))
                check_document(tokens, n_vocab, f"{piece.name}: document {document.id!r}")
                parts[split_of(document.id, options.n_documents)].add(document, tokens)
            n_read += len(batch)
            tick(len(batch))
    if ids.digest() != hashlib.sha256(known).digest():
        n_known = len(known) // ID_BYTES
        found = f"{n_known}, then {n_read}" if n_read != n_known else "other ids"
        raise DataError(f"{piece.name}: changed while it was read (documents: {found})")
    _sync(options.folder, piece)
    return {name: part.counts() for name, part in parts.items()}


@lru_cache(maxsize=1)
def _tokenizer(path: Path, made_by: str) -> tuple[Tokenizer, int]:
    """A tokenizer and the size of its vocabulary; another one may lie at the path later."""
    tokenizer = load_tokenizer(path)
    return tokenizer, vocab_size(tokenizer)


def _tokens(tokenizer: Tokenizer, batch: list[Document]) -> list[np.ndarray]:
    encoded = iter(encode(tokenizer, [d.text for d in batch if d.tokens is None]))
    return [next(encoded) if d.tokens is None else np.asarray(d.tokens) for d in batch]


class _SplitPart:
    """The documents of a piece that belong to one split; a context manager."""

    def __init__(self, options: EncodeOptions, piece: Piece, name: SplitName, n_vocab: int) -> None:
        self._folder, self._piece, self._name = options.folder, piece, name
        self._keeps_texts = name in options.texts
        self._dtype = token_dtype(n_vocab)
        self._lengths = array("Q")
        self._n_tokens = self._n_characters = 0

    def __enter__(self) -> _SplitPart:
        self._stack = ExitStack()
        self._tokens = self._stack.enter_context(self._file("tokens").open("wb"))
        if self._keeps_texts:
            ending = f"{self._name}.texts.gz"
            self._texts = self._stack.enter_context(_packed(self._folder, self._piece, ending))
        return self

    def add(self, document: Document, tokens: np.ndarray) -> None:
        self._tokens.write(tokens.astype(self._dtype).data)
        self._lengths.append(len(tokens))
        self._n_tokens += len(tokens)
        self._n_characters += len(document.text)
        if self._keeps_texts:
            self._texts.write(text_line(document))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._stack:
            if kind is None:
                lengths = np.asarray(self._lengths, dtype="<u8")
                self._file("lengths").write_bytes(lengths.tobytes())

    def counts(self) -> dict[str, int]:
        return {
            "n_documents": len(self._lengths),
            "n_tokens": self._n_tokens,
            "n_characters": self._n_characters,
        }

    def _file(self, ending: str) -> Path:
        return piece_file(self._folder, self._piece.index, f"{self._name}.{ending}")


# -- files ----------------------------------------------------------------------------------------


def _packed(folder: Path, piece: Piece, ending: str) -> gzip.GzipFile:
    return gzip.GzipFile(piece_file(folder, piece.index, ending), "wb", _FAST)


def _sync(folder: Path, piece: Piece) -> None:
    """Files first, their record after: a machine that goes down leaves no empty promise."""
    for path in folder.glob(f"{piece.index:05d}.*"):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
