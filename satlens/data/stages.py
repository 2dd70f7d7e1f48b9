"""The stages of preparing a corpus: read, train the tokenizer, tokenise, write.

Each goes on from the parts that are done (see satlens.data.partial).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from satlens.data.corpora import LARGE_CORPUS, SPLITS, SplitName
from satlens.data.jobs import Job, Progress, Workers, sync
from satlens.data.manifest import complete, shard_name
from satlens.data.merging import Merge, digest_split, plan, write_shard
from satlens.data.partial import Partial
from satlens.data.pieces import (
    ID_BYTES,
    EncodeOptions,
    UnfinishedError,
    encode_piece,
    piece_file,
    read_piece,
    sample_texts,
)
from satlens.data.shards import file_sha256
from satlens.data.sources import Source
from satlens.data.tokenizers import TOKENIZER_FILE, fingerprint, load_tokenizer, train_bpe
from satlens.data.tokenizers import vocab_size as size_of
from satlens.errors import DataError


class Counted(NamedTuple):
    """What the first reading found."""

    n_documents: int
    by_piece: list[int]
    n_sampled: int
    ids_sha256: str
    texts: tuple[SplitName, ...]
    """Splits whose texts are kept."""


class Preparation:
    """The stages of one preparation."""

    def __init__(
        self, name: str, source: Source, parts: Partial, pool: Workers, report: Progress
    ) -> None:
        self.name, self.source, self.parts = name, source, parts
        self.pool, self.report = pool, report

    def run(self, given: Tokenizer | None, options: dict[str, Any]) -> dict[str, Any]:
        """Do what is not done yet, but for the manifest: that is returned."""
        sample = options["tokenizer_sample"]
        try:
            counted = self._read(sample)
            tokenizer = self._tokenizer(given, counted, options)
            characters = self._tokenise(tokenizer, counted)
            return self._write(tokenizer, counted, characters, options)
        except BrokenProcessPool:
            raise UnfinishedError(
                f"{self.parts.out}: a worker process was killed (out of memory?); "
                "the same command goes on from what is done"
            ) from None

    # -- reading ----------------------------------------------------------------------------------

    def _read(self, sample: float | None) -> Counted:
        place = self.parts.read
        jobs = [
            Job(read_piece, (piece, place, sample), piece_file(place, k, "json"), reads_corpus=True)
            for k, piece in enumerate(self.source.pieces)
        ]
        found = self.pool.run("read", jobs, self.report)
        by_piece = [piece["n_documents"] for piece in found]
        total = sum(by_piece)
        size = "large" if total > LARGE_CORPUS else "small"
        counts: Counter[str] = Counter()
        for piece in found:
            counts.update(piece[size])
        ids = self._check_ids(by_piece)
        for name in SPLITS:
            if not counts[name]:
                raise DataError(
                    f"{self.name}: split {name!r} is empty: {total} documents are too few "
                    "(30 usually suffice; a separator line can cut one text into documents)"
                )
        n_sampled = sum(piece["sampled"].get(size, 0) for piece in found)
        if sample is not None and n_sampled == 0:
            raise DataError(
                f"tokenizer_sample: none of {counts['train']} documents falls into {sample:g}"
            )
        texts: tuple[SplitName, ...] = tuple(
            name for name in SPLITS if name != "train" or size == "small"
        )
        return Counted(total, by_piece, n_sampled, ids, texts)

    def _check_ids(self, by_piece: list[int]) -> str:
        """Refuse an id that occurs twice; returns the digest of all."""
        digest = hashlib.sha256()
        heads, tails = (np.empty(sum(by_piece), np.uint64) for _ in range(2))
        begin = 0
        for number, n_documents in enumerate(by_piece):
            raw = piece_file(self.parts.read, number, "ids").read_bytes()
            digest.update(raw)
            pairs = np.frombuffer(raw, dtype=np.uint64).reshape(-1, ID_BYTES // 8)
            heads[begin : begin + n_documents], tails[begin : begin + n_documents] = pairs.T
            begin += n_documents
        order = np.lexsort((tails, heads))
        same = (np.diff(heads[order]) == 0) & (np.diff(tails[order]) == 0)
        if same.any():
            place = int(order[1:][same].min())  # lexsort is stable: the later one of a pair
            repeated = self._id_at(place, by_piece)
            raise DataError(f"{self.name}: field 'id': {repeated!r} occurs twice")
        return digest.hexdigest()

    def _id_at(self, place: int, by_piece: list[int]) -> str:
        for piece, n_documents in zip(self.source.pieces, by_piece, strict=True):
            if place < n_documents:
                return next(islice(self.source.read(piece), place, None)).id
            place -= n_documents
        raise IndexError(place)

    # -- tokenising -------------------------------------------------------------------------------

    def _tokenizer(
        self, given: Tokenizer | None, counted: Counted, options: dict[str, Any]
    ) -> Tokenizer:
        file, place = self.parts.tokenizer, self.parts.read
        if not file.exists():
            made = given or train_bpe(self._texts(counted), options["vocab_size"])
            temporary = file.with_suffix(".tmp")
            temporary.write_text(made.to_str(pretty=True), encoding="utf-8")
            sync(temporary)
            os.replace(temporary, file)
        for number in range(len(counted.by_piece)):
            piece_file(place, number, "sample.gz").unlink(missing_ok=True)
        return load_tokenizer(file)

    def _texts(self, counted: Counted) -> Iterator[str]:
        done = 0
        for number in range(len(counted.by_piece)):
            for text in sample_texts(self.parts.read, number, counted.n_documents):
                yield text
                done += 1
                self.report("tokenizer", done, counted.n_sampled)

    def _tokenise(self, tokenizer: Tokenizer, counted: Counted) -> Counter[str]:
        """Tokenise every piece; returns the characters of each split."""
        parts = self.parts
        options = EncodeOptions(
            tokenizer=parts.tokenizer,
            fingerprint=fingerprint(tokenizer),
            read=parts.read,
            folder=parts.tokens,
            n_documents=counted.n_documents,
            texts=counted.texts,
        )
        jobs = [
            Job(
                encode_piece,
                (piece, options),
                piece_file(parts.tokens, k, "json"),
                size=counted.by_piece[k],
                reads_corpus=True,
            )
            for k, piece in enumerate(self.source.pieces)
        ]
        characters: Counter[str] = Counter()
        for piece in self.pool.run("tokenise", jobs, self.report):
            characters.update({name: piece[name]["n_characters"] for name in SPLITS})
        return characters

    # -- writing ----------------------------------------------------------------------------------

    def _write(
        self,
        tokenizer: Tokenizer,
        counted: Counted,
        characters: Counter[str],
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Write every file but the manifest, which is returned."""
        parts = self.parts
        merge = Merge(parts.tokens, parts.data, size_of(tokenizer), fingerprint(tokenizer))
        shards, wholes = self._plan(merge, counted, options["shard_tokens"])
        jobs = [*shards.values(), *wholes.values()]
        written = self.pool.run("write", jobs, self.report)
        found = {job.record.stem: result for job, result in zip(jobs, written, strict=True)}
        shutil.copyfile(parts.tokenizer, parts.data / TOKENIZER_FILE)
        sync(parts.data / TOKENIZER_FILE)
        files = {TOKENIZER_FILE: file_sha256(parts.data / TOKENIZER_FILE)}
        splits = {}
        for split in SPLITS:
            each = [found[job.record.stem] for (name, _), job in shards.items() if name == split]
            for shard in each:
                files |= shard["files"]
            splits[split] = _counts(each, found.get(split), characters[split])
        return complete(
            source=self.source.info,
            options=options,
            made_by=merge.fingerprint,
            vocab_size=merge.vocab_size,
            splits=splits,
            files=files,
            ids=counted.ids_sha256,
        )

    def _plan(
        self, merge: Merge, counted: Counted, shard_tokens: int
    ) -> tuple[dict[tuple[str, int], Job], dict[str, Job]]:
        """A job for each shard, and one for each split of several shards."""
        shards: dict[tuple[str, int], Job] = {}
        wholes: dict[str, Job] = {}
        for split in SPLITS:
            has_texts = split in counted.texts
            plans = plan(merge.pieces, len(counted.by_piece), split, shard_tokens)
            for number, runs in enumerate(plans):
                record = self.parts.shards / f"{shard_name(split, number)}.json"
                arguments = (merge, split, number, runs, has_texts)
                shards[split, number] = Job(write_shard, arguments, record)
            if len(plans) > 1:
                whole = [run for runs in plans for run in runs]
                record = self.parts.shards / f"{split}.json"
                wholes[split] = Job(digest_split, (merge, split, whole, has_texts), record)
        return shards, wholes


def _counts(
    shards: list[dict[str, Any]], whole: dict[str, Any] | None, n_characters: int
) -> dict[str, Any]:
    """What the manifest says of one split; ``whole`` are the digests of one of several shards."""
    sizes = [{key: shard[key] for key in ("n_documents", "n_tokens")} for shard in shards]
    digests = whole or shards[0]
    return {
        "n_documents": sum(size["n_documents"] for size in sizes),
        "n_tokens": sum(size["n_tokens"] for size in sizes),
        "n_characters": n_characters,
        "tokens_sha256": digests["tokens_sha256"],
        "text_sha256": digests["text_sha256"],
        "shards": sizes,
    }
