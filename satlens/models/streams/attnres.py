"""Attention Residuals and their role-decoupled form: reads are softmax mixtures over depth.

Sources of a read at sublayer s: the completed block sums (the embedding alone is the first), then
the running sum of the current block, last. At each sublayer: read; if s is a multiple of the block
size, the running sum joins the completed ones and becomes absent; run; add the output to the
running sum (arXiv 2603.15031). RD-AttnRes (arXiv 2608.01075) splits only the attention read: one
query for queries and keys, one for values, over the same normalised sources.

Shapes: B batch, T position, D model width, n sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from satlens.config import AttnResStream, DeltaStream, ModelConfig, RoleDecoupledStream
from satlens.models.attention import ForwardContext, Reads
from satlens.models.block import Block, DepthStream, ReadPoints, final_norm
from satlens.models.layers import (
    RMSNorm,
    at_least_fp32,
    compute_dtype,
    is_hooked,
    isolated,
    norm_pair,
    rms_scale,
    spared,
    visit,
)
from satlens.models.sites import AccessSite
from satlens.models.streams.block_sites import BlockSumStream, route_sites, unfolded
from satlens.models.streams.mixing import FusedRead, mix, route_weights


class AttnResState(NamedTuple):
    bank: tuple[Tensor, ...]
    """Completed block sums, (B, T, D) each; the embedding first."""
    scales: tuple[Tensor, ...]
    """Their root mean squares, (B, T, 1) each, without gradient."""
    partial: Tensor | None
    """Running sum of the current block; None when it is absent."""

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return self.bank if self.partial is None else (*self.bank, self.partial)

    def total(self) -> Tensor:
        """Sum of all sources, (B, T, D): the ordinary residual stream."""
        return reduce(torch.add, self.sources)

    def add(self, y: Tensor) -> AttnResState:
        """A sublayer's output joins the running sum."""
        partial = at_least_fp32(y) if self.partial is None else self.partial + y
        return self._replace(partial=partial)


class DepthRead(nn.Module):
    """Weights of one read: a query a role (zero at the start), gamma, optional bias.

    ``base`` is added to every weight in the mixture: 0, or 1 where the mixture is added to the
    residual stream, which is the sum of all sources. Roles share gamma, unless values have their
    own by option.
    """

    def __init__(self, cfg: ModelConfig, sublayer: int, two_roles: bool = False) -> None:
        super().__init__()
        stream = cfg.stream
        assert isinstance(stream, BlockSumStream)
        additive = isinstance(stream, DeltaStream)
        n = n_sources(sublayer, stream.block_size)
        self.base = int(additive)
        self.eps = cfg.norm_eps
        self.query = nn.Parameter(torch.zeros(cfg.d_model))
        self.query_v = nn.Parameter(torch.zeros(cfg.d_model)) if two_roles else None
        self.gamma = nn.Parameter(torch.ones(cfg.d_model))
        own_gamma = two_roles and isinstance(stream, RoleDecoupledStream) and stream.own_value_gamma
        self.gamma_v = nn.Parameter(torch.ones(cfg.d_model)) if own_gamma else None
        has_bias = not additive and stream.route_bias
        self.bias = nn.Parameter(torch.zeros(1 + two_roles, n)) if has_bias else None

    def explicit_weights(self, state: AttnResState, roles: int = 1) -> Tensor:
        """Weights of the first R roles, (n, B, T, R), with the graph intact."""
        sources = state.sources
        if torch.is_grad_enabled():
            scales = tuple(rms_scale(s, self.eps) for s in sources)
        else:
            scales = source_scales(state, self.eps)
        # Fewer sources than biases: the logit lens, whose blocks above are still to come.
        n = len(sources)
        bias = None if self.bias is None else at_least_fp32(self.bias[:roles, :n])
        return route_weights(sources, *self._queries(roles), scales, bias)

    def fused(
        self, state: AttnResState, scales: tuple[Tensor, ...], norm: RMSNorm, roles: int = 1
    ) -> tuple[Tensor, ...]:
        """Normalised mixtures, one a role, without visiting hook points."""
        weight, dtype = at_least_fp32(norm.weight), compute_dtype(norm.weight)
        return FusedRead.apply(
            *self._queries(roles), weight, self.base, norm.eps, dtype, scales, *state.sources
        )

    def mixture(self, state: AttnResState, weights: Tensor, edited: bool) -> Tensor:
        """(B, T, D); a single source is read as it is unless its weight was edited."""
        sources = state.sources
        if len(sources) == 1 and not edited and not self.base:
            return sources[0]
        return mix(sources, weights + self.base if self.base else weights)

    def hooked_mixture(self, state: AttnResState, weights: Tensor, points: ReadPoints) -> Tensor:
        """Mixture of one role, its hook points visited: weights (n, B, T, 1) -> (B, T, D)."""
        return isolated(points.read, self.mixture(state, *visit_route(points.route, weights)))

    def _queries(self, roles: int) -> tuple[Tensor, Tensor]:
        """Queries (R, D) of the first R roles and the gamma (D,) they share.

        Only their products matter: gammas of their own are multiplied into the queries.
        """
        gamma = at_least_fp32(self.gamma)
        if roles == 1 or self.query_v is None:
            return at_least_fp32(self.query)[None], gamma
        queries = at_least_fp32(torch.stack((self.query, self.query_v)))
        if self.gamma_v is None:
            return queries, gamma
        return queries * torch.stack((gamma, at_least_fp32(self.gamma_v))), torch.ones_like(gamma)


