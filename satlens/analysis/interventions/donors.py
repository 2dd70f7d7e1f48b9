"""Weights of gates and routes in other documents, which resampling puts in the place of a token's.

Shapes: B batch, T position, N donors, P positions of a context, n weights of a site.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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
_COMPARED = 64
"""First tokens by which documents of one id are told apart."""


class Donors(SiteValues):
    """Weights of every site in the contexts of several documents, from :func:`fit_donors`.

    Args:
        values: hook point -> weights (N, P, n).
        valid: (N, P) bool, which of these are of real, non-special tokens.
        documents: that they are of, (N,); none leaves open which these are.

    Raises:
        AnalysisError: none is.
    """

    def __init__(
        self,
        values: Mapping[str, np.ndarray],
        valid: np.ndarray,
        documents: Sequence[DocumentTokens] = (),
    ) -> None:
        super().__init__(values)
        self.valid = valid
        if not valid.any():
            raise AnalysisError("donors: no document has a real token")
        self.order = np.argsort(~valid, axis=0, kind="stable")
        """(N, P) donors in order, those that have the position first."""
        self.rank = np.cumsum(valid, axis=0) - 1
        """(N, P) place in that order of a donor that has the position."""
        self._of: dict[str, list[tuple[int, np.ndarray]]] = {}
        for number, document in enumerate(documents):
            start = document.tokens[:_COMPARED]
            self._of.setdefault(document.id, []).append((number, start))

    def own(self, document: DocumentTokens) -> int:
        """The donor that is of a document, by its id and first tokens; -1 if none is."""
        for number, start in self._of.get(document.id, ()):
            n = min(len(start), len(document.tokens))
            if np.array_equal(start[:n], document.tokens[:n]):
                return number
        return -1

    def draw(
        self, tokens: np.ndarray, position: np.ndarray, seed: int, own: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor]:
        """The donor of each token and the position taken of it, (B, T) each.

        A draw depends on the seed, the token, its position and ``own`` alone. So it is the same
        whatever else is in the batch, in whole passes and with a cache.

        Args:
            tokens, position: (B, T).
            own: (B,) donor that no token of a row may get; -1, or None for all, where every one
                will do.

        Raises:
            AnalysisError: a row has no other donor.
        """
        own = np.full(len(tokens), -1) if own is None else own
        left_out = self.valid[own] & (own >= 0)[:, None]
        n = self.valid.sum(0) - left_out
        some = n > 0
        if not some.any(axis=1).all():
            raise AnalysisError("donors: a document is its only donor; another one is needed")
        # At a position that none has, those of the last one before it that some have.
        nearest = np.maximum.accumulate(np.where(some, np.arange(n.shape[1]), -1), axis=1)
        place = np.where(nearest < 0, some.argmax(axis=1)[:, None], nearest)
        row = np.arange(len(tokens))[:, None]
        at = place[row, np.minimum(position, n.shape[1] - 1)]
        number = (_mixed(seed, position, tokens) % n[row, at].astype(np.uint64)).astype(np.int64)
        number += left_out[row, at] & (number >= self.rank[own[:, None], at])
        return torch.from_numpy(self.order[number, at]), torch.from_numpy(at)


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

    They take n x n_ctx numbers for each weight of each site, in fp32. In an analysis's pass a token
    never gets the weights of its own document, also where the donors are the evaluated documents.
    Outside of one, as in ``model(tokens)``, nobody knows of what document tokens are: then give
    donors of other documents.

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
    documents = as_documents(data, model.tokenizer, split)
    contexts = [
        _one_context(
            document._replace(tokens=document.tokens[:max_tokens_per_document]), length, seed
        )
        for document in documents
    ]
    windows = Slice(
        contexts,
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
    # Every document has one window, so rows are documents.
    whole = {id(context): document for context, document in zip(contexts, documents, strict=True)}
    return rows.donors([whole[id(context)] for context in windows.documents])


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

    def donors(self, documents: Sequence[DocumentTokens] = ()) -> Donors:
        """Them by site; ``documents`` are those of the rows."""
        parts = np.split(self.weights, np.cumsum(list(self.widths.values()))[:-1], axis=-1)
        values = dict(zip(self.widths, parts, strict=True))
        return Donors(values, self.valid.astype(bool), documents)

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

    In an analysis's pass a donor of a token's own document is left out of the draw.

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
        documents = running.documents
        own = None if documents is None else np.array([donors.own(one) for one in documents])
        tokens, position = running.tokens.cpu().numpy(), running.position.cpu().numpy()
        return donors.draw(tokens, position, seed, own)

    donor, position = running.once(("draw", id(donors), seed), drawn)
    values = torch.from_numpy(donors[site.hook])
    return values[donor, position].to(device=like.device, dtype=like.dtype)
