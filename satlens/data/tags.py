"""Part-of-speech tags of documents, aligned with their tokens and cached on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from satlens.data.alignment import align, token_offsets
from satlens.data.categories import NONE, UPOS, Categories, make_categories
from satlens.data.dataset import DocumentTokens
from satlens.data.taggers import Tagger, Words, load_tagger, needed_text
from satlens.data.tokenizers import fingerprint, special_ids
from satlens.errors import DataError

CACHE_VARIABLE = "SATLENS_CACHE"
_CACHE_FORMAT = 1
_COLUMNS = ("upos", "tag", "dep", "entity", "word")
# What numpy and zipfile raise on damaged archives, headers included.
_DAMAGE = (
    *(OSError, EOFError, ValueError, KeyError, RuntimeError, MemoryError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, SyntaxError),
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentTags:
    """Tags of one document's tokens; arrays (n,), one entry a token."""

    id: str
    upos: np.ndarray
    """Codes into UPOS, int8; 0 (``none``) where no word overlaps and for special tokens."""
    tag: np.ndarray
    """Fine-grained tags, text."""
    dep: np.ndarray
    """Dependency labels, text."""
    entity: np.ndarray
    """Entity types, text; all ``none`` unless asked for."""
    word: np.ndarray
    """Index of the token's word in the document, int32; -1 for none."""
    category: np.ndarray
    """Codes into ``Tags.categories.names``, int8."""

    @cached_property
    def is_first(self) -> np.ndarray:
        """Whether a token is the first of its word, bool; False without a word."""
        before = np.append(np.int32(-1), self.word[:-1])
        return (self.word >= 0) & (self.word != before)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tags:
    """Tags of a list of documents, in its order."""

    documents: list[DocumentTags]
    categories: Categories
    tagger: str
    """Name and version of what tagged, to be stored with every result."""

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> DocumentTags:
        return self.documents[index]


