"""A prepared corpus on disk, opened and checked: see :mod:`satlens.data.prepare`."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from satlens.data.corpora import LARGE_CORPUS, SPLITS, Document
from satlens.data.manifest import MANIFEST_FILE, ShardFiles, read_manifest, shard_files
from satlens.data.shards import JoinedTokens, Shard, file_sha256, join_shards, read_shard
from satlens.data.tokenizers import (
    TOKENIZER_FILE,
    end_id,
    fingerprint,
    load_tokenizer,
    special_ids,
)
from satlens.errors import DataError


class DocumentTokens(NamedTuple):
    """One document as tokens."""

    id: str
    cluster: str | None
    tokens: np.ndarray
    """Token ids (n,), without BOS or EOS."""
    text: str
    """The text that the tokens encode; empty if unknown (tokens given without a tokenizer)."""


class Split:
    """One split of a prepared corpus. Texts are read when first asked for.

    Args:
        name: train, val, pool or test.
        shard: its tokens and document ends, those of several shards joined.
        texts: files that hold the texts of the documents, in order; none where they are not kept.
        end_id: token that ends a document in the packed training stream.
    """

    def __init__(self, name: str, shard: Shard, texts: Sequence[Path], end_id: int) -> None:
        self.name = name
        self.tokens: np.ndarray | JoinedTokens = shard.tokens
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
        """The documents in order, with their texts.

        Raises:
            DataError: damaged texts, or texts that were not kept.
        """
        if not self._texts:
            raise DataError(
                f"split {self.name!r}: its texts are not kept in corpora of more than "
                f"{LARGE_CORPUS:,} documents; use another split"
            )
        records = [record for file in self._texts for record in _read_texts(file)]
        if len(records) != self.n_documents:
            raise DataError(
                f"{self._texts[0]}: {len(records)} documents, its shard has {self.n_documents}"
            )
        starts = np.concatenate([[0], self.ends[:-1]])
        return [
            DocumentTokens(record.id, record.cluster, self.tokens[start:end], record.text)
            for record, start, end in zip(records, starts, self.ends, strict=True)
        ]


class PreparedDataset:
    """A prepared corpus: its tokenizer and its splits. Make one with :meth:`open`."""

    def __init__(
        self, path: Path, manifest: dict[str, Any], tokenizer: Tokenizer, *, verify: bool = True
    ) -> None:
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
        self._verify = verify

    def __repr__(self) -> str:
        counts = self.manifest["splits"]
        sizes = (f"{name} {counts[name]['n_documents']}" for name in SPLITS)
        return (
            f"PreparedDataset({self.manifest['source']['name']!r}, {self.vocab_size} tokens in the "
            f"vocabulary, documents: {', '.join(sizes)})"
        )

    @classmethod
    def open(cls, path: str | Path, verify: bool = True) -> PreparedDataset:
        """Open a folder and check every file against the manifest.

        Args:
            path: the folder.
            verify: False leaves out what takes reading the whole of every file (digests and token
                ids): for the other processes of a run, after one of them has checked.

        Raises:
            DataError: missing, damaged, unsafe or newer content, naming file and field.
        """
        path = Path(path)
        manifest = read_manifest(path / MANIFEST_FILE)
        for name, digest in manifest["files"].items() if verify else ():
            if file_sha256(path / name) != digest:
                raise DataError(f"{path / name}: sha256: differs from {MANIFEST_FILE}, damaged")
        tokenizer = load_tokenizer(path / TOKENIZER_FILE)
        if fingerprint(tokenizer) != manifest["tokenizer"]:
            raise DataError(f"{path / TOKENIZER_FILE}: fingerprint: differs from {MANIFEST_FILE}")
        return cls(path, manifest, tokenizer, verify=verify)

    def split(self, name: str) -> Split:
        """One of the splits train, val, pool, test.

        Raises:
            DataError: no such split, or a shard of it is damaged.
        """
        if name not in SPLITS:
            raise DataError(f"{self.path}: no split {name!r} (known: {', '.join(SPLITS)})")
        if name not in self._splits:
            files = shard_files(self.manifest, name)
            shard = join_shards([self._read(each) for each in files])
            texts = [self.path / each.texts for each in files if each.texts is not None]
            self._splits[name] = Split(name, shard, texts, end_id(self.tokenizer))
        return self._splits[name]

    def _read(self, files: ShardFiles) -> Shard:
        file = self.path / files.tokens
        shard = read_shard(
            file,
            vocab_size=self.vocab_size,
            fingerprint=self.fingerprint,
            verify=self._verify,
        )
        found = {"n_documents": len(shard.ends), "n_tokens": len(shard.tokens)}
        for key, value in found.items():
            said = getattr(files, key)
            if said != value:
                raise DataError(f"{file}: {key}: {value}, {MANIFEST_FILE} says {said}")
        return shard


def is_prepared(path: str | Path) -> bool:
    """Whether a path looks like a prepared corpus (its content is not checked)."""
    return (Path(path) / MANIFEST_FILE).is_file()


def text_line(document: Document) -> bytes:
    """A document as one line of a file of texts."""
    record = {"id": document.id, "cluster": document.cluster, "text": document.text}
    return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"


def _read_texts(file: Path) -> list[Document]:
    try:
        with gzip.open(file, "rt", encoding="utf-8", newline="\n") as stream:
            records = [json.loads(line) for line in stream]
        return [Document(r["id"], r["text"], r["cluster"]) for r in records]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: damaged ({error})") from None
