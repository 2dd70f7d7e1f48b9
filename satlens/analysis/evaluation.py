"""Negative log-likelihood and perplexity of a model, per document, by the one protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from satlens.analysis.engine.accumulators import Accumulator, GroupSums
from satlens.analysis.engine.descriptive import Descriptive, Inputs, measure
from satlens.analysis.engine.inputs import (
    interval_columns,
    interval_protocol,
    interval_summary,
    split_notes,
)
from satlens.analysis.engine.stream import Observed, Progress, Reducer, Transform, run
from satlens.analysis.result import Result
from satlens.analysis.stats import N_RESAMPLES, group_of, pool_clusters, ratio_interval
from satlens.data.token_text import Spelling
from satlens.data.windows import IGNORE, Windows
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder


class Losses:
    """Summed loss and number of scored tokens of each document."""

    needs_nll = True

    def __init__(self, n_documents: int) -> None:
        self.hooks: dict[str, Transform | None] = {}
        self.sums = GroupSums(n_documents, {"nll": (), "n": ()})
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums}
        self.identity: dict[str, Any] = {"reducer": "losses", "documents": n_documents}

    def update(self, seen: Observed) -> None:
        """Add one batch."""
        assert seen.nll is not None
        self.sums.add(
            seen.batch.document.cpu().numpy(),
            nll=seen.nll.double().sum(1),
            n=(seen.batch.targets != IGNORE).sum(1),
        )


def document_losses(
    model: Decoder,
    windows: Windows,
    *,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Summed negative log-likelihood in nats and number of scored tokens, (n_documents,) each."""
    losses = Losses(windows.n_documents)
    run(model, windows, [losses], progress=progress, resume_dir=resume_dir, label="evaluation")
    return losses.sums["nll"], losses.sums["n"]


def grouped(values: np.ndarray) -> np.ndarray:
    """Sums per document (n, ...) as sums per document group (G, ...)."""
    groups = group_of(np.arange(len(values)), len(values))
    total = np.zeros((groups.max() + 1, *values.shape[1:]))
    np.add.at(total, groups, values)
    return total


def scored_bytes(windows: Windows, tokenizer: Any) -> np.ndarray:
    """Bytes of UTF-8 that the scored tokens of each document spell, (n_documents,).

    NaN where nobody knows: without a tokenizer, or with tokens that do not encode their text.
    """
    found = np.full(windows.n_documents, np.nan)
    if tokenizer is None:
        return found
    spelling = Spelling(tokenizer)
    special = np.array(sorted(windows.special_ids), dtype=np.int64)
    for k, document in enumerate(windows.documents):
        lengths = spelling.lengths(document)
        if lengths is not None:
            found[k] = lengths[1:][~np.isin(document.tokens[1:], special)].sum()
    return found


def bits_per_byte(nll: Any, n_bytes: Any) -> np.ndarray:
    """Summed nats as bits for each byte of the text: comparable between tokenizers.

    NaN where there are no bytes.
    """
    bits = np.asarray(nll, dtype=np.float64) / math.log(2)
    n_bytes = np.asarray(n_bytes, dtype=np.float64)
    return np.divide(bits, n_bytes, out=np.full(bits.shape, np.nan), where=n_bytes > 0)


