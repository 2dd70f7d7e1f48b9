"""Pairs of routes that can be compared, and what a pass adds up about how far they differ.

Over **sources**: two roles of one read, or one site of two checkpoints, whose weights run over the
same sources. Over **sublayers**: any two reads, by what each component brings, zero where a
component does not exist yet. Signed weights and components are compared by |w_j| ||X_j||.

Shapes: B rows, T positions, t positions at once, P pairs, n weights of a route, C those of all
pairs side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.depth.effective import Unfolder
from satlens.analysis.engine.accumulators import Accumulator, GroupSums
from satlens.analysis.engine.inputs import sites_of
from satlens.analysis.engine.rectified import rectified, rectified_points
from satlens.analysis.engine.rows import (
    Ownership,
    as_rows,
    over_positions,
    some_positions,
    summed,
    times_log,
)
from satlens.analysis.engine.stream import Observed, Transform, kept_tokens
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.reads import Read, reads_of
from satlens.models.sites import AccessSite

Over = Literal["sources", "sublayers"]
OVER: tuple[Over, ...] = ("sources", "sublayers")


class Pair(NamedTuple):
    """Two routes and what to call them."""

    first: AccessSite | Read
    second: AccessSite | Read
    site: str
    """Of the first; the read where both belong to one."""
    comparison: str
    """What is compared, the same for every layer: ``attn qk|v``."""
    n_weights: int
    """Sources of each, or the components of the larger read."""
    rectified: bool
    """Compared by norms, not by weights alone."""

    @property
    def roles(self) -> str:
        """The roles compared: ``qk|v``, or one that both have."""
        return _either(self.first.role, self.second.role)

    @property
    def sublayers(self) -> str:
        """Where the routes lead: ``attn``, or ``attn|mlp``."""
        return _either(self.first.sublayer, self.second.sublayer)


def _either(first: str, second: str) -> str:
    return "|".join(dict.fromkeys((first, second)))


# -- over sources ----------------------------------------------------------------------------------


def pairs_over_sources(model: Decoder, other: Decoder | None) -> list[Pair]:
    """Roles of one read, or the same site of two checkpoints.

    Raises:
        AnalysisError: no two routes over the same sources; checkpoints of different shapes.
    """
    sites = sites_of(model, kind="route", analysis="divergence")
    if other is not None:
        places = {(s.hook, s.sources): s for s in other.sites if s.kind == "route"}
        theirs = {(s.hook, s.sources): s for s in sites}
        if places.keys() != theirs.keys():
            raise AnalysisError("divergence: other: its routes differ in place or sources")
        _require_same_shape(model, other)
        return [_of_sites(site, places[site.hook, site.sources]) for site in sites]
    pairs = [
        _of_sites(first, second)
        for index, first in enumerate(sites)
        for second in sites[index + 1 :]
        if (first.layer, first.sublayer, first.sources)
        == (second.layer, second.sublayer, second.sources)
    ]
    if not pairs:
        raise AnalysisError(
            f"divergence: no read of this model ({model.cfg.variant}) has two routes over the "
            "same sources; give a second checkpoint as other, or compare over sublayers"
        )
    return pairs


def _of_sites(first: AccessSite, second: AccessSite) -> Pair:
    same = first.role == second.role
    return Pair(
        first,
        second,
        site=first.name if same else f"L{first.layer}.{first.sublayer}",
        comparison=f"{first.sublayer} {_either(first.role, second.role)}",
        n_weights=len(first.sources),
        rectified="signed" in (first.support, second.support),
    )


def _require_same_shape(model: Decoder, other: Decoder) -> None:
    if (model.cfg.d_vocab, model.cfg.n_ctx) != (other.cfg.d_vocab, other.cfg.n_ctx):
        raise AnalysisError("divergence: other: its d_vocab or n_ctx differs")


# -- over sublayers --------------------------------------------------------------------------------


def pairs_over_sublayers(model: Decoder, other: Decoder | None) -> list[Pair]:
    """Reads of one layer and of consecutive layers, or the same read of two checkpoints.

    Raises:
        AnalysisError: checkpoints of different depths or shapes.
    """
    n_layers = model.cfg.n_layers
    reads = reads_of(model.hook_dict, n_layers)
    if other is not None:
        if other.cfg.n_layers != n_layers:
            raise AnalysisError("divergence: other: its n_layers differs")
        _require_same_shape(model, other)
        return [
            _of_reads(first, second, _name(first, second))
            for first in reads
            for second in reads_of(other.hook_dict, n_layers)
            if (first.layer, first.sublayer) == (second.layer, second.sublayer)
            and (first.role == second.role or "shared" in (first.role, second.role))
        ]
    pairs = []
    for index, first in enumerate(reads):
        for second in reads[index + 1 :]:
            if second.layer == first.layer:
                pairs.append(_of_reads(first, second, _name(first, second)))
            elif second.layer == first.layer + 1 and (first.sublayer, first.role) == (
                second.sublayer,
                second.role,
            ):
                pairs.append(_of_reads(first, second, f"{_name(first, first)}, next layer"))
    return pairs


def _name(first: Read, second: Read) -> str:
    names = [
        read.sublayer if read.role == "shared" else f"{read.sublayer} {read.role}"
        for read in (first, second)
    ]
    return _either(*names)


def _of_reads(first: Read, second: Read, comparison: str) -> Pair:
    return Pair(
        first,
        second,
        site=first.name,
        comparison=comparison,
        n_weights=max(first.n_components, second.n_components),
        rectified=True,
    )


# -- what is compared ------------------------------------------------------------------------------


class Measure(Protocol):
    """Turns what a pass captured into non-negative weights of routes."""

    @property
    def hooks(self) -> Mapping[str, Transform | None]:
        """Hook points that it reads, each with what to keep of its tensor."""
        ...

    def parts(self, shape: Sequence[int], n_more: int) -> Iterator[slice]:
        """Positions of (B, T) some at a time; ``n_more`` numbers a token are made elsewhere."""
        ...

    def of(self, seen: Observed, at: slice) -> dict[str, Tensor]:
        """Hook point of each site or read -> (n, B, t) of some positions, float64."""
        ...


class SourceWeights:
    """Weights over sources, by norms where they are signed."""

    def __init__(self, model: Decoder, sites: Sequence[AccessSite]) -> None:
        self.model = model
        self.sites = list(dict.fromkeys(sites))
        self.signed = [site for site in self.sites if site.support == "signed"]
        points = rectified_points(model, self.signed) if self.signed else []
        self.hooks: Mapping[str, Transform | None] = dict.fromkeys(
            [*(site.hook for site in self.sites), *points]
        )

    def parts(self, shape: Sequence[int], n_more: int) -> Iterator[slice]:
        return some_positions(shape, n_more)

    def of(self, seen: Observed, at: slice) -> dict[str, Tensor]:
        by_norm = rectified(self.model, seen, self.signed, at) if self.signed else {}
        every = {site.hook: seen.captured[site.hook][:, at] for site in self.sites} | by_norm
        rows = as_rows([*every.values()]).split([len(site.sources) for site in self.sites])
        return {
            hook: weights.abs() if hook in by_norm else weights
            for hook, weights in zip(every, rows, strict=True)
        }


class ComponentSizes:
    """What each component brings to a read, ||c_m delta_m||, zero above the read."""

    def __init__(self, model: Decoder) -> None:
        self.unfolder = Unfolder(model)
        self.hooks: Mapping[str, Transform | None] = self.unfolder.hooks

    def parts(self, shape: Sequence[int], n_more: int) -> Iterator[slice]:
        return self.unfolder.parts(shape, n_more)

    def of(self, seen: Observed, at: slice) -> dict[str, Tensor]:
        reads, width = self.unfolder.reads, len(self.unfolder.components)
        _, sizes = self.unfolder.unfold(seen.captured, at)
        by_read = sizes.split([read.n_components for read in reads])
        return {
            read.hook: torch.cat([size, size.new_zeros(width - len(size), *size.shape[1:])])
            for read, size in zip(reads, by_read, strict=True)
        }


# -- the sums --------------------------------------------------------------------------------------


class RoutePairs:
    """Divergences of pairs of routes and the sums of both, where both are distributions.

    Args:
        pairs: what is compared.
        first: of the model that the pass runs.
        second: of the other model; ``first`` where there is none.
        widths: weights of each pair.
        n_groups: document groups.
    """

    needs_nll = False

    def __init__(
        self,
        pairs: Sequence[Pair],
        first: Measure,
        second: Measure,
        widths: Sequence[int],
        n_groups: int,
    ) -> None:
        self.measures = first, second
        self.first = [pair.first.hook for pair in pairs]
        self.second = [pair.second.hook for pair in pairs]
        self.hooks: Mapping[str, Transform | None] = first.hooks
        self.site_of = np.repeat(np.arange(len(pairs)), widths)
        self._ownership = Ownership(self.site_of)
        shapes: dict[str, tuple[int, ...]] = {
            name: (len(pairs),) for name in ("n", "undefined", "js")
        }
        shapes |= {name: (len(self.site_of),) for name in ("first", "second")}
        self.sums = GroupSums(n_groups, shapes)
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums}
        self.identity: dict[str, Any] = {
            "reducer": "route pairs",
            "measure": type(first).__name__,
            "hooks": [self.first, self.second],
            "groups": n_groups,
        }

    def update(self, seen: Observed) -> None:
        """Add one batch of one model."""
        self.compare(seen, seen)

    def compare(self, seen: Observed, theirs: Observed) -> None:
        """Add one batch: the first routes of ``seen``, the second ones of ``theirs``."""
        kept = kept_tokens(seen.batch)
        parts = self.measures[0].parts(kept.shape, 10 * len(self.site_of))
        terms = (self._terms(seen, theirs, at, kept[:, at]) for at in parts)
        self.sums.add(seen.groups, **summed(terms))

    def _terms(
        self, seen: Observed, theirs: Observed, at: slice, kept: Tensor
    ) -> dict[str, Tensor]:
        """Sums over some positions, (B, P) or (B, C)."""
        mine = self.measures[0].of(seen, at)
        other = mine if theirs is seen else self.measures[1].of(theirs, at)
        p = torch.cat([mine[hook] for hook in self.first])
        q = torch.cat([other[hook] for hook in self.second])
        of_pair = self._ownership
        totals = [of_pair.total(r) for r in (p, q)]
        defined = torch.ones_like(totals[0], dtype=torch.bool)
        for r, total in zip((p, q), totals, strict=True):
            defined &= (total > 0) & total.isfinite() & ~of_pair.any_negative(r)
        counted = defined & kept
        p, q = (of_pair.shares(r, t, counted) for r, t in zip((p, q), totals, strict=True))
        js = of_pair.total(_divergence_terms(p, q)).clamp(0.0, math.log(2))
        return {
            "n": over_positions(counted),
            "undefined": over_positions(kept & ~defined),
            "js": over_positions(js),
            "first": over_positions(p),
            "second": over_positions(q),
        }


def _divergence_terms(p: Tensor, q: Tensor) -> Tensor:
    """What each weight adds to the divergence in nats; 0 where neither route has any."""
    middle = ((p + q) / 2).clamp_min(torch.finfo(torch.float64).tiny)
    return (times_log(p, p / middle) + times_log(q, q / middle)).mul_(0.5)
