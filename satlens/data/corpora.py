"""Corpora: where documents come from, and which split each belongs to.

What a corpus can be is said by :func:`read_corpus`; the formats are read by
:mod:`satlens.data.sources`. Defined behaviour for odd text, everywhere the same:

* UTF-8 only; a byte-order mark is removed; line ends of text files become ``\\n``.
* NUL characters, lone surrogates (``"\\ud800"`` in JSON) and empty or all-white documents are
  errors that name the file and the field. A corpus without an empty document loses nothing, and
  a corpus with one usually has a fault upstream.
* Everything else, four-byte emoji included, is kept as it is: nothing is normalised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from satlens.errors import DataError

if TYPE_CHECKING:
    from satlens.data.sources import Source

SplitName = Literal["train", "val", "pool", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "val", "pool", "test")

EMBEDDED = "sotu"
LARGE_CORPUS = 50_000
ID_PREFIX = "id-prefix"

TEXT_SUFFIXES = (".txt", ".text", ".md")
JSONL_SUFFIXES = (".jsonl", ".ndjson")

# Cumulative shares in parts of 10,000, in the order of SPLITS.
_SMALL_CUTS = (6_000, 7_000, 8_000, 10_000)
_LARGE_CUTS = (9_900, 9_925, 9_950, 10_000)


class Document(NamedTuple):
    """One document of a corpus."""

    id: str
    """Unique in the corpus and stable: the split is decided by it."""
    text: str
    """The whole text; never empty."""
    cluster: str | None
    """The larger work that the document is a piece of (the unit of sensitivity checks)."""
    tokens: np.ndarray | None = None
    """Its token ids (n,), where the corpus is one of tokens: they are used as they are."""


def split_of(doc_id: str, n_documents: int) -> SplitName:
    """The split of a document, from its id alone.

    The bucket is ``floor(10000 u)``, where ``u`` in [0, 1) is the first eight bytes of the SHA-256
    of the UTF-8 id, read as a big-endian integer over 2^64. Corpora of at most 50,000 documents
    are cut 60 / 10 / 10 / 20 % into train / val / pool / test; larger ones 99 / 0.5 / 0.5, where
    pool is half of the validation part (so 99 / 0.25 / 0.25 / 0.5).
    """
    cuts = _LARGE_CUTS if n_documents > LARGE_CORPUS else _SMALL_CUTS
    head = hashlib.sha256(doc_id.encode("utf-8")).digest()[:8]
    bucket = int.from_bytes(head, "big") * 10_000 >> 64
    return next(name for name, cut in zip(SPLITS, cuts, strict=True) if bucket < cut)


def read_corpus(
    source: str | Path,
    *,
    text_field: str = "text",
    id_field: str = "id",
    cluster_field: str = "cluster",
    separator: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> Iterator[Document]:
    """Read the documents of a corpus, one at a time and in a fixed order.

    Args: see :func:`satlens.data.sources.open_source`, which opens parts of a corpus alike.

    Raises:
        DataError: unreadable, damaged or empty input, naming file, line and field.
    """
    from satlens.data.sources import open_source

    opened = open_source(
        source,
        text_field=text_field,
        id_field=id_field,
        cluster_field=cluster_field,
        separator=separator,
        tokenizer=tokenizer,
    )
    return _all_documents(opened)


def _all_documents(source: Source) -> Iterator[Document]:
    try:
        for piece in source.pieces:
            yield from source.read(piece)
    except ConnectionError as error:
        raise DataError(str(error)) from None


def content_suffix(path: Path) -> str:
    """Suffix of a file in lower case, looking through a final ``.gz``."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def check_text(text: str, where: str) -> str:
    """A text without its byte-order mark; ``where`` names file and field in errors.

    Raises:
        DataError: empty or all-white text, a NUL character, or a lone surrogate.
    """
    text = text.removeprefix("\ufeff")
    if not text or text.isspace():
        raise DataError(f"{where}: empty document")
    nul = text.find("\0")
    if nul >= 0:
        raise DataError(f"{where}: NUL character at position {nul}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(f"{where}: lone surrogate U+{code:04X} at {error.start}") from None
    return text