def tag_documents(
    documents: Sequence[DocumentTokens],
    tokenizer: Any,
    *,
    tagger: str | Tagger = "auto",
    entities: bool = False,
    categories: Categories | None = None,
    cache_dir: str | Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Tags:
    """Tag documents and align the tags with their tokens.

    Of a document whose tokens are only the beginning of its text (``max_tokens_per_document``),
    only the pieces that hold them are tagged, to the same tags.

    Args:
        documents: with texts; ``Windows.documents`` gives tags in the order of its batches.
        tokenizer: what made the tokens (fast: it must know character offsets).
        tagger: see :func:`satlens.data.taggers.load_tagger`, or a tagger.
        entities: run the entity recogniser too.
        categories: division of the universal tags; None is semantic / functional / structural.
        cache_dir: where results are kept; None is :func:`default_cache_dir`.
        progress: called with ("tag", documents done, documents in all).

    Raises:
        DataError: no such tagger, a document without text, tokens that do not spell it, a
            paragraph too long for spaCy, or a cache folder that cannot be written.
    """
    engine = load_tagger(tagger, entities=entities) if isinstance(tagger, str) else tagger
    identity = f"{engine.name} {engine.version}"
    groups = make_categories() if categories is None else categories
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    special = np.array(sorted(special_ids(tokenizer)), dtype=np.int64)

    made_by = fingerprint(tokenizer)
    files = [folder / f"{_key(document, identity, made_by)}.npz" for document in documents]
    columns = [_load(file, len(d.tokens)) for file, d in zip(files, documents, strict=True)]
    missing = [k for k, found in enumerate(columns) if found is None]
    done = len(documents) - len(missing)
    report = progress or (lambda stage, done, total: None)
    report("tag", done, len(documents))
    offsets = [_offsets(documents[k], tokenizer) for k in missing]
    texts = [_needed_text(documents[k], spans) for k, spans in zip(missing, offsets, strict=True)]
    words_of = engine.tag([(documents[k].id, text) for k, text in zip(missing, texts, strict=True)])
    for k, text, spans, words in zip(missing, texts, offsets, words_of, strict=True):
        column = _spread(words, align(text, spans, words.starts, words.ends))
        _save(files[k], column)
        columns[k] = column
        done += 1
        report("tag", done, len(documents))
    tagged = [
        _document_tags(document, column, groups, special)
        for document, column in zip(documents, columns, strict=True)
        if column is not None
    ]
    return Tags(documents=tagged, categories=groups, tagger=identity)


def default_cache_dir() -> Path:
    """``$SATLENS_CACHE/tags``, else ``satlens/tags`` in the user's cache folder (XDG)."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen) / "tags"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "satlens" / "tags"


def _offsets(document: DocumentTokens, tokenizer: Any) -> np.ndarray:
    return token_offsets(document.id, document.text, document.tokens, tokenizer)


def _needed_text(document: DocumentTokens, spans: np.ndarray) -> str:
    return needed_text(document.text, int(spans[:, 1].max(initial=0)))


def _spread(words: Words, word: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of tokens from the columns of words; row -1 stands for no word."""
    return {
        "upos": np.append(words.upos, np.int8(0))[word],
        "tag": np.append(words.tag, NONE)[word],
        "dep": np.append(words.dep, NONE)[word],
        "entity": np.append(words.entity, NONE)[word],
        "word": word,
    }


def _document_tags(
    document: DocumentTokens,
    columns: dict[str, np.ndarray],
    groups: Categories,
    special: np.ndarray,
) -> DocumentTags:
    is_special = np.isin(document.tokens, special)
    upos = np.where(is_special, np.int8(0), columns["upos"])
    category = np.where(is_special, np.int8(groups.special), groups.of_upos[upos])
    return DocumentTags(
        id=document.id,
        upos=upos,
        tag=np.where(is_special, NONE, columns["tag"]),
        dep=np.where(is_special, NONE, columns["dep"]),
        entity=np.where(is_special, NONE, columns["entity"]),
        word=np.where(is_special, np.int32(-1), columns["word"]),
        category=category,
    )


# -- the cache -----------------------------------------------------------------------------------


def _key(document: DocumentTokens, tagger: str, made_by: str) -> str:
    """Everything that decides the columns of a document, hashed."""
    content = [
        _CACHE_FORMAT,
        tagger,
        made_by,
        hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).hexdigest(),
        hashlib.sha256(document.tokens.astype("<i8").tobytes()).hexdigest(),
    ]
    return hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest()


def _load(file: Path, n_tokens: int) -> dict[str, np.ndarray] | None:
    """Columns from the cache; None if they are not there, or damaged (then it is said)."""
    if not file.exists():
        return None
    try:
        with np.load(file, allow_pickle=False) as archive:
            columns = {name: archive[name] for name in _COLUMNS}
            digest = str(archive["digest"])
    except _DAMAGE as error:
        _log.warning("%s: damaged cache entry, tagging again (%s)", file, error)
        return None
    sound = digest == str(_digest(file, columns)) and all(
        column.shape == (n_tokens,) for column in columns.values()
    )
    if not sound or np.any((columns["upos"] < 0) | (columns["upos"] >= len(UPOS))):
        _log.warning("%s: damaged cache entry, tagging again (digest)", file)
        return None
    return columns


def _save(file: Path, columns: dict[str, np.ndarray]) -> None:
    """Write columns under a temporary name, then rename: readers see all or nothing."""
    temporary = file.with_name(f".{file.stem}.{secrets.token_hex(6)}.npz")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                digest = _digest(file, columns)
                np.savez_compressed(stream, allow_pickle=False, digest=digest, **columns)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{file.parent}: tag cache cannot be written ({error.strerror or error}); "
            f"set {CACHE_VARIABLE} to a folder that can"
        ) from None


def _digest(file: Path, columns: dict[str, np.ndarray]) -> np.ndarray:
    """Digest of the columns and of the key in the file's name, as an array of one text."""
    digest = hashlib.sha256(file.stem.encode("ascii"))
    for name in _COLUMNS:
        digest.update(f"{name} {columns[name].dtype.str}".encode("ascii"))
        digest.update(np.ascontiguousarray(columns[name]).tobytes())
    return np.array(digest.hexdigest())
