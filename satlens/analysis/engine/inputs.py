"""What every analysis starts from and reports back: documents, sites, the untrained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from satlens.analysis.engine.stream import weights_sha256
from satlens.analysis.stats import MAX_GROUPS, Interval, group_of
from satlens.data.dataset import PreparedDataset, is_prepared
from satlens.data.tokenizers import fingerprint, special_ids
from satlens.data.windows import Windows, as_documents, split_taken
from satlens.errors import AnalysisError
from satlens.models.attention import chosen_attention
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite
from satlens.provenance import provenance

_STATE_INIT = ("satlens", "huggingface")
"""Layouts that say how weights were drawn."""


class Slice(Windows):
    """A partition that knows which part of its documents was asked for."""

    def __init__(
        self,
        *args: Any,
        max_documents: int | None = None,
        max_tokens_per_document: int | None = None,
        **options: Any,
    ) -> None:
        limits = {
            "max_documents": max_documents,
            "max_tokens_per_document": max_tokens_per_document,
        }
        super().__init__(*args, **limits, **options)
        self.limits = limits
        """Documents taken at most, first tokens taken of each; None is all."""


def open_windows(
    model: Decoder,
    data: Any,
    *,
    split: str = "test",
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
) -> Slice:
    """The fixed partition of any form of data for a model.

    Args:
        data: see :func:`satlens.data.windows.as_documents`.
        split: of prepared data; other sources are taken whole.
        batch_size: windows in a batch; changes no number beyond 1e-5.
        max_documents, max_tokens_per_document: see :class:`satlens.data.windows.Windows`.

    Raises:
        DataError: bad data, or data of another tokenizer.
    """
    data = opened(data)
    tokenizer = tokenizer_of(model, data)
    return Slice(
        as_documents(data, model.tokenizer, split),
        model.cfg.n_ctx,
        batch_size,
        frozenset() if tokenizer is None else special_ids(tokenizer),
        d_vocab=model.cfg.d_vocab,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
        split=split_taken(data, split),
    )


def opened(data: Any) -> Any:
    """A path to prepared data as the dataset, so that it is read and checked once."""
    one_line = isinstance(data, str) and len(data) < 4096 and "\n" not in data and "\0" not in data
    if (one_line or isinstance(data, Path)) and is_prepared(data):
        return PreparedDataset.open(data)
    return data


def tokenizer_of(model: Decoder, data: Any) -> Any:
    """The model's tokenizer, else the one of prepared data, else None."""
    if model.tokenizer is None and isinstance(data, PreparedDataset):
        return data.tokenizer
    return model.tokenizer


def provenance_of(
    model: Decoder,
    windows: Slice,
    *,
    seed: int,
    tokenizer: Any = None,
    tagger: str | None = None,
    weights: str | None = None,
    **data: Any,
) -> dict[str, Any]:
    """The provenance of a table: weights, data and the protocol of the windows.

    ``weights`` is their SHA-256 where it is known already.
    """
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    name, _, version = (tagger or "").rpartition(" ")
    return provenance(
        checkpoint={
            **model.provenance,
            "variant": model.cfg.variant,
            "weights_sha256": weights or weights_sha256(model),
        },
        data={**window_facts(windows), **data},
        tokenizer=None if tokenizer is None else fingerprint(tokenizer),
        seed=seed,
        n_documents=windows.n_documents,
        n_tokens=windows.n_tokens,
        tagger=None if tagger is None else {"name": name, "version": version},
        dtype=model.dtype,
        attention=chosen_attention(),
    )


def window_facts(windows: Slice) -> dict[str, Any]:
    """Identity and protocol of what was scored, for a provenance."""
    return {
        "sha256": windows.sha256,
        "split": windows.split,
        **windows.limits,
        "context": windows.n_ctx,
        "stride": windows.n_ctx,
        "bos": False,
        "packing": "none: windows of one document",
        "batch_size": windows.batch_size,
        "n_special": windows.n_special,
        "n_skipped": windows.n_skipped,
    }


def split_notes(windows: Windows) -> list[str]:
    """A note for results on data that has no splits."""
    return [] if windows.split is not None else ["Data taken whole: no split."]


def documents_in(n: np.ndarray, n_documents: int) -> np.ndarray:
    """Documents with tokens in each cell, from the tokens of each group, (G, *grid) -> (*grid).

    Beyond 1024 documents the groups hold several and cells cannot be told apart: each that has
    tokens gets all documents.
    """
    if n_documents <= MAX_GROUPS:
        return (n > 0).sum(axis=0)
    return np.where((n > 0).any(axis=0), n_documents, 0)


