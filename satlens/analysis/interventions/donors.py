"""Weights of gates and routes in other documents, which resampling puts in the place of a token's.

Shapes: B batch, T position, N donors, P positions of a context, n weights of a site.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.engine.accumulators import Arrays
from satlens.analysis.engine.inputs import Slice, opened, tokenizer_of
from satlens.analysis.engine.stream import Progress, fold, observe
from satlens.analysis.interventions.means import SiteValues
from satlens.analysis.interventions.running import Running
from satlens.data.dataset import DocumentTokens
from satlens.data.tokenizers import special_ids
from satlens.data.windows import Batch, as_documents, split_taken
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.layers import at_least_fp32
from satlens.models.sites import AccessSite

N_DONORS = 64


class Donors(SiteValues):
    """Weights of every site in the contexts of several documents, from :func:`fit_donors`.

    Args:
        values: hook point -> weights (N, P, n).
        valid: (N, P) bool, which of these are of real, non-special tokens.

    Raises:
        AnalysisError: none is.
    """

    def __init__(self, values: Mapping[str, np.ndarray], valid: np.ndarray) -> None:
        super().__init__(values)
        self.valid = valid
        n = valid.sum(0)
        reached = np.flatnonzero(n)
        if not len(reached):
            raise AnalysisError("donors: no document has a real token")
        # At a position that none has, those of the last one before it that some have.
        nearest = np.searchsorted(reached, np.arange(valid.shape[1]), side="right") - 1
        self.place = reached[np.maximum(nearest, 0)]
        """(P,) position whose donors serve a position."""
        self.order = np.argsort(~valid, axis=0, kind="stable")
        """(N, P) donors in order, those that have the position first."""
        self.n = n
        """(P,) donors that have a position."""

    def draw(self, tokens: np.ndarray, position: np.ndarray, seed: int) -> tuple[Tensor, Tensor]:
        """The donor of each token and the position taken of it, of the shape of ``tokens``.

        A draw depends on the seed, the token and its position alone. So it is the same whatever
        else is in the batch, in whole passes and with a cache.
        """
        at = self.place[np.minimum(position, len(self.place) - 1)]
        number = _mixed(seed, position, tokens) % self.n[at].astype(np.uint64)
        donor = self.order[number.astype(np.int64), at]
        return torch.from_numpy(donor), torch.from_numpy(at)


def _mixed(seed: int, position: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Well mixed uint64 of a seed, positions and tokens (SplitMix64, Steele et al. 2014)."""
    start = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "little")
    mixed = np.full(tokens.shape, start, dtype=np.uint64)
    for part in (position, tokens):
        mixed = mixed + part.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


# -- fitting ---------------------------------------------------------------------------------------


def fit_donors(
    model: Decoder,
    data: Any,
    *,
    n: int = N_DONORS,
    split: str = "pool",
    seed: int = 0,
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> Donors:
    """Weights of every site in one context of each of several documents, for ResampleGate and
    ResampleRoute.

    They take n x n_ctx numbers for each weight of each site, in fp32.

    Args:
        data: any form; prepared data gives its ``split``, other sources are taken whole.
        n: documents at most.
        seed: of the contexts chosen: one of those that fill the model's context where a document
            has some, else its longest.

    Raises:
        AnalysisError: a model without access sites, ``n`` below 1.
    """
    if not model.sites:
        raise AnalysisError(f"fit_donors: this model ({model.cfg.variant}) has no access sites")
    if n < 1:
        raise AnalysisError(f"fit_donors: n: must be positive, got {n}")
    data = opened(data)
    tokenizer = tokenizer_of(model, data)
    length = model.cfg.n_ctx
    documents = [
        _one_context(
            document._replace(tokens=document.tokens[:max_tokens_per_document]), length, seed
        )
        for document in as_documents(data, model.tokenizer, split)
    ]
    windows = Slice(
        documents,
        length,
        batch_size,
        frozenset() if tokenizer is None else special_ids(tokenizer),
        d_vocab=model.cfg.d_vocab,
        max_documents=n if max_documents is None else min(n, max_documents),
        split=split_taken(data, split),
    )
    rows = _Rows(model, windows)
    fold(
        model,
        windows,
        {"rows": rows},
        rows.step_over,
        identity=["donors", list(rows.widths)],
        label="donors",
        progress=progress,
        resume_dir=resume_dir,
    )
    return rows.donors()


class _Rows:
    """Every window's weights, each in a row of its own, so that parts of a pass add up."""

    def __init__(self, model: Decoder, windows: Slice) -> None:
        self.model, self.batch_size = model, windows.batch_size
        self.widths = {
            s.hook: s.n_heads if s.kind == "gate" else len(s.sources) for s in model.sites
        }
        shape = (windows.n_windows, windows.n_ctx)
        dtype = np.float64 if model.dtype == torch.float64 else np.float32
        self.weights = np.zeros((*shape, sum(self.widths.values())), dtype=dtype)
        self.valid = np.zeros(shape, dtype=np.int8)

    def step_over(self, batch: Batch, groups: np.ndarray) -> None:
        """Add one batch."""
        seen = observe(self.model, batch, list(self.widths))
        weights = torch.cat([at_least_fp32(seen[hook]) for hook in self.widths], -1)
        start, (n, length) = batch.index * self.batch_size, batch.tokens.shape
        self.weights[start : start + n, :length] = weights.cpu().numpy()
        self.valid[start : start + n, :length] = batch.valid.cpu().numpy()

    def donors(self) -> Donors:
        """Them by site."""
        parts = np.split(self.weights, np.cumsum(list(self.widths.values()))[:-1], axis=-1)
        return Donors(dict(zip(self.widths, parts, strict=True)), self.valid.astype(bool))

    def arrays(self) -> Arrays:
        return {"weights": self.weights, "valid": self.valid}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.weights[...], self.valid[...] = arrays["weights"], arrays["valid"]

    def merge(self, other: _Rows) -> None:
        self.weights += other.weights
        self.valid += other.valid


def _one_context(document: DocumentTokens, length: int, seed: int) -> DocumentTokens:
    """A document cut to one of its windows."""
    full = (len(document.tokens) - 1) // length
    key = hashlib.sha256(f"donor:{seed}:{document.id}".encode()).digest()
    start = int.from_bytes(key[:8], "big") % full * length if full else 0
    return document._replace(tokens=document.tokens[start : start + length + 1])


# -- in the place of weights -----------------------------------------------------------------------


def resampled(
    who: str, donors: Donors, site: AccessSite, like: Tensor, running: Running, seed: int
) -> Tensor:
    """A site's weights in other documents, in place of every token's weights ``like`` (B, T, n).

    Args:
        who: the intervention, for errors.

    Raises:
        AnalysisError: the donors have nothing for the site, or another number of weights.
    """
    if site.hook not in donors or donors[site.hook].shape[-1] != like.shape[-1]:
        raise AnalysisError(
            f"{who}: donors: nothing for the {like.shape[-1]} weights of {site.hook}"
        )

    def drawn() -> tuple[Tensor, Tensor]:
        return donors.draw(running.tokens.cpu().numpy(), running.position.cpu().numpy(), seed)

    donor, position = running.once(("draw", id(donors), seed), drawn)
    values = torch.from_numpy(donors[site.hook])
    return values[donor, position].to(device=like.device, dtype=like.dtype)
