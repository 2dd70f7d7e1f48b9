"""Prepare a corpus: split by document, train the tokenizer, write shards.

The result is a folder that :class:`satlens.data.dataset.PreparedDataset` opens:

    manifest.json           counts, SHA-256 of each file, source
    tokenizer.json
    {split}.bin             tokens (see satlens.data.shards), split in train, val, pool, test
    {split}.jsonl.gz        id, cluster and text of the same documents in the same order

It is written under a temporary name beside its place and renamed when complete.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from satlens.data.corpora import SPLITS, Document, corpus_info, read_corpus, split_of
from satlens.data.dataset import (
    FORMAT,
    MANIFEST_FILE,
    VERSION,
    PreparedDataset,
    checksum_of,
    data_sha256,
    text_line,
)
from satlens.data.shards import ShardWriter, file_sha256
from satlens.data.tokenizers import (
    TOKENIZER_FILE,
    backend,
    encode,
    end_id,
    fingerprint,
    load_tokenizer,
    train_bpe,
)
from satlens.data.tokenizers import vocab_size as size_of
from satlens.errors import DataError

Progress = Callable[[str, int, int], None]
"""Called with (stage, documents done, documents in all)."""

_BATCH_CHARACTERS = 1_000_000


def prepare(
    source: str | Path,
    out_dir: str | Path,
    *,
    vocab_size: int = 2048,
    tokenizer: Tokenizer | str | Path | None = None,
    text_field: str = "text",
    id_field: str = "id",
    cluster_field: str = "cluster",
    separator: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PreparedDataset:
    """Tokenise a corpus into a folder of checked shards; deterministic to the byte.

    Args:
        source: see :func:`satlens.data.corpora.read_corpus`, as are ``text_field``,
            ``id_field``, ``cluster_field`` and ``separator``.
        out_dir: folder to create. It appears complete or not at all.
        vocab_size: tokens of the byte-level BPE trained on the train split.
        tokenizer: use this one (or the one at this path) and train none.
        overwrite: replace an existing folder; else that is an error.
        progress: called with (stage, documents done, documents in all).

    Raises:
        DataError: bad input, a repeated id, a split left without documents, or a folder that
            exists or cannot be written.
    """
    out_dir = Path(out_dir)
    if not overwrite and out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise DataError(f"{out_dir}: exists already; remove it or choose another folder")
    report = progress or (lambda stage, done, total: None)

    def documents() -> Iterator[Document]:
        return read_corpus(
            source,
            text_field=text_field,
            id_field=id_field,
            cluster_field=cluster_field,
            separator=separator,
        )

    counts = _count(source, documents(), report)
    total = counts.total()
    if tokenizer is None:
        texts = _train_texts(documents(), total, report)
        made = train_bpe(texts, vocab_size)
    elif isinstance(tokenizer, str | Path):
        made = load_tokenizer(tokenizer)
    else:
        made = backend(tokenizer)
    end_id(made)  # a tokenizer without a separator cannot be packed: say so before writing

    temporary = out_dir.parent / f".{out_dir.name}.tmp-{secrets.token_hex(6)}"
    try:
        temporary.mkdir(parents=True)
        try:
            _write(temporary, documents(), total, made, corpus_info(source), report)
            _publish(temporary, out_dir, overwrite)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise DataError(f"{out_dir}: cannot be written ({error.strerror or error})") from None
    return PreparedDataset.open(out_dir)


def _count(source: str | Path, documents: Iterator[Document], report: Progress) -> Counter[str]:
    """Documents by split; reads (and so checks) the whole corpus once."""
    seen: set[str] = set()
    for document in documents:
        if document.id in seen:
            raise DataError(f"{source}: field 'id': {document.id!r} occurs twice")
        seen.add(document.id)
    counts = Counter(split_of(doc_id, len(seen)) for doc_id in seen)
    for name in SPLITS:
        if not counts[name]:
            raise DataError(
                f"{source}: split {name!r} is empty: {len(seen)} documents are too few "
                "(30 usually suffice; a separator line can cut one text into documents)"
            )
    report("read", len(seen), len(seen))
    return counts


def _train_texts(documents: Iterator[Document], total: int, report: Progress) -> Iterator[str]:
    for done, document in enumerate(documents, start=1):
        if split_of(document.id, total) == "train":
            yield document.text
        report("tokenizer", done, total)


def _write(
    folder: Path,
    documents: Iterator[Document],
    total: int,
    tokenizer: Tokenizer,
    source: dict[str, str],
    report: Progress,
) -> None:
    """Write every file of a prepared folder, the manifest last."""
    tokenizer.save(str(folder / TOKENIZER_FILE))
    made_by = fingerprint(tokenizer)
    n_vocab = size_of(tokenizer)
    characters: Counter[str] = Counter()
    digests = {name: hashlib.sha256() for name in SPLITS}
    done = 0
    with ExitStack() as stack:
        shards = {
            name: stack.enter_context(
                ShardWriter(folder / f"{name}.bin", vocab_size=n_vocab, fingerprint=made_by)
            )
            for name in SPLITS
        }
        texts = {
            # No file name and no time in the header: the same corpus gives the same bytes.
            name: stack.enter_context(gzip.GzipFile("", "wb", 6, raw, mtime=0))
            for name in SPLITS
            for raw in [stack.enter_context((folder / f"{name}.jsonl.gz").open("wb"))]
        }
        for batch in _batches(documents):
            for document, tokens in zip(
                batch, encode(tokenizer, [d.text for d in batch]), strict=True
            ):
                name = split_of(document.id, total)
                shards[name].add(tokens, document.id)
                line = text_line(document)
                texts[name].write(line)
                digests[name].update(line)
                characters[name] += len(document.text)
            done += len(batch)
            report("tokenise", done, total)
    if done != total:
        raise DataError(f"{source['name']}: changed while it was read ({total}, then {done})")
    splits = {
        name: {
            "n_documents": shard.info.n_documents,
            "n_tokens": shard.info.n_tokens,
            "n_characters": characters[name],
            "text_sha256": digests[name].hexdigest(),
        }
        for name, shard in shards.items()
    }
    manifest = _manifest(folder, splits, source, made_by, n_vocab)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _manifest(
    folder: Path,
    splits: dict[str, dict[str, Any]],
    source: dict[str, str],
    made_by: str,
    n_vocab: int,
) -> dict[str, Any]:
    files = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "tokenizer": made_by,
        "vocab_size": n_vocab,
        "splits": splits,
        "files": files,
        "sha256": data_sha256(made_by, splits, files),
    }
    manifest["checksum"] = checksum_of(manifest)
    return manifest


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into batches of about a million characters."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _publish(temporary: Path, out_dir: Path, overwrite: bool) -> None:
    """Rename a complete folder into place; what is there is replaced if told so."""
    retired = None
    if overwrite and out_dir.is_dir() and any(out_dir.iterdir()):
        retired = out_dir.parent / f".{out_dir.name}.old-{secrets.token_hex(6)}"
        os.rename(out_dir, retired)
    os.rename(temporary, out_dir)  # fails if another writer was faster
    _sync(out_dir.parent)
    if retired is not None:
        shutil.rmtree(retired)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
