"""Reducers of gates and routes: what one pass adds up about the weights of access sites.

Shapes: B rows, T positions, C gate cells (site by site, head by head), S sites, n sources of all
sites side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.engine.accumulators import Accumulator, GroupSums, HistogramSum
from satlens.analysis.engine.inputs import concatenated
from satlens.analysis.engine.rows import (
    Ownership,
    as_rows,
    over_positions,
    some_positions,
    summed,
    times_log,
)
from satlens.analysis.engine.stream import Observed, Transform, kept_tokens
from satlens.models.sites import AccessSite

FAMILIES = ("embedding", "blocks", "partial", "states", "streams")
SUM_TOLERANCE = 1e-4
"""How far from 1 the weights of a distribution may add up."""
_FAMILY = {"embedding": 0, "block": 1, "partial": 2, "cumulative": 3, "stream": 4}


class GateStatistics:
    """Sparsity of gates and their share of the mixed value's norm.

    Args:
        sites: gate sites.
        n_groups: document groups.
        thresholds: count magnitudes below each of these.
    """

    needs_nll = False

    def __init__(
        self, sites: Sequence[AccessSite], n_groups: int, thresholds: Sequence[float]
    ) -> None:
        self.gates = [site.hook for site in sites]
        at = [hook.removesuffix("hook_v_gate") for hook in self.gates]
        self.own = [f"{place}hook_v" for place in at]
        self.scales = [f"{place}hook_v_scale" for place in at]
        self.n_heads = [site.n_heads for site in sites]
        self.thresholds = tuple(thresholds)
        self.hooks: dict[str, Transform | None] = {
            **dict.fromkeys((*self.gates, *self.scales), None),
            **dict.fromkeys((*self.own, "hook_v_first"), _head_norms),
        }
        cells = sum(self.n_heads)
        names = ("n", "zero", "total", "absolute", "squares", "undefined")
        first = ("first_n", "first_zero", "first_total")
        shapes: dict[str, tuple[int, ...]] = {"below": (len(self.thresholds), cells)}
        shapes |= dict.fromkeys((*names, "share_n", "share", *first), (cells,))
        self.sums = GroupSums(n_groups, shapes)
        self.values = HistogramSum((cells,))
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums, "values": self.values}
        self.identity: dict[str, Any] = {
            "reducer": "gates",
            "hooks": self.gates,
            "thresholds": self.thresholds,
            "groups": n_groups,
        }

    def update(self, seen: Observed) -> None:
        """Add one batch."""
        gate = concatenated(seen.captured, self.gates)
        kept = kept_tokens(seen.batch)
        rows = self._moments(gate, kept) | self._norm_share(seen.captured, gate, kept)
        starts = seen.batch.valid & seen.batch.first
        first = {f"first_{k}": v for k, v in _counts(gate, starts).items()}
        self.sums.add(seen.groups, **rows, **first)
        self.values.add(gate[kept])

    def _moments(self, gate: Tensor, kept: Tensor) -> dict[str, Tensor]:
        counts = _counts(gate, kept)
        finite = gate.isfinite() & kept[..., None]
        size = gate.abs().masked_fill(~finite, 0.0)
        below = [((size < limit) & finite).sum(1) for limit in self.thresholds]
        return {
            **counts,
            "absolute": size.sum(1),
            "squares": size.square().sum(1),
            "undefined": kept.sum(1)[:, None] - counts["n"],
            "below": torch.stack(below, 1)
            if below
            else size.new_zeros(len(size), 0, size.shape[2]),
        }

    def _norm_share(
        self, captured: Mapping[str, Tensor], gate: Tensor, kept: Tensor
    ) -> dict[str, Tensor]:
        """|alpha| ||V_1|| / (|alpha| ||V_1|| + |scale| ||V_n||) where it is defined."""
        first = captured["hook_v_first"].repeat(1, 1, len(self.gates)) * gate.abs()
        own = concatenated(captured, self.own) * concatenated(captured, self.scales).abs()
        whole = first + own
        defined = (whole > 0) & whole.isfinite() & kept[..., None]
        share = torch.where(defined, first / whole, 0.0)
        return {"share": share.sum(1), "share_n": defined.sum(1)}


def _head_norms(values: Tensor) -> Tensor:
    """(B, T, K, E) -> (B, T, K)."""
    return torch.linalg.vector_norm(values, dim=-1)


def _counts(gate: Tensor, chosen: Tensor) -> dict[str, Tensor]:
    """Finite values, zeros and total of the chosen tokens, (B, C) each."""
    finite = gate.isfinite() & chosen[..., None]
    return {
        "n": finite.sum(1),
        "zero": ((gate == 0) & finite).sum(1),
        "total": gate.masked_fill(~finite, 0.0).sum(1),
    }


class RouteStatistics:
    """Weights of routes: their sums and squares, entropy and effective number of sources.

    A token's weights are undefined where one is not finite, where one is negative at a site whose
    support is not signed, or where they do not add up to 1 at a simplex site. Entropy and effective
    sources exist for simplex sites alone.
    """

    needs_nll = False

    def __init__(self, sites: Sequence[AccessSite], n_groups: int) -> None:
        self.sites = list(sites)
        self.routes = [site.hook for site in sites]
        self.hooks: dict[str, Transform | None] = dict.fromkeys(self.routes)
        widths = [len(site.sources) for site in sites]
        self.site_of = np.repeat(np.arange(len(sites)), widths)
        self._ownership = Ownership(self.site_of)
        self.simplex = np.array([site.support == "simplex" for site in sites])
        self.signed = np.array([site.support == "signed" for site in sites])
        n_sites, n_sources = len(sites), sum(widths)
        per_site = ("n", "undefined", "entropy", "effective", "first_n")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(per_site, (n_sites,))
        shapes |= dict.fromkeys(("weight", "squares", "first_weight"), (n_sources,))
        self.sums = GroupSums(n_groups, shapes)
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums}
        self.identity: dict[str, Any] = {
            "reducer": "routes",
            "hooks": self.routes,
            "groups": n_groups,
        }

    def update(self, seen: Observed) -> None:
        """Add one batch."""
        kept, starts = kept_tokens(seen.batch), seen.batch.valid & seen.batch.first
        parts = some_positions(kept.shape, 8 * len(self.site_of))
        terms = (self._terms(seen, at, kept[:, at], starts[:, at]) for at in parts)
        self.sums.add(seen.groups, **summed(terms))

    def _terms(self, seen: Observed, at: slice, kept: Tensor, starts: Tensor) -> dict[str, Tensor]:
        """Sums over some positions, (B, S) or (B, n)."""
        weights = as_rows([seen.captured[hook][:, at] for hook in self.routes])
        of_site, device = self._ownership, weights.device
        signed, simplex = (
            torch.from_numpy(flags).to(device)[:, None, None]
            for flags in (self.signed, self.simplex)
        )
        total = of_site.total(weights)
        # A sum is finite where every weight is: none is as large as to overflow.
        defined = total.isfinite() & (signed | ~of_site.any_negative(weights))
        defined &= ~simplex | ((total - 1).abs() < SUM_TOLERANCE)
        counted, first = defined & kept, defined & starts
        weight = of_site.masked(weights, counted)
        positive = weight.clamp_min(0.0)
        entropy = of_site.total(times_log(positive, positive)).neg_()
        return {
            "n": over_positions(counted),
            "undefined": over_positions(kept & ~defined),
            "entropy": over_positions(entropy),
            "effective": over_positions(entropy.exp().mul_(counted)),
            "weight": over_positions(weight),
            "squares": over_positions(weight.square()),
            "first_n": over_positions(first),
            "first_weight": over_positions(of_site.masked(weights, first)),
        }


def membership(site_of: np.ndarray) -> np.ndarray:
    """(n, S) one-hot float64: which site each source column belongs to."""
    return np.eye(site_of.max() + 1)[site_of]


def family_mass(sites: Sequence[AccessSite]) -> np.ndarray:
    """(n, 5, S): weights (..., n) times this are the mass of each family of FAMILIES."""
    rows = np.zeros((sum(len(site.sources) for site in sites), len(FAMILIES), len(sites)))
    column = 0
    for index, site in enumerate(sites):
        for source in site.sources:
            rows[column, _FAMILY[source.kind], index] = 1.0
            column += 1
    return rows


def depth_distance(sites: Sequence[AccessSite]) -> np.ndarray:
    """(n, S): weights times this are the mean distance, in sublayers, from reader to source.

    A source lies at the mean index of the sublayers that it sums; the embedding at -1. NaN at sites
    whose weights are no distribution or whose sources are mixtures themselves, which have no depth.
    """
    rows = np.zeros((sum(len(site.sources) for site in sites), len(sites)))
    column = 0
    for index, site in enumerate(sites):
        reader = 2 * site.layer + (site.sublayer == "mlp")
        mixed = site.support != "simplex" or not all(s.sublayers for s in site.sources)
        for source in site.sources:
            rows[column, index] = np.nan if mixed else reader - np.mean(source.sublayers)
            column += 1
    return rows


class SiteMeans:
    """Mean weights over all real tokens: what mean interventions put in place of a weight."""

    needs_nll = False

    def __init__(self, sites: Sequence[AccessSite]) -> None:
        self.sites = list(sites)
        self.names = [site.hook for site in sites]
        self.hooks: dict[str, Transform | None] = dict.fromkeys(self.names)
        self.widths = [s.n_heads if s.kind == "gate" else len(s.sources) for s in sites]
        self.sums = GroupSums(1, {"n": (), "total": (sum(self.widths),)})
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums}
        self.identity: dict[str, Any] = {"reducer": "means", "hooks": self.names}

    def update(self, seen: Observed) -> None:
        """Add one batch."""
        weights = concatenated(seen.captured, self.names)
        valid = seen.batch.valid
        total = weights.masked_fill(~valid[..., None], 0.0).sum(1)
        self.sums.add(np.zeros(len(seen.groups), dtype=np.int64), n=valid.sum(1), total=total)

    def means(self) -> dict[str, np.ndarray]:
        """Hook point -> (K,) of a gate or (n,) of a route, float64."""
        mean = self.sums["total"][0] / self.sums["n"][0]
        return dict(zip(self.names, np.split(mean, np.cumsum(self.widths)[:-1]), strict=True))
