"""From tokenised pieces to shards: a plan that follows from the lengths of the documents alone."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from satlens.data.jobs import Tick
from satlens.data.manifest import shard_name
from satlens.data.pieces import piece_file
from satlens.data.shards import ShardWriter, blocks, file_sha256, shard_sha256, token_dtype


class Run(NamedTuple):
    """Neighbouring documents of one split in one piece."""

    piece: int
    documents: tuple[int, int]
    """Numbers of the first document, and of the one after the last."""
    tokens: tuple[int, int]
    """Their tokens in the piece's file."""


class Merge(NamedTuple):
    """What the writing of every shard shares."""

    pieces: Path
    """Folder of the tokenised pieces."""
    folder: Path
    """Where shards go."""
    vocab_size: int
    fingerprint: str


def plan(pieces: Path, n_pieces: int, split: str, shard_tokens: int) -> list[list[Run]]:
    """The runs of documents that each shard of a split holds, in the order of the corpus.

    A shard is closed before the document that would bring it above ``shard_tokens``; a longer
    document has a shard of its own. Only numbers of tokens are read.
    """
    ends = [np.cumsum(_lengths(pieces, number, split)) for number in range(n_pieces)]
    shards: list[list[Run]] = [[]]
    room = shard_tokens
    for piece, piece_ends in enumerate(ends):
        first, begin = 0, 0
        while first < len(piece_ends):
            last = int(np.searchsorted(piece_ends, begin + room, side="right"))
            if last <= first and shards[-1]:
                shards.append([])
                room = shard_tokens
                continue
            last = max(last, first + 1)
            end = int(piece_ends[last - 1])
            shards[-1].append(Run(piece, (first, last), (begin, end)))
            room -= end - begin
            first, begin = last, end
    return shards


def write_shard(
    tick: Tick, merge: Merge, split: str, number: int, runs: list[Run], has_texts: bool
) -> dict[str, Any]:
    """Write the tokens and the texts of one shard; counts shards.

    Returns:
        ``n_documents``, ``n_tokens``, ``files`` (SHA-256 by name), ``tokens_sha256`` and
        ``text_sha256`` (of the uncompressed lines).
    """
    file = merge.folder / f"{shard_name(split, number)}.bin"
    with ShardWriter(file, vocab_size=merge.vocab_size, fingerprint=merge.fingerprint) as shard:
        for run in runs:
            tick(0)
            shard.extend(_tokens(merge, split, run), _run_lengths(merge, split, run))
    result: dict[str, Any] = {
        "n_documents": shard.info.n_documents,
        "n_tokens": shard.info.n_tokens,
        "files": {file.name: shard.info.sha256},
        "tokens_sha256": shard.info.sha256,
        "text_sha256": None,
    }
    if has_texts:
        texts = file.with_suffix(".jsonl.gz")
        result["text_sha256"] = _write_texts(tick, merge, split, runs, texts)
        result["files"][texts.name] = file_sha256(texts)
    tick(1)
    return result


def _write_texts(tick: Tick, merge: Merge, split: str, runs: list[Run], file: Path) -> str:
    digest = hashlib.sha256()
    # No file name and no time in the header: the same corpus gives the same bytes.
    with file.open("wb") as raw:
        with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
            for run in runs:
                tick(0)
                for line in _lines(merge, split, run):
                    packed.write(line)
                    digest.update(line)
        raw.flush()
        os.fsync(raw.fileno())
    return digest.hexdigest()


def digest_split(
    tick: Tick, merge: Merge, split: str, runs: list[Run], has_texts: bool
) -> dict[str, Any]:
    """``tokens_sha256`` and ``text_sha256`` of a split of several shards; counts one."""
    texts = hashlib.sha256()
    for run in runs if has_texts else ():
        tick(0)
        for line in _lines(merge, split, run):
            texts.update(line)
    tokens = shard_sha256(
        (block for run in runs for block in _tokens(merge, split, run)),
        np.concatenate([_run_lengths(merge, split, run) for run in runs]),
        vocab_size=merge.vocab_size,
        fingerprint=merge.fingerprint,
    )
    tick(1)
    return {"tokens_sha256": tokens, "text_sha256": texts.hexdigest() if has_texts else None}


def _lengths(pieces: Path, number: int, split: str) -> np.ndarray:
    return np.fromfile(piece_file(pieces, number, f"{split}.lengths"), "<u8").astype(np.int64)


def _run_lengths(merge: Merge, split: str, run: Run) -> np.ndarray:
    return _lengths(merge.pieces, run.piece, split)[slice(*run.documents)]


def _tokens(merge: Merge, split: str, run: Run) -> Iterator[np.ndarray]:
    file = piece_file(merge.pieces, run.piece, f"{split}.tokens")
    tokens = np.memmap(file, dtype=token_dtype(merge.vocab_size), mode="r")
    yield from blocks(tokens[slice(*run.tokens)])


def _lines(merge: Merge, split: str, run: Run) -> Iterator[bytes]:
    file = piece_file(merge.pieces, run.piece, f"{split}.texts.gz")
    with gzip.open(file, "rb") as lines:
        yield from islice(lines, *run.documents)
