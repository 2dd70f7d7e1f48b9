"""A prepared corpus on disk, opened and checked: see :mod:`satlens.data.prepare`."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from satlens.data.corpora import SPLITS, Document
from satlens.data.shards import Shard, file_sha256, read_shard
from satlens.data.tokenizers import (
    TOKENIZER_FILE,
    end_id,
    fingerprint,
    load_tokenizer,
    special_ids,
)
from satlens.errors import DataError

FORMAT = "satlens-data"
VERSION = 1
MANIFEST_FILE = "manifest.json"

_FIELDS: dict[str, type] = {
    "format": str,
    "version": int,
    "source": dict,
    "tokenizer": str,
    "vocab_size": int,
    "splits": dict,
    "files": dict,
    "sha256": str,
    "checksum": str,
}
_COUNTS = {"n_documents", "n_tokens", "text_sha256"}


class DocumentTokens(NamedTuple):
    """One document as tokens."""

    id: str
    cluster: str | None
    tokens: np.ndarray
    """Token ids (n,), without BOS or EOS."""
    text: str
    """The text that the tokens encode; empty if unknown (tokens given without a tokenizer)."""


class Split:
    """One split of a prepared corpus. Texts are read when first asked for."""

    def __init__(self, name: str, shard: Shard, texts: Path, end_id: int) -> None:
        self.name = name
        self.tokens = shard.tokens
        """All tokens (n_tokens,), documents one after another, mapped read-only."""
        self.ends = shard.ends
        """Cumulative end of each document (n_documents,), int64."""
        self.end_id = end_id
        """Token that ends a document in the packed training stream (not in ``tokens``)."""
        self._texts = texts

    @property
    def n_documents(self) -> int:
        return len(self.ends)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def documents(self) -> list[DocumentTokens]:
        """The documents in order, with their texts."""
        records = _read_texts(self._texts)
        if len(records) != self.n_documents:
            raise DataError(
                f"{self._texts}: {len(records)} documents, its shard has {self.n_documents}"
            )
        starts = np.concatenate([[0], self.ends[:-1]])
        return [
            DocumentTokens(record.id, record.cluster, self.tokens[start:end], record.text)
            for record, start, end in zip(records, starts, self.ends, strict=True)
        ]


class PreparedDataset:
    """A prepared corpus: its tokenizer and its splits. Make one with :meth:`open`."""

    def __init__(self, path: Path, manifest: dict[str, Any], tokenizer: Tokenizer) -> None:
        self.path = path
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.fingerprint: str = manifest["tokenizer"]
        """SHA-256 of the tokenizer's canonical JSON."""
        self.sha256: str = manifest["sha256"]
        """SHA-256 that identifies tokens, texts, splits and tokenizer together."""
        self.vocab_size: int = manifest["vocab_size"]
        self.special_ids = special_ids(tokenizer)
        self._splits: dict[str, Split] = {}

    def __repr__(self) -> str:
        counts = self.manifest["splits"]
        sizes = (f"{name} {counts[name]['n_documents']}" for name in SPLITS)
        return (
            f"PreparedDataset({self.manifest['source']['name']!r}, {self.vocab_size} tokens in the "
            f"vocabulary, documents: {', '.join(sizes)})"
        )

    @classmethod
    def open(cls, path: str | Path) -> PreparedDataset:
        """Open a folder and check every file against the manifest.

        Raises:
            DataError: missing, damaged, unsafe or newer content, naming file and field.
        """
        path = Path(path)
        manifest = _read_manifest(path / MANIFEST_FILE)
        for name, digest in manifest["files"].items():
            if file_sha256(path / name) != digest:
                raise DataError(f"{path / name}: sha256: differs from {MANIFEST_FILE}, damaged")
        tokenizer = load_tokenizer(path / TOKENIZER_FILE)
        if fingerprint(tokenizer) != manifest["tokenizer"]:
            raise DataError(f"{path / TOKENIZER_FILE}: fingerprint: differs from {MANIFEST_FILE}")
        return cls(path, manifest, tokenizer)

    def split(self, name: str) -> Split:
        """One of the splits train, val, pool, test.

        Raises:
            DataError: no such split, or its shard is damaged.
        """
        if name not in SPLITS:
            raise DataError(f"{self.path}: no split {name!r} (known: {', '.join(SPLITS)})")
        if name not in self._splits:
            file = self.path / f"{name}.bin"
            shard = read_shard(file, vocab_size=self.vocab_size, fingerprint=self.fingerprint)
            counts = self.manifest["splits"][name]
            found = {"n_documents": len(shard.ends), "n_tokens": len(shard.tokens)}
            for key, value in found.items():
                if counts[key] != value:
                    raise DataError(f"{file}: {key}: {value}, {MANIFEST_FILE} says {counts[key]}")
            texts = self.path / f"{name}.jsonl.gz"
            self._splits[name] = Split(name, shard, texts, end_id(self.tokenizer))
        return self._splits[name]