def n_sources(sublayer: int, block_size: int) -> int:
    """Sources of the read at a sublayer (2L is the output read): ceil(s / S) + 1."""
    return -(-sublayer // block_size) + 1


def visit_route(point: HookPoint, weights: Tensor) -> tuple[Tensor, bool]:
    """Show a route (n, B, T, 1) to its hook point as (B, T, n); the weights left, and if edited."""
    left, edited = visit(point, weights[..., 0].movedim(0, -1))
    return (left.movedim(-1, 0)[..., None], True) if edited else (weights, False)


def close_block(
    state: AttnResState, sublayer: int, block_size: int, scale: Tensor | None
) -> AttnResState:
    """Before sublayer s runs: at a multiple of the block size the running sum is completed."""
    if sublayer % block_size:
        return state
    assert state.partial is not None and scale is not None
    return AttnResState((*state.bank, state.partial), (*state.scales, scale), None)


class DepthReadingBlock(Block):
    """What streams over block sums share: the MLP read, the write-back, block closing."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        assert isinstance(cfg.stream, BlockSumStream)
        self.block_size = cfg.stream.block_size
        self.two_roles = isinstance(cfg.stream, RoleDecoupledStream)
        self.attn_read = DepthRead(cfg, 2 * layer, self.two_roles)
        self.mlp_read = DepthRead(cfg, 2 * layer + 1)
        self.hook_route_mlp, self.hook_mlp_read = HookPoint(), HookPoint()

    def read_mlp(self, state: AttnResState, context: ForwardContext) -> tuple[AttnResState, Tensor]:
        points = ReadPoints(self.hook_route_mlp, self.hook_mlp_read)
        scales = source_scales(state, self.mlp_read.eps)
        y = shared_read(self.mlp_read, state, scales, self.ln2, points, context.eager)
        return close_block(state, 2 * self.layer + 1, self.block_size, scales[-1]), y

    def write_attn(self, state: AttnResState, y: Tensor) -> AttnResState:
        return state.add(y)

    def write_mlp(self, state: AttnResState, y: Tensor) -> AttnResState:
        return state.add(y)


def source_scales(state: AttnResState, eps: float) -> tuple[Tensor, ...]:
    """Root mean squares of all sources; only the running sum's is new."""
    if state.partial is None:
        return state.scales
    with torch.no_grad():
        return (*state.scales, rms_scale(state.partial, eps))


def shared_read(
    read: DepthRead,
    state: AttnResState,
    scales: tuple[Tensor, ...],
    norm: RMSNorm,
    points: ReadPoints,
    eager: bool,
) -> Tensor:
    """A read that feeds a whole sublayer: normalised, (B, T, D)."""
    if _must_be_explicit(read, norm, points, eager=eager):
        return norm(read.hooked_mixture(state, read.explicit_weights(state), points), eager)
    if len(state.sources) == 1 and not read.base:
        return norm(state.sources[0])
    return read.fused(state, scales, norm)[0]


def _must_be_explicit(read: DepthRead, norm: RMSNorm, *points: ReadPoints, eager: bool) -> bool:
    return (
        eager
        or read.bias is not None
        or norm.is_hooked()
        or any(is_hooked(p.route, p.read) for p in points)
    )


class AttnResBlock(DepthReadingBlock):
    """Both sublayers read one mixture each."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        self.hook_route_attn, self.hook_attn_read = HookPoint(), HookPoint()

    def read_attn(self, state: AttnResState, context: ForwardContext) -> tuple[AttnResState, Reads]:
        points = ReadPoints(self.hook_route_attn, self.hook_attn_read)
        scales = source_scales(state, self.attn_read.eps)
        y = shared_read(self.attn_read, state, scales, self.ln1, points, context.eager)
        state = close_block(state, 2 * self.layer, self.block_size, scales[-1])
        return state, Reads(y, y, y)


class RoleDecoupledBlock(DepthReadingBlock):
    """The attention read splits: one route for queries and keys, one for values.

    ``ln1`` normalises both mixtures with one weight; ``ln1_v`` carries the hook points of the
    values' side. Under a control the hook points show what each sublayer receives.
    """

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        assert isinstance(cfg.stream, RoleDecoupledStream)
        self.control = cfg.stream.control
        self.hook_route_qk, self.hook_route_v = HookPoint(), HookPoint()
        self.hook_attn_read_qk, self.hook_attn_read_v = HookPoint(), HookPoint()
        self.ln1_v = RMSNorm(cfg.d_model, cfg.norm_eps, own_weight=False)

    def read_attn(self, state: AttnResState, context: ForwardContext) -> tuple[AttnResState, Reads]:
        read = self.attn_read
        scales = source_scales(state, read.eps)
        qk = ReadPoints(self.hook_route_qk, self.hook_attn_read_qk)
        v = ReadPoints(self.hook_route_v, self.hook_attn_read_v)
        explicit = self.ln1_v.is_hooked() or _must_be_explicit(
            read, self.ln1, qk, v, eager=context.eager
        )
        if explicit or self.control in ("average", "frozen_v"):
            reads = self._explicit_reads(state, qk, v)
        elif len(state.sources) == 1:
            y = self.ln1(state.sources[0])
            reads = Reads(y, y, y)
        elif self.control == "tied":
            (y,) = read.fused(state, scales, self.ln1)
            reads = Reads(y, y, y)
        else:
            y_qk, y_v = read.fused(state, scales, self.ln1, roles=2)
            reads = Reads(y_qk, y_qk, y_v)
        return close_block(state, 2 * self.layer, self.block_size, scales[-1]), reads

    def _role_weights(self, state: AttnResState) -> tuple[Tensor, Tensor]:
        """Weights that queries and keys, and that values are read by, (n, B, T, 1) each."""
        qk, v = self._controlled_weights(state)
        return (v, qk) if self.swapped_roles else (qk, v)

    def _controlled_weights(self, state: AttnResState) -> tuple[Tensor, Tensor]:
        """Weights of the qk and the v route under the control."""
        if self.control == "tied":
            tied = self.attn_read.explicit_weights(state)
            return tied, tied
        qk, v = self.attn_read.explicit_weights(state, roles=2).split(1, -1)
        match self.control:
            case "average":
                mean = (qk + v) / 2
                return mean, mean
            case "frozen_v":
                return qk, torch.full_like(v, 1 / len(v))
            case _:
                return qk, v

    def _explicit_reads(self, state: AttnResState, qk: ReadPoints, v: ReadPoints) -> Reads:
        """One mixture serves both roles until a route or a hook tells them apart."""
        weights_qk, weights_v = self._role_weights(state)
        same = weights_v is weights_qk or len(state.sources) == 1
        if same and is_hooked(qk.route, v.route):
            weights_v = weights_v.clone()
        weights_qk, edited_qk = visit_route(qk.route, weights_qk)
        weights_v, edited_v = visit_route(v.route, weights_v)
        raw_qk = self.attn_read.mixture(state, weights_qk, edited_qk)
        same = same and not edited_qk and not edited_v
        raw_v = raw_qk if same else self.attn_read.mixture(state, weights_v, edited_v)
        mixture_qk, edited_qk = self._visit_read(qk.read, raw_qk)
        mixture_v, edited_v = self._visit_read(v.read, raw_v)
        if same and not edited_qk and not edited_v:
            mixture_qk = mixture_v = raw_qk
        y_qk, y_v = norm_pair(self.ln1, self.ln1_v, mixture_qk, mixture_v)
        return Reads(y_qk, y_qk, y_v)

    @staticmethod
    def _visit_read(point: HookPoint, mixture: Tensor) -> tuple[Tensor, bool]:
        return visit(point, spared(point, mixture))


class AttnRes(DepthStream):
    """Full (block size 1) and Block Attention Residuals."""

    block = AttnResBlock

    @staticmethod
    def begin(x0: Tensor) -> AttnResState:
        return AttnResState((), (), at_least_fp32(x0))

    @staticmethod
    def output_read(cfg: ModelConfig) -> DepthRead | None:
        assert isinstance(cfg.stream, AttnResStream | RoleDecoupledStream)
        return DepthRead(cfg, 2 * cfg.n_layers) if cfg.stream.output_read else None

    @staticmethod
    def finish(model: Any, state: AttnResState, eager: bool) -> Tensor:
        if model.out_read is None:
            return final_norm(model, state.total(), eager)
        points = ReadPoints(model.hook_route_out, model.hook_out_read)
        scales = source_scales(state, model.out_read.eps)
        return shared_read(model.out_read, state, scales, model.ln_final, points, eager)

    @staticmethod
    def sites(cfg: ModelConfig) -> list[AccessSite]:
        return route_sites(cfg, ("shared",))

    @staticmethod
    def unfold(model: Any, recorded: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return unfolded(model.cfg, model.stream.sites(model.cfg), recorded)


class RoleDecoupled(AttnRes):
    """RD-AttnRes and its controls."""

    block = RoleDecoupledBlock

    @staticmethod
    def sites(cfg: ModelConfig) -> list[AccessSite]:
        return route_sites(cfg, ("qk", "v"))
