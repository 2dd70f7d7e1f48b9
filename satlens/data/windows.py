"""The one evaluation protocol: fixed windows over whole documents.

Each document is cut into windows of ``C = n_ctx`` targets. Window j has the inputs
``tokens[jC : jC + C]`` and the targets ``tokens[jC + 1 : jC + C + 1]``, so every token of a
document but its first is scored exactly once, with a history of 1 to C tokens. No BOS or EOS is
added, no documents are packed together, short windows are padded on the right. Shapes: B rows, T
positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from satlens.data.corpora import (
    EMBEDDED,
    check_text,
    read_corpus,
    split_of,
)
from satlens.data.dataset import DocumentTokens, PreparedDataset, is_prepared
from satlens.data.shards import check_vocabulary
from satlens.data.tokenizers import decode, encode, fingerprint
from satlens.errors import DataError

ARRAY_SUFFIX = ".npy"

_SHOWN = 100
"""Characters of a string that an error repeats."""

IGNORE = -100
"""Target of a position that is not scored."""


class Batch(NamedTuple):
    """Windows side by side; tensors on the CPU."""

    tokens: torch.Tensor
    """Inputs (B, T) int64; padding repeats id 0 and is never ``valid``."""
    targets: torch.Tensor
    """Next tokens (B, T) int64; -100 where not scored (padding, special tokens)."""
    document: torch.Tensor
    """Index of each row's document in ``Windows.documents`` (B,) int64."""
    start: torch.Tensor
    """Position in its document of each row's first token (B,) int64."""
    valid: torch.Tensor
    """Real, non-special input tokens (B, T) bool."""
    first: torch.Tensor
    """First token of a context, which has no history (B, T) bool."""
    index: int
    """Number of the batch in the partition."""