def is_prepared(path: str | Path) -> bool:
    """Whether a path looks like a prepared corpus (its content is not checked)."""
    return (Path(path) / MANIFEST_FILE).is_file()


# -- what the manifest promises ------------------------------------------------------------------


def data_sha256(made_by: str, splits: dict[str, Any], files: dict[str, str]) -> str:
    """The identity of prepared data: its tokenizer, the tokens and the texts of every split.

    Texts count uncompressed, so that it does not depend on the compression library.
    """
    tokens = {name: files[f"{name}.bin"] for name in SPLITS}
    texts = {name: splits[name]["text_sha256"] for name in SPLITS}
    return _digest({"tokenizer": made_by, "tokens": tokens, "texts": texts})


def checksum_of(manifest: dict[str, Any]) -> str:
    """Digest of everything in a manifest but the digest itself."""
    return _digest({key: value for key, value in manifest.items() if key != "checksum"})


def text_line(document: Document) -> bytes:
    """A document as one line of ``{split}.jsonl.gz``."""
    record = {"id": document.id, "cluster": document.cluster, "text": document.text}
    return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"


def _digest(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _read_manifest(file: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{file}: format: not a manifest of prepared data ({FORMAT!r} expected)")
    version = manifest.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        advice = "; a newer satlens wrote it" if newer else ""
        raise DataError(f"{file}: version: {version!r}, this satlens reads {VERSION}{advice}")
    for field, kind in _FIELDS.items():
        if not isinstance(manifest.get(field), kind):
            raise DataError(f"{file}: {field}: missing or not of type {kind.__name__}")
    _check_files(file, manifest["files"])
    if manifest["checksum"] != checksum_of(manifest):
        raise DataError(f"{file}: checksum: the manifest was changed or damaged")
    for name in SPLITS:
        counts = manifest["splits"].get(name)
        if not isinstance(counts, dict) or not counts.keys() >= _COUNTS:
            raise DataError(
                f"{file}: splits.{name}: missing or without {', '.join(sorted(_COUNTS))}"
            )
    identity = data_sha256(manifest["tokenizer"], manifest["splits"], manifest["files"])
    if manifest["sha256"] != identity:
        raise DataError(f"{file}: sha256: does not follow from splits and files")
    return manifest


def _check_files(file: Path, files: dict[str, Any]) -> None:
    """Only plain names inside the folder, each with a digest, and none missing."""
    for name, digest in files.items():
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
            raise DataError(f"{file}: files: unsafe path {name!r}, a plain file name is expected")
        if not isinstance(digest, str):
            raise DataError(f"{file}: files.{name}: not a digest")
    expected = [TOKENIZER_FILE, *(f"{s}{end}" for s in SPLITS for end in (".bin", ".jsonl.gz"))]
    for name in expected:
        if name not in files:
            raise DataError(f"{file}: files: {name} is missing")


def _read_texts(file: Path) -> list[Document]:
    try:
        with gzip.open(file, "rt", encoding="utf-8", newline="\n") as stream:
            records = [json.loads(line) for line in stream]
        return [Document(r["id"], r["text"], r["cluster"]) for r in records]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: damaged ({error})") from None
