"""Reducers of the categories analysis: sums of site values by token category.

Shapes: B rows, T positions, C cells (gates head by head, then routes), G document groups, S strata.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.engine.accumulators import Accumulator, GroupSums, HistogramSum
from satlens.analysis.engine.coding import Coding
from satlens.analysis.engine.inputs import sites_of
from satlens.analysis.engine.stream import Observed, Transform, kept_tokens
from satlens.data.windows import Windows
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.sites import EMBEDDING, AccessSite


def with_categories(sites: Sequence[AccessSite]) -> list[AccessSite]:
    """Sites with one number a token: gates, and distributions over sources with the embedding."""
    return [
        site
        for site in sites
        if site.kind == "gate" or (site.support == "simplex" and site.sources[0] == EMBEDDING)
    ]


def category_sites(model: Decoder) -> list[AccessSite]:
    """The sites of a model that have categories.

    Raises:
        AnalysisError: it has none.
    """
    chosen = with_categories(sites_of(model, analysis="categories"))
    if not chosen:
        raise AnalysisError(
            f"categories: this model ({model.cfg.variant}) has no gates, and its routes are no "
            "distributions over sources with the embedding"
        )
    return chosen


class SiteValues:
    """One number a token at each cell: a head's gate, the embedding's weight in a route.

    Args:
        sites: gates, and routes whose first source is the embedding.
    """

    def __init__(self, sites: Sequence[AccessSite]) -> None:
        self.gates = [site.hook for site in sites if site.kind == "gate"]
        self.routes = [site.hook for site in sites if site.kind == "route"]
        self.hooks: dict[str, Transform | None] = {
            **dict.fromkeys(self.gates),
            **dict.fromkeys(self.routes, _embedding_weight),
        }
        self.n_gates = sum(site.n_heads for site in sites if site.kind == "gate")
        self.n_cells = self.n_gates + len(self.routes)

    def of(self, seen: Observed) -> tuple[Tensor, Tensor]:
        """Values (B, T, C) in fp64, zero where a token does not count, and which count (B, T).

        Reducers of the same sites share them.

        Raises:
            AnalysisError: a gate or weight that is not finite.
        """
        return seen.once((SiteValues, *self.hooks), partial(self._of, seen))

    def _of(self, seen: Observed) -> tuple[Tensor, Tensor]:
        values = torch.cat([seen.captured[hook] for hook in self.hooks], dim=-1).double()
        kept = kept_tokens(seen.batch)
        values = values.masked_fill(~kept[..., None], 0.0)
        if not values.isfinite().all():
            raise AnalysisError("categories: a gate or route weight of this model is not finite")
        return values, kept


def _embedding_weight(route: Tensor) -> Tensor:
    """(B, T, n) -> (B, T, 1): the embedding is the first source of every read."""
    return route[..., :1]


def kept_inputs(windows: Windows) -> list[np.ndarray]:
    """(n,) bool of each document: the tokens that ``kept_tokens`` keeps of its batches."""
    special = np.array(sorted(windows.special_ids), dtype=np.int64)
    kept = []
    for document in windows.documents:
        place = np.arange(len(document.tokens))
        inner = (place % windows.n_ctx != 0) & (place < len(place) - 1)
        kept.append(inner & ~np.isin(document.tokens, special))
    return kept


def digest(codes: Coding) -> str:
    """SHA-256 of a coding."""
    hashed = hashlib.sha256("\n".join(codes.names).encode())
    for array in codes.codes:
        hashed.update(np.asarray(array).astype("<i8").tobytes())
    return hashed.hexdigest()


# -- labels ----------------------------------------------------------------------------------------


class Labels(Protocol):
    """Gives every token of a batch a category."""

    @property
    def names(self) -> tuple[str, ...]:
        """What each label stands for."""
        ...

    @property
    def hooks(self) -> Mapping[str, Transform | None]:
        """Hook points that it reads."""
        ...

    @property
    def identity(self) -> Any:
        """JSON-ready content that decides the labels."""
        ...

    def of(self, seen: Observed) -> Tensor:
        """(B, T) int64, an index into ``names``."""
        ...


class CodedLabels:
    """Labels that the data alone decide."""

    def __init__(self, coding: Coding) -> None:
        self.coding, self.names = coding, coding.names
        self.hooks: dict[str, Transform | None] = {}
        self.identity = digest(coding)

    def of(self, seen: Observed) -> Tensor:
        """(B, T) int64."""
        return self.coding.of(seen.batch)


# -- sums ------------------------------------------------------------------------------------------


class ContrastSums:
    """Two categories by frequency and position band: sums, counts and histograms.

    ``sums["total"]`` (G, 2 S, C) and ``sums["n"]`` (G, 2 S).
    """

    def __init__(self, n_groups: int, n_strata: int, n_cells: int) -> None:
        self.n_strata = n_strata
        shapes = {"total": (2 * n_strata, n_cells), "n": (2 * n_strata,)}
        self.sums = GroupSums(n_groups, shapes)
        self.values = (HistogramSum((n_cells,)), HistogramSum((n_cells,)))

    def add(
        self, groups: np.ndarray, values: Tensor, side: Tensor, strata: Tensor, kept: Tensor
    ) -> None:
        """Add a batch: values (B, T, C); side (B, T) 0, 1 or -1 for neither."""
        chosen = kept & (side >= 0)
        code = side.clamp_min(0) * self.n_strata + strata
        hot = one_hot(code, chosen, 2 * self.n_strata)
        self.sums.add(groups, total=hot.mT @ values, n=hot.sum(1))
        for index, histogram in enumerate(self.values):
            histogram.add(values[chosen & (side == index)])


class Codings(NamedTuple):
    """What is known of tokens beside their category."""

    subword: Coding
    """First subword of a word, continuation, or no word."""
    strata: Coding
    """Frequency band by position band."""


class CategorySums:
    """Sums of the values of each cell by category, and what the contrast needs.

    Args:
        by: name of the breakdown.
        labels: the categories of the breakdown.
        contrast: names of the two categories to compare; None, or a name that is no category,
            compares none.
    """

    needs_nll = False

    def __init__(
        self,
        sites: Sequence[AccessSite],
        n_groups: int,
        by: str,
        labels: Labels,
        codings: Codings,
        contrast: tuple[str, str] | None,
    ) -> None:
        self.by, self.labels, self.codings = by, labels, codings
        self.values = SiteValues(sites)
        self.hooks: dict[str, Transform | None] = {**self.values.hooks, **labels.hooks}
        self.pair = _pair(labels.names, contrast)
        n_names, n_cells = len(labels.names), self.values.n_cells
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("total", "open"), (n_names, n_cells))
        shapes |= dict.fromkeys(("n", "first", "continuation"), (n_names,))
        self.sums = GroupSums(n_groups, shapes)
        strata = len(codings.strata.names)
        self.contrast = None if self.pair is None else ContrastSums(n_groups, strata, n_cells)
        accumulators: dict[str, Accumulator] = {"sums": self.sums}
        if self.contrast is not None:
            accumulators["contrast"] = self.contrast.sums
            for index, histogram in enumerate(self.contrast.values):
                accumulators[f"values{index}"] = histogram
        self.accumulators: Mapping[str, Accumulator] = accumulators
        self.identity: dict[str, Any] = {
            "reducer": "categories",
            "hooks": list(self.hooks),
            "labels": labels.identity,
            "codes": [digest(coding) for coding in codings],
            "pair": self.pair,
            "groups": n_groups,
        }

    @property
    def has_both(self) -> bool:
        """Whether both sides of the contrast have tokens."""
        return self.pair is not None and bool((self.sums["n"].sum(axis=0)[self.pair] > 0).all())

    def update(self, seen: Observed) -> None:
        """Add one batch.

        Raises:
            AnalysisError: a gate or weight that is not finite.
        """
        values, kept = self.values.of(seen)
        code = self.labels.of(seen)
        subword = self.codings.subword.of(seen.batch)
        hot = one_hot(code, kept, len(self.labels.names))
        self.sums.add(
            seen.groups,
            total=hot.mT @ values,
            open=hot.mT @ (values != 0).double(),
            n=hot.sum(1),
            first=(hot * (subword == 0)[..., None]).sum(1),
            continuation=(hot * (subword == 1)[..., None]).sum(1),
        )
        if self.contrast is not None and self.pair is not None:
            side = torch.full_like(code, -1)
            side = side.masked_fill(code == self.pair[0], 0).masked_fill(code == self.pair[1], 1)
            strata = self.codings.strata.of(seen.batch)
            self.contrast.add(seen.groups, values, side, strata, kept)


def _pair(names: Sequence[str], contrast: tuple[str, str] | None) -> list[int] | None:
    if contrast is None or not set(contrast) <= set(names):
        return None
    return [names.index(name) for name in contrast]


def one_hot(code: Tensor, chosen: Tensor, n: int) -> Tensor:
    """(B, T, n) fp64: 1 at the code of each chosen token."""
    out = torch.zeros(*code.shape, n, dtype=torch.float64, device=code.device)
    return out.scatter_(2, code[..., None], chosen[..., None].double())
