"""Codes of tokens: category, frequency, position and whatever else a table is broken down by.

A coding gives every token of every document a small whole number; codes of a batch are cut out of
it window by window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from satlens.data.categories import UPOS
from satlens.data.tags import Tags
from satlens.data.windows import Batch, Windows
from satlens.errors import AnalysisError

BREAKDOWNS = ("category", "upos", "tag", "dep", "entity", "subword", "frequency", "position")
N_FREQUENCY_BANDS = 5
POSITION_SHARES = (1 / 8, 1 / 4, 1 / 2)
"""Where position bands meet, as shares of the context."""


@dataclass(frozen=True, eq=False)
class Coding:
    """A small whole number for each token."""

    names: tuple[str, ...]
    """What each number stands for."""
    codes: Sequence[np.ndarray]
    """One array (n,) a document of ``Windows.documents``."""

    def of(self, batch: Batch) -> Tensor:
        """(B, T) int64 codes of a batch's input tokens; 0 on padding, which is never valid."""
        out = np.zeros(tuple(batch.tokens.shape), dtype=np.int64)
        rows = zip(batch.document.tolist(), batch.start.tolist(), strict=True)
        for row, (document, start) in enumerate(rows):
            piece = self.codes[document][start : start + out.shape[1]]
            out[row, : len(piece)] = piece
        return torch.from_numpy(out).to(batch.tokens.device)


def coding(by: str, windows: Windows, tags: Tags | None) -> Coding:
    """The coding of a breakdown, one of BREAKDOWNS.

    Raises:
        AnalysisError: another name.
    """
    if by == "frequency":
        return frequency_bands(windows)
    if by == "position":
        return position_bands(windows)
    if by not in BREAKDOWNS or tags is None:
        raise AnalysisError(f"by: {by!r} is not one of {', '.join(BREAKDOWNS)}")
    documents = tags.documents
    if by == "category":
        return Coding(tags.categories.names, [d.category for d in documents])
    if by == "upos":
        return Coding(UPOS, [d.upos for d in documents])
    if by == "subword":
        return subwords(tags)
    return _labels([getattr(d, by) for d in documents])


def require_tags_of(tags: Tags, windows: Windows, analysis: str) -> None:
    """Refuse tags that are not of the documents of some windows.

    Raises:
        AnalysisError: ids or lengths differ.
    """
    found = [(document.id, len(document.upos)) for document in tags.documents]
    if found != [(document.id, len(document.tokens)) for document in windows.documents]:
        raise AnalysisError(f"{analysis}: tags: they belong to other documents than the data")


def occurrences(codes: Coding, windows: Windows) -> np.ndarray:
    """(n_documents, names) bool: documents with a token of each code among those that count.

    What counts is what :func:`satlens.analysis.engine.stream.kept_tokens` keeps: input tokens
    that are neither special nor the first of a window.
    """
    special = np.array(sorted(windows.special_ids), dtype=np.int64)
    found = np.zeros((windows.n_documents, len(codes.names)), dtype=bool)
    for row, document, code in zip(found, windows.documents, codes.codes, strict=True):
        tokens = document.tokens[:-1]
        kept = (np.arange(len(tokens)) % windows.n_ctx != 0) & ~np.isin(tokens, special)
        row[np.asarray(code)[: len(tokens)][kept]] = True
    return found


def subwords(tags: Tags) -> Coding:
    """First subword of a word, continuation, or no word."""
    codes = [np.where(d.word < 0, 2, np.where(d.is_first, 0, 1)) for d in tags.documents]
    return _coding(("first", "continuation", "none"), codes)


def _labels(texts: Sequence[np.ndarray]) -> Coding:
    names = sorted(set().union(*(set(np.unique(text).tolist()) for text in texts)))
    return _coding(tuple(map(str, names)), [np.searchsorted(names, text) for text in texts])


def _coding(names: tuple[str, ...], codes: Iterable[np.ndarray]) -> Coding:
    """Codes in as few bytes as their names need: they are kept for a whole corpus."""
    kind = np.min_scalar_type(len(names))
    return Coding(names, [code.astype(kind, copy=False) for code in codes])


def frequency_bands(windows: Windows, n_bands: int = N_FREQUENCY_BANDS) -> Coding:
    """Bands of token frequency in the documents themselves, of about equal mass, rarest first.

    A token type is in one band, so bands are as equal as the most frequent types allow.
    """
    counts = np.bincount(np.concatenate([d.tokens for d in windows.documents]).astype(np.int64))
    order = np.argsort(counts, kind="stable")
    mass = np.cumsum(counts[order])
    middle = (mass - counts[order] / 2) / mass[-1]
    band = np.zeros(len(counts), dtype=np.int64)
    band[order] = np.minimum((middle * n_bands).astype(np.int64), n_bands - 1)
    names = tuple(f"frequency {k + 1} of {n_bands}" for k in range(n_bands))
    band = band.astype(np.min_scalar_type(n_bands))
    return Coding(names, [band[d.tokens] for d in windows.documents])


def position_bands(windows: Windows, shares: Sequence[float] = POSITION_SHARES) -> Coding:
    """Bands of the position within the context."""
    cuts = sorted({round(share * windows.n_ctx) for share in shares} - {0, windows.n_ctx})
    ends = [0, *cuts, windows.n_ctx]
    names = tuple(f"position {start}..{end - 1}" for start, end in pairwise(ends))
    position = np.arange(max(len(d.tokens) for d in windows.documents)) % windows.n_ctx
    band = np.searchsorted(cuts, position, side="right")
    return Coding(names, [band[: len(d.tokens)] for d in windows.documents])


def crossed(*codings: Coding) -> Coding:
    """Every combination of several codings."""
    names, codes = codings[0].names, codings[0].codes
    for other in codings[1:]:
        n = len(other.names)
        names = tuple(f"{a}, {b}" for a in names for b in other.names)
        pairs = zip(codes, other.codes, strict=True)
        codes = _coding(names, (np.asarray(a, dtype=np.int64) * n + b for a, b in pairs)).codes
    return Coding(names, codes)
