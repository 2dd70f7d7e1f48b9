"""Prepare a corpus: split by document, train the tokenizer, write shards.

The result is a folder that :class:`satlens.data.dataset.PreparedDataset` opens:

    manifest.json           counts, SHA-256 of each file, source, options
    tokenizer.json
    {split}-00000.bin       tokens (see satlens.data.shards), split in train, val, pool, test
    {split}-00000.jsonl.gz  id, cluster and text of the same documents in the same order

The corpus is read twice, piece by piece: once to check and to count it, and once to tokenise it.
Whatever is done lies in a hidden folder beside the result (see satlens.data.partial), from which
an interrupted preparation goes on; the result appears complete or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from satlens import __version__
from satlens.data.dataset import PreparedDataset
from satlens.data.jobs import Progress, Workers
from satlens.data.manifest import VERSION, says_prepared
from satlens.data.partial import Partial, partial
from satlens.data.pieces import UnfinishedError
from satlens.data.sources import Source, open_source
from satlens.data.stages import Preparation
from satlens.data.tokenizers import backend, end_id, fingerprint, load_tokenizer, train_bpe
from satlens.errors import DataError

SHARD_TOKENS = 100_000_000


def prepare(
    source: str | Path | Source,
    out_dir: str | Path,
    *,
    vocab_size: int = 2048,
    tokenizer: Tokenizer | str | Path | None = None,
    tokenizer_sample: float = 1.0,
    text_field: str = "text",
    id_field: str = "id",
    cluster_field: str = "cluster",
    separator: str | None = None,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> PreparedDataset:
    """Tokenise a corpus into a folder of checked shards; deterministic to the byte.

    Stopped at any moment (killed, interrupted, a full disk), the same call goes on from the parts
    that are done and ends with the same bytes. Texts of the train split are kept in corpora of at
    most 50,000 documents.

    Args:
        source: see :func:`satlens.data.corpora.read_corpus`, as are ``text_field``,
            ``id_field``, ``cluster_field`` and ``separator``; or an open source.
        out_dir: folder to create. It appears complete or not at all.
        vocab_size: tokens of the byte-level BPE trained on the train split.
        tokenizer: use this one (or the one at this path) and train none.
        tokenizer_sample: share of the train split's documents, chosen by a hash of their ids, that
            the tokenizer is trained on.
        workers: processes. The result does not depend on it. 1 works in this process, where the
            tokenizer uses every core but nothing else does. More are started anew, so that a
            script must call this below ``if __name__ == "__main__":``.
        shard_tokens: most tokens of a shard (a longer document is a shard alone).
        overwrite: replace an existing folder; else that is an error.
        progress: called with (stage, units done, units in all); stages are ``read`` (pieces),
            ``tokenizer`` and ``tokenise`` (documents), ``write`` (shards).
        note: called with a line for the user: what an interrupted preparation left, and whether it
            is used.

    Raises:
        DataError: bad input, an option out of its range, a repeated id, a split left without
            documents, or a folder that exists, cannot be written or is being written by another
            process.
    """
    out = Path(out_dir)
    name = str(source) if isinstance(source, str | Path) else source.info["name"]
    _check_options(vocab_size, tokenizer, tokenizer_sample, workers, shard_tokens)
    report = progress or (lambda stage, done, total: None)
    taken = _is_taken(out, overwrite, name)
    given = None if tokenizer is None else _given(tokenizer)
    fields = {
        "text_field": text_field,
        "id_field": id_field,
        "cluster_field": cluster_field,
        "separator": separator,
    }

    def opened() -> Source:
        if isinstance(source, str | Path):
            return open_source(source, **fields, tokenizer=given)
        return source

    corpus = opened()
    options = {
        "satlens": __version__,
        "vocab_size": None if given else vocab_size,
        "tokenizer_sample": None if given else tokenizer_sample,
        "shard_tokens": shard_tokens,
        **(fields if isinstance(source, str | Path) else {}),
    }
    key = {
        **options,
        "source": corpus.identity,
        "tokenizer": None if given is None else fingerprint(given),
        "format": VERSION,
    }
    with partial(out) as parts:
        if not parts.is_finished(key):
            if taken:
                kind = UnfinishedError if parts.has_begun() else DataError
                raise kind(_TAKEN.format(out))
            parts.begin(key, note or (lambda line: None))
            with Workers(workers, corpus, parts.alive) as pool:
                made = Preparation(name, corpus, parts, pool, report).run(given, options)
            if Path(name).exists() and opened().identity != corpus.identity:
                raise DataError(f"{name}: changed while it was read")
            parts.publish(key, made, overwrite)
    return PreparedDataset.open(out, verify=False)


_TAKEN = "{}: exists already; remove it or choose another folder"


def _is_taken(out: Path, overwrite: bool, source: str) -> bool:
    """Whether something stands in the way that a half-finished move does not explain."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not out.is_dir() or (not overwrite and not Partial(out).folder.is_dir()):
        raise DataError(_TAKEN.format(out))
    if not overwrite:
        return True
    read = Path(source).resolve()
    if out.resolve() in (read, *read.parents):
        raise DataError(f"{out}: holds the source {source}, so it is not replaced")
    if not says_prepared(out):
        raise DataError(f"{out}: is not prepared data, so it is not replaced; remove it yourself")
    return False


def _check_options(
    vocab_size: int, tokenizer: object, sample: float, workers: int, shard_tokens: int
) -> None:
    for name, value in (("workers", workers), ("shard_tokens", shard_tokens)):
        if value < 1:
            raise DataError(f"{name}: must be positive, got {value}")
    if not 0 < sample <= 1:
        raise DataError(f"tokenizer_sample: must lie in (0, 1], got {sample}")
    if tokenizer is None:
        train_bpe((), vocab_size)  # refuses an impossible size before the corpus is read
    elif sample != 1:
        raise DataError("tokenizer_sample: given with a tokenizer, which is not trained")


def _given(tokenizer: Tokenizer | str | Path) -> Tokenizer:
    is_path = isinstance(tokenizer, str | Path)
    made = load_tokenizer(tokenizer) if is_path else backend(tokenizer)
    end_id(made)  # a tokenizer without a separator cannot be packed: say so before the work
    return made