class Windows:
    """A fixed partition of documents into batches of windows.

    Windows follow each other in the order of the documents; batch k holds the rows
    ``[k batch_size, (k + 1) batch_size)``. T is the longest row of a batch, at most ``n_ctx``.

    Args:
        documents: what to evaluate, from :func:`as_documents`.
        n_ctx: targets in a window.
        batch_size: rows in a batch.
        special_ids: ids never scored and never ``valid``; counted in ``n_special``.
        d_vocab: every id must be smaller, if given.
        max_documents: keep this many documents: those with the smallest SHA-256 of
            ``"slice:" + id``, in their order in ``documents`` (a deterministic sample; the first
            ones of a corpus are often the oldest). None keeps all.
        max_tokens_per_document: keep this many first tokens of each document. None keeps all.
        split: what the documents are of their data, from :func:`split_taken`; recorded only.

    Raises:
        DataError: nothing to score, an empty document, or an id outside the vocabulary.
    """

    def __init__(
        self,
        documents: Sequence[DocumentTokens],
        n_ctx: int,
        batch_size: int = 8,
        special_ids: frozenset[int] = frozenset(),
        *,
        d_vocab: int | None = None,
        max_documents: int | None = None,
        max_tokens_per_document: int | None = None,
        split: str | None = None,
    ) -> None:
        _require_positive("n_ctx", n_ctx)
        _require_positive("batch_size", batch_size)
        self.n_ctx = n_ctx
        self.batch_size = batch_size
        self.special_ids = special_ids
        self.split = split
        self._special = torch.tensor(sorted(special_ids), dtype=torch.int64)
        chosen = _choose(documents, max_documents)
        if max_tokens_per_document is not None:
            _require_positive("max_tokens_per_document", max_tokens_per_document)
            chosen = [d._replace(tokens=d.tokens[:max_tokens_per_document]) for d in chosen]
        for document in chosen:
            if len(document.tokens) == 0:
                raise DataError(f"document {document.id!r}: no tokens")
            if d_vocab is not None:
                check_vocabulary(document.tokens, d_vocab, f"document {document.id!r}")
        self.documents = [d for d in chosen if len(d.tokens) > 1]
        """The documents evaluated: ``Batch.document`` counts in this list."""
        self.n_skipped = len(chosen) - len(self.documents)
        """Documents of one token, which have no target."""
        if not self.documents:
            raise DataError(f"data: nothing to score in {len(chosen)} documents of at most 1 token")
        n_targets = [len(d.tokens) - 1 for d in self.documents]
        rows = [-(-n // n_ctx) for n in n_targets]
        self._document = np.repeat(np.arange(len(rows)), rows)
        self._start = np.concatenate([np.arange(n) * n_ctx for n in rows])
        specials = np.array(sorted(special_ids), dtype=np.int64)
        self.n_special = sum(int(np.isin(d.tokens, specials).sum()) for d in self.documents)
        """Special tokens in the documents; none is scored or ``valid``."""
        first = sum(int(np.isin(d.tokens[:1], specials).sum()) for d in self.documents)
        self.n_tokens = sum(n_targets) - (self.n_special - first)
        """Scored targets."""
        self.sha256 = _digest(self.documents)
        """SHA-256 over ids and tokens of the documents evaluated, in order."""

    @property
    def n_documents(self) -> int:
        return len(self.documents)

    @property
    def n_windows(self) -> int:
        """Rows in all batches together."""
        return len(self._start)

    def __len__(self) -> int:
        return -(-self.n_windows // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        """Batch ``index`` of the partition; no slices, no negative numbers."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        rows = range(index * self.batch_size, min((index + 1) * self.batch_size, self.n_windows))
        pieces = [self._window(row) for row in rows]
        width = max(len(piece) for piece in pieces) - 1
        tokens = torch.zeros(len(pieces), width, dtype=torch.int64)
        targets = torch.full((len(pieces), width), IGNORE)
        real = torch.zeros(len(pieces), width, dtype=torch.bool)
        for row, piece in enumerate(pieces):
            n = len(piece) - 1
            tokens[row, :n] = piece[:-1]
            targets[row, :n] = piece[1:]
            real[row, :n] = True
        first = torch.zeros_like(real)
        first[:, 0] = True
        selected = slice(rows.start, rows.stop)
        return Batch(
            tokens=tokens,
            targets=targets.masked_fill(torch.isin(targets, self._special), IGNORE),
            document=torch.from_numpy(self._document[selected].copy()),
            start=torch.from_numpy(self._start[selected].copy()),
            valid=real & ~torch.isin(tokens, self._special),
            first=first,
            index=index,
        )

    def iter_from(self, index: int = 0, step: int = 1) -> Iterator[Batch]:
        """Batches index, index + step, ...: resume at a batch, or share among processes."""
        for number in range(index, len(self), step):
            yield self[number]

    def __iter__(self) -> Iterator[Batch]:
        return self.iter_from()

    def _window(self, row: int) -> torch.Tensor:
        tokens = self.documents[self._document[row]].tokens
        start = self._start[row]
        return torch.from_numpy(tokens[start : start + self.n_ctx + 1].astype(np.int64))


def tokens_per_document(documents: Sequence[DocumentTokens], max_targets: int) -> int:
    """The largest ``max_tokens_per_document`` that leaves at most ``max_targets`` targets.

    A slice of a budget that is spread over all documents; at least 2 (one target a document).
    """
    lengths = np.array([len(d.tokens) for d in documents], dtype=np.int64)
    low, high = 2, max(2, int(lengths.max(initial=2)))
    while low < high:
        cap = (low + high + 1) // 2
        if int(np.maximum(np.minimum(lengths, cap) - 1, 0).sum()) <= max_targets:
            low = cap
        else:
            high = cap - 1
    return low


# -- what a user may pass as data ----------------------------------------------------------------


def as_documents(data: Any, tokenizer: Any = None, split: str = "test") -> list[DocumentTokens]:
    """Documents of anything that satlens takes as data.

    Args:
        data: a token tensor (B, T) or (T,), each row a document; a text; a list of documents
            (texts or lists of token ids); a path to a text file, a folder of them, JSONL, a
            ``.npy`` of token ids (B, T) or a prepared folder; ``"sotu"``; or a
            :class:`PreparedDataset`. A string is a path if such a file or folder exists, else a
            text of at least two words: one without a space is refused, since it is rather a
            mistyped path. A list or a file may hold any text.
        tokenizer: needed for texts; it must be the one of prepared data.
        split: which documents of prepared data and of ``"sotu"``; other sources are taken whole.

    Raises:
        DataError: no documents, no tokenizer for a text, a tokenizer that does not fit, a string
            of one word that names no file, or bad input of any kind.
    """
    if isinstance(data, PreparedDataset):
        return _of_prepared(data, tokenizer, split)
    if isinstance(data, torch.Tensor | np.ndarray):
        return _of_array(_as_array(data), tokenizer)
    if isinstance(data, str | Path):
        return _of_string(data, tokenizer, split)
    if isinstance(data, list | tuple):
        if not data:
            raise DataError("data: no documents")
        if all(isinstance(item, str) for item in data):
            texts = [check_text(text, f"data[{k}]") for k, text in enumerate(data)]
            return _of_texts([(str(k), text, None) for k, text in enumerate(texts)], tokenizer)
        if all(isinstance(item, DocumentTokens) for item in data):
            return list(data)
        rows = [_of_row(item, f"data[{k}]") for k, item in enumerate(data)]
        return [_from_tokens(str(k), row, tokenizer) for k, row in enumerate(rows)]
    raise DataError(f"data: {type(data).__name__} is not tokens, a text, documents or a path")


def split_taken(data: Any, split: str) -> str | None:
    """The split that :func:`as_documents` takes of ``data``; None for data taken whole."""
    if isinstance(data, PreparedDataset) or (isinstance(data, str) and data == EMBEDDED):
        return split
    named = isinstance(data, Path) or (isinstance(data, str) and _is_path(data))
    return split if named and is_prepared(data) else None


def _of_prepared(data: PreparedDataset, tokenizer: Any, split: str) -> list[DocumentTokens]:
    if tokenizer is not None and fingerprint(tokenizer) != data.fingerprint:
        raise DataError(
            f"{data.path}: tokenizer: {data.fingerprint[:12]}... made this data, "
            f"the model's is {fingerprint(tokenizer)[:12]}..."
        )
    return data.split(split).documents


def _of_array(array: np.ndarray, tokenizer: Any) -> list[DocumentTokens]:
    if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer) or array.size == 0:
        shape = tuple(array.shape)
        raise DataError(f"data: tokens must be integers (B, T), got {array.dtype} {shape}")
    return [
        _from_tokens(str(k), row.astype(np.int64), tokenizer)
        for k, row in enumerate(np.atleast_2d(array))
    ]


def _as_array(tokens: Any) -> np.ndarray:
    return np.asarray(tokens.detach().cpu() if isinstance(tokens, torch.Tensor) else tokens)


def _of_row(item: Any, where: str) -> np.ndarray:
    if isinstance(item, str):
        raise DataError(f"{where}: a text among token lists")
    try:
        row = _as_array(item)
    except (ValueError, TypeError, RuntimeError):
        raise DataError(f"{where}: not a list of token ids") from None
    if row.ndim != 1 or row.size == 0 or not np.issubdtype(row.dtype, np.integer):
        found = "no tokens" if row.size == 0 else f"{row.dtype} of shape {tuple(row.shape)}"
        raise DataError(f"{where}: a list of token ids was expected, got {found}")
    return row.astype(np.int64)


def _of_string(data: str | Path, tokenizer: Any, split: str) -> list[DocumentTokens]:
    if isinstance(data, str) and data == EMBEDDED:
        documents = list(read_corpus(data))
        chosen = [d for d in documents if split_of(d.id, len(documents)) == split]
        if not chosen:
            raise DataError(f"{data}: no split {split!r}")
        return _of_texts([d[:3] for d in chosen], tokenizer)
    if isinstance(data, str) and not _is_path(data):
        return _of_texts([("0", _check_is_text(data), None)], tokenizer)
    if is_prepared(data):
        return _of_prepared(PreparedDataset.open(data), tokenizer, split)
    if Path(data).suffix == ARRAY_SUFFIX:
        return _of_array(_read_array(Path(data)), tokenizer)
    return _of_texts([d[:3] for d in read_corpus(data)], tokenizer, str(data))


def _is_path(data: str) -> bool:
    """Whether a string names a file or folder that exists."""
    if not data or "\n" in data or "\0" in data:
        return False
    try:
        return Path(data).exists()
    except (OSError, UnicodeError):  # longer than any file name, or not one at all
        return False


def _check_is_text(data: str) -> str:
    """A string that names no file, as the text it must then be: two words or more."""
    text = check_text(data, "data")
    if len(text.split()) > 1:
        return text
    word = text.strip()
    shown = word if len(word) <= _SHOWN else f"{word[:_SHOWN]}..."
    if "/" in word or "\\" in word or Path(word).suffix:
        raise DataError(f"{shown}: no such file or folder")
    raise DataError(
        f"data: {shown!r} is no file or folder, and a text needs at least two words; "
        "write it to a file or pass it in a list"
    )


def _read_array(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, EOFError):
        raise DataError(f"{path}: not a plain .npy array of token ids") from None


def _of_texts(
    documents: Sequence[tuple[str, str, str | None]], tokenizer: Any, where: str = "data"
) -> list[DocumentTokens]:
    if not documents:
        raise DataError(f"{where}: no documents")
    if tokenizer is None:
        raise DataError("data: a text needs a tokenizer, and this model has none; pass token ids")
    tokens = encode(tokenizer, [text for _, text, _ in documents])
    return [
        DocumentTokens(doc_id, cluster, ids, text)
        for (doc_id, text, cluster), ids in zip(documents, tokens, strict=True)
    ]


def _from_tokens(doc_id: str, tokens: np.ndarray, tokenizer: Any) -> DocumentTokens:
    text = "" if tokenizer is None else decode(tokenizer, tokens)
    return DocumentTokens(doc_id, None, tokens, text)


# -- helpers -------------------------------------------------------------------------------------


def _choose(documents: Sequence[DocumentTokens], limit: int | None) -> list[DocumentTokens]:
    if limit is None or limit >= len(documents):
        return list(documents)
    _require_positive("max_documents", limit)

    def rank(index: int) -> tuple[bytes, int]:
        name = f"slice:{documents[index].id}".encode()
        return hashlib.sha256(name).digest(), index

    return [documents[k] for k in sorted(sorted(range(len(documents)), key=rank)[:limit])]


def _digest(documents: Sequence[DocumentTokens]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.id}\n{len(document.tokens)}\n".encode())
        digest.update(document.tokens.astype("<i8").tobytes())
    return digest.hexdigest()


def _require_positive(name: str, value: int) -> None:
    if value <= 0:
        raise DataError(f"{name}: must be positive, got {value}")