def evaluate(
    model: Decoder,
    data: Any,
    *,
    split: str = "test",
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> Result:
    """Mean negative log-likelihood (nats a token) and perplexity, of each document and of all.

    Args:
        data: a token tensor, a text, documents, a path or a prepared dataset.
        split: of prepared data.
        n_resamples, seed: of the bootstrap over documents.
        resume_dir: where a killed evaluation continues from.

    Returns:
        ``evaluation``: one row a document with ``nll, perplexity``, and ``bits_per_byte`` of the
        ``n_bytes`` that the scored tokens spell, which does not depend on how text is cut into
        tokens. The summary has all three for the whole data with intervals over documents, and
        over clusters where the data has some.

    Raises:
        AnalysisError: a document's loss is not finite.
        DataError: bad data, or data of another tokenizer.
    """
    (result,) = measure(
        model,
        data,
        [Evaluation()],
        label="evaluation",
        baseline=False,
        split=split,
        batch_size=batch_size,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
        n_resamples=n_resamples,
        seed=seed,
        progress=progress,
        resume_dir=resume_dir,
    )
    table = result.table
    for document, nll, n in zip(table["document"], table["nll"], table["n_tokens"], strict=True):
        if n and not np.isfinite(nll):
            raise AnalysisError(f"evaluation: document {document!r}: the loss is not finite")
    return result


class Evaluation(Descriptive):
    """:func:`evaluate` as a part of a pass."""

    name = "evaluation"
    has_baseline = False

    def reducers(self, model: Decoder, inputs: Inputs) -> list[Reducer]:
        return [Losses(inputs.windows.n_documents)]

    def result(
        self, inputs: Inputs, trained: Sequence[Reducer], initial: Sequence[Reducer] | None
    ) -> Result:
        (losses,) = trained
        assert isinstance(losses, Losses)
        windows, nll, n = inputs.windows, losses.sums["nll"], losses.sums["n"]
        n_bytes = scored_bytes(windows, inputs.tokenizer)
        scored = n > 0
        mean = np.divide(nll, n, out=np.full(len(n), np.nan), where=scored)
        table = pd.DataFrame(
            {
                "document": [document.id for document in windows.documents],
                "cluster": [document.cluster or "" for document in windows.documents],
                "nll": mean,
                "perplexity": np.exp(mean),
                "bits_per_byte": bits_per_byte(nll, n_bytes),
                "n_bytes": pd.array(n_bytes, dtype="Int64"),
                "n_documents": 1,
                "n_tokens": n,
                "flags": np.where(scored, "", "no_targets"),
            }
        )
        return Result(
            name=self.name,
            table=table,
            provenance=inputs.provenance(),
            summary=_summary(windows, nll, n, n_bytes, inputs.options),
            notes=[
                "Every token but the first of each document is scored once, in nats.",
                *_byte_notes(n_bytes, inputs.tokenizer),
                *split_notes(windows),
            ],
        )


def _byte_notes(n_bytes: np.ndarray, tokenizer: Any) -> list[str]:
    unknown = int(np.isnan(n_bytes).sum())
    if not unknown:
        return []
    if tokenizer is None:
        return ["No bits per byte: without a tokenizer nobody knows the text."]
    return [f"No bits per byte: tokens of {unknown} documents do not encode their text."]


def _summary(
    windows: Windows,
    nll: np.ndarray,
    n: np.ndarray,
    n_bytes: np.ndarray,
    options: dict[str, Any],
) -> dict[str, Any]:
    over_documents = ratio_interval(grouped(nll), grouped(n), **options)
    columns = interval_columns("nll", over_documents)
    summary: dict[str, Any] = {
        "nll": interval_summary(over_documents),
        "perplexity": {
            key: float(np.exp(columns[name][0]))
            for key, name in (("estimate", "nll"), ("low", "nll_low"), ("high", "nll_high"))
        },
        "bits_per_byte": None,
        "interval": interval_protocol(over_documents, windows.n_documents),
        "n_documents": windows.n_documents,
        "n_tokens": int(n.sum()),
        "n_bytes": None,
    }
    if not np.isnan(n_bytes).any():
        bits = ratio_interval(grouped(nll / math.log(2)), grouped(n_bytes), **options)
        summary |= {"bits_per_byte": interval_summary(bits), "n_bytes": int(n_bytes.sum())}
    labels = [document.cluster for document in windows.documents]
    if all(label is not None for label in labels):
        pooled = ratio_interval(*pool_clusters(labels, nll, n), **options)
        summary["nll_over_clusters"] = interval_summary(pooled)
        summary["n_clusters"] = len(set(labels))
    return summary