def require_finite(analysis: str, nll: np.ndarray, windows: Windows) -> None:
    """Refuse a model whose losses, summed by document group (G,), are not all finite.

    Raises:
        AnalysisError: they are not, naming the first document of such a group.
    """
    bad = np.flatnonzero(~np.isfinite(nll))
    if len(bad):
        groups = group_of(np.arange(windows.n_documents), windows.n_documents)
        first = windows.documents[np.flatnonzero(np.isin(groups, bad))[0]].id
        raise AnalysisError(f"{analysis}: document {first!r}: the model's loss is not finite")


def interval_protocol(interval: Interval, n_documents: int) -> dict[str, Any]:
    """How an interval was made, with what was resampled, for a summary."""
    grouped = f"{MAX_GROUPS} groups of documents, by hash"
    return {**interval.protocol(), "units": "documents" if n_documents <= MAX_GROUPS else grouped}


# -- the untrained model ---------------------------------------------------------------------------


def initial_model(model: Decoder) -> tuple[Decoder, int]:
    """The same configuration with the weights its training started from, and their seed.

    The seed is that of the checkpoint's training record; 0 where there is none.
    """
    seed = training_seed(model.provenance.get("training"))
    fresh = Decoder(model.cfg, seed=seed, tokenizer=model.tokenizer)
    return fresh.to(device=model.device, dtype=model.dtype), seed


def initial_notes(model: Decoder) -> list[str]:
    """How the untrained model's weights are drawn, where that is an assumption."""
    layout = model.provenance.get("layout")
    if layout in (None, *_STATE_INIT):
        return []
    return [
        f"The {layout} layout does not say how its weights were drawn: the columns ending in _init "
        f"assume init={model.cfg.init}."
    ]


def training_seed(record: Any) -> int:
    """The seed in a training record: its own field or that of its configuration."""
    if isinstance(record, Mapping):
        for place in (record, *(v for v in record.values() if isinstance(v, Mapping))):
            seed = place.get("seed")
            if isinstance(seed, int) and not isinstance(seed, bool):
                return seed
    return 0


# -- sites -----------------------------------------------------------------------------------------


def sites_of(model: Decoder, *, kind: str | None = None, analysis: str) -> list[AccessSite]:
    """The access sites of a model, of one kind or all.

    Raises:
        AnalysisError: it has none.
    """
    sites = [site for site in model.sites if kind in (None, site.kind)]
    if not sites:
        what = "access sites" if kind is None else f"{kind}s"
        raise AnalysisError(f"{analysis}: this model ({model.cfg.variant}) has no {what}")
    return sites


def gate_cells(sites: Sequence[AccessSite]) -> pd.DataFrame:
    """One row a (site, head), in the order of the sites: the first columns of a table."""
    rows = [(site, head) for site in sites for head in range(site.n_heads)]
    return _cells([site for site, _ in rows], [float(head) for _, head in rows], "gate")


def route_cells(sites: Sequence[AccessSite]) -> pd.DataFrame:
    """One row a site; routes have no heads."""
    return _cells(sites, [np.nan] * len(sites), "route")


def _cells(sites: Sequence[AccessSite], heads: Sequence[float], kind: str) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "site": [site.name for site in sites],
            "layer": [site.layer for site in sites],
            "sublayer": [site.sublayer for site in sites],
            "role": [site.role for site in sites],
            "head": np.array(heads, dtype=np.float64),
            "kind": [kind] * len(sites),
        }
    )


def interval_columns(name: str, interval: Interval, cell: Any = ...) -> dict[str, np.ndarray]:
    """``name, name_low, name_high`` of part of an interval's grid."""
    return {
        name: np.atleast_1d(interval.estimate[cell]),
        f"{name}_low": np.atleast_1d(interval.low[cell]),
        f"{name}_high": np.atleast_1d(interval.high[cell]),
    }


def interval_summary(interval: Interval, cell: Any = ...) -> dict[str, Any]:
    """One cell of an interval for a summary."""
    return {
        "estimate": float(interval.estimate[cell]),
        "low": float(interval.low[cell]),
        "high": float(interval.high[cell]),
        "flags": str(interval.flags[cell]),
    }


def concatenated(captured: Mapping[str, torch.Tensor], hooks: Sequence[str]) -> torch.Tensor:
    """Captured weights of several hook points side by side, (B, T, sum of widths) in fp64."""
    return torch.cat([captured[hook] for hook in hooks], dim=-1).double()
