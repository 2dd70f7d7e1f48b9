"""Hyper-Connections: n parallel streams, mixed by small matrices at every sublayer.

Sublayer s with streams H (n, D) of one token (arXiv 2409.19606):

    A = S_A + s_a tanh(Norm(H) W_A)    (n, n + 1), S_A = [e_{s mod n} | I] at the start
    b = S_b + s_b tanh(Norm(H) w_b)    (n,),       S_b = 1 at the start
    M = A^T H,  the sublayer reads M[0],  y is its output,  H <- M[1:] + b (outer) y

The embedding starts every stream; their sum feeds the final norm.

Shapes: B batch, T position, n streams, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from satlens.config import HyperStream, ModelConfig
from satlens.models.attention import ForwardContext, Reads
from satlens.models.block import Block, DepthStream, ReadPoints, final_norm
from satlens.models.layers import RMSNorm, at_least_fp32, compute_dtype, is_hooked, visit
from satlens.models.reads import component_hooks
from satlens.models.sites import AccessSite, Source
from satlens.models.streams.hyper_mixing import (
    AddOutput,
    Dynamic,
    FusedDynamicRead,
    FusedStaticRead,
    combine,
    connection_weights,
    norm_scale,
    normed_products,
)

RMS_EPS = 2.0**-23
"""fp32's machine epsilon, in every precision."""
LAYER_EPS = 1e-5


class HyperState(NamedTuple):
    streams: Tensor
    """The n streams, (n, B, T, D); (1, B, T, D), the embedding, before layer 0. While a sublayer
    runs, what they become without its output."""
    beta: Tensor | None = None
    """While a sublayer runs: b, (n, B, T) or (n,)."""

    def write(self, y: Tensor) -> HyperState:
        """A sublayer's output joins the streams."""
        assert self.beta is not None
        return HyperState(AddOutput.apply(self.streams, self.beta, y))


class HyperConnection(nn.Module):
    """The matrices A and b of one sublayer.

    Args:
        cfg: the model.
        sublayer: s, its number; it starts by reading stream s mod n.
    """

    def __init__(self, cfg: ModelConfig, sublayer: int) -> None:
        super().__init__()
        stream = cfg.stream
        assert isinstance(stream, HyperStream)
        n, width = stream.n_streams, cfg.d_model
        self.n, self.dynamic, self.tanh = n, stream.dynamic, stream.tanh
        identity = torch.eye(n)
        self.static_alpha = nn.Parameter(torch.cat((identity[:, [sublayer % n]], identity), 1))
        self.static_beta = nn.Parameter(torch.ones(n))
        if stream.dynamic:
            self.dynamic_alpha = nn.Parameter(torch.zeros(width, n + 1))
            self.dynamic_beta = nn.Parameter(torch.zeros(width))
            self.alpha_scale = nn.Parameter(torch.full((1,), 0.01))
            self.beta_scale = nn.Parameter(torch.full((1,), 0.01))
            self.norm = (
                nn.RMSNorm(width, RMS_EPS)
                if stream.norm == "rms"
                else nn.LayerNorm(width, LAYER_EPS)
            )
        self.hook_alpha, self.hook_beta = HookPoint(), HookPoint()

    def static(self) -> Tensor:
        """[S_A | S_b], columns outermost, (C, n)."""
        return at_least_fp32(torch.cat((self.static_alpha.t(), self.static_beta[None])))

    def dynamic_part(self) -> Dynamic:
        """What is added to the static part, as functions of this module's parameters."""
        n = len(self.static_beta)
        weights = at_least_fp32(torch.cat((self.dynamic_alpha.t(), self.dynamic_beta[None])))
        directions = weights * at_least_fp32(self.norm.weight)
        scales = at_least_fp32(torch.cat((self.alpha_scale.expand(n + 1), self.beta_scale)))
        offset = None
        if isinstance(self.norm, nn.LayerNorm):
            # Centred directions spare centring the streams.
            directions = directions - directions.mean(1, keepdim=True)
            with torch.autocast(weights.device.type, enabled=False):
                offset = weights @ at_least_fp32(self.norm.bias)
        assert self.norm.eps is not None
        return Dynamic(directions, offset, scales, self.norm.eps, self.tanh)

    def weights(self, streams: Tensor) -> Tensor:
        """[A | b], columns outermost: (C, n, B, T), or (C, n) where it is static."""
        if not self.dynamic:
            return self.static()
        dynamic = self.dynamic_part()
        products = normed_products(streams, norm_scale(streams, dynamic), dynamic)
        return connection_weights(products, self.static(), dynamic)

    def read(
        self, streams: Tensor, norm: RMSNorm, points: ReadPoints, eager: bool
    ) -> tuple[HyperState, Tensor]:
        """The state while the sublayer runs, and what it reads, normalised (B, T, D)."""
        hooked = norm.is_hooked() or is_hooked(self.hook_alpha, self.hook_beta, *points)
        return (self._explicit if eager or hooked else self._fused)(streams, norm, points)

    def _fused(
        self, streams: Tensor, norm: RMSNorm, points: ReadPoints
    ) -> tuple[HyperState, Tensor]:
        weight, dtype = at_least_fp32(norm.weight), compute_dtype(norm.weight)
        if not self.dynamic:
            static = self.static()
            y, new = FusedStaticRead.apply(streams, static[:-1], weight, norm.eps, dtype)
            return HyperState(new, static[-1]), y
        dynamic = self.dynamic_part()
        y, new, beta = FusedDynamicRead.apply(
            streams, self.static(), *dynamic, weight, norm.eps, dtype
        )
        return HyperState(new, beta), y

    def _explicit(
        self, streams: Tensor, norm: RMSNorm, points: ReadPoints
    ) -> tuple[HyperState, Tensor]:
        """The same with every hook point visited."""
        weights = self.weights(streams)
        tokens = streams.shape[1:3]
        alpha = _visit(self.hook_alpha, weights[:-1], tokens)
        beta = _visit(self.hook_beta, weights[-1], tokens)
        route = _visit(points.route, alpha[0], tokens)
        read = points.read(combine(streams, route))
        return HyperState(combine(streams, alpha[1:]), beta), norm(read, eager=True)


def _visit(point: HookPoint, weights: Tensor, tokens: torch.Size) -> Tensor:
    """Show weights (..., n, B, T), or static ones (..., n), to a hook point as (B, T, n, ...).

    Static weights that it leaves as they are stay static.
    """
    if not is_hooked(point):
        return weights
    static = weights.ndim <= 2
    every = weights[..., None, None].expand(*weights.shape, *tokens) if static else weights
    reverse = range(every.ndim - 3, -1, -1)
    shown = every.permute(-2, -1, *reverse).clone(memory_format=torch.contiguous_format)
    left, edited = visit(point, shown)
    if not edited:
        return weights
    return left.permute(*range(left.ndim - 1, 1, -1), 0, 1).contiguous()


class HyperBlock(Block):
    """Both sublayers read one mixture of the streams and write to all of them."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        self.attn_hc = HyperConnection(cfg, 2 * layer)
        self.mlp_hc = HyperConnection(cfg, 2 * layer + 1)
        self.hook_route_attn, self.hook_attn_read = HookPoint(), HookPoint()
        self.hook_route_mlp, self.hook_mlp_read = HookPoint(), HookPoint()

    def opened(self, state: HyperState) -> Tensor:
        """The n streams before the layer: copies of the embedding before layer 0."""
        if self.layer:
            return state.streams
        return state.streams.expand(self.attn_hc.n, -1, -1, -1).contiguous()

    def read_attn(self, state: HyperState, context: ForwardContext) -> tuple[HyperState, Reads]:
        points = ReadPoints(self.hook_route_attn, self.hook_attn_read)
        state, y = self.attn_hc.read(self.opened(state), self.ln1, points, context.eager)
        return state, Reads(y, y, y)

    def write_attn(self, state: HyperState, y: Tensor) -> HyperState:
        return state.write(y)

    def read_mlp(self, state: HyperState, context: ForwardContext) -> tuple[HyperState, Tensor]:
        points = ReadPoints(self.hook_route_mlp, self.hook_mlp_read)
        return self.mlp_hc.read(state.streams, self.ln2, points, context.eager)

    def write_mlp(self, state: HyperState, y: Tensor) -> HyperState:
        return state.write(y)


class Hyper(DepthStream):
    """Hyper-Connections, dynamic or static."""

    block = HyperBlock
    unfold_tolerance = 5e-5  # products of 2 L matrices, taken in fp64 from what fp32 recorded

    @staticmethod
    def begin(x0: Tensor) -> HyperState:
        return HyperState(at_least_fp32(x0)[None])

    @staticmethod
    def standing_still(cfg: ModelConfig, state: HyperState) -> HyperState:
        """Before layer 0 one embedding stands for the n equal streams."""
        assert isinstance(cfg.stream, HyperStream)
        return state._replace(streams=state.streams.expand(cfg.stream.n_streams, -1, -1, -1))

    @staticmethod
    def finish(model: Any, state: HyperState, eager: bool) -> Tensor:
        return final_norm(model, state.streams.sum(0), eager)

    @staticmethod
    def sites(cfg: ModelConfig) -> list[AccessSite]:
        assert isinstance(cfg.stream, HyperStream)
        sources = tuple(Source(kind="stream", index=i) for i in range(cfg.stream.n_streams))
        sublayers: tuple[Literal["attn", "mlp"], ...] = ("attn", "mlp")
        return [
            AccessSite(
                hook=f"blocks.{layer}.hook_route_{sublayer}",
                kind="route",
                layer=layer,
                sublayer=sublayer,
                role="shared",
                sources=sources,
                support="signed",
                per_token=cfg.stream.dynamic,
                base="none",
            )
            for layer in range(cfg.n_layers)
            for sublayer in sublayers
        ]

    @classmethod
    def unfolded_from(cls, cfg: ModelConfig) -> list[str]:
        return [name for s in _sublayers(cfg.n_layers) for name in (s.route, s.alpha, s.beta)]

    @staticmethod
    def unfold(model: Any, recorded: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """What each stream holds of each output is mixed as the streams are:
        c[k, m] = b_m (product of the A between) route_k."""
        total = 1 + 2 * model.cfg.n_layers
        held: Tensor | None = None
        for index, names in enumerate(_sublayers(model.cfg.n_layers)):
            route, alpha, beta = (_once(recorded[n].double()) for n in names[1:])
            if held is None:
                held = route.new_zeros(*route.shape, total)
                held[..., 0] = 1
            yield names.read, (route[..., None, :] @ held)[..., 0, :]
            own = torch.eye(total, dtype=held.dtype, device=held.device)[index + 1]
            held = alpha[..., 1:].mT @ held + beta[..., None] * own
        assert held is not None
        yield "hook_out_read", held.sum(-2)

    @classmethod
    def measured_from(cls, cfg: ModelConfig) -> list[str]:
        names = [name for s in _sublayers(cfg.n_layers) for name in (s.alpha, s.beta)]
        return [*component_hooks(cfg.n_layers), *names]

    @classmethod
    def source_norms(
        cls, model: Any, recorded: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The streams that a sublayer reads, made again from what was added to them."""
        n_layers = model.cfg.n_layers
        first, *outputs = (at_least_fp32(recorded[hook]) for hook in component_hooks(n_layers))
        streams = first[..., None, :].expand(*first.shape[:-1], model.cfg.stream.n_streams, -1)
        for names, y in zip(_sublayers(n_layers), outputs, strict=True):
            yield names.route, torch.linalg.vector_norm(streams, dim=-1).double()
            alpha, beta = recorded[names.alpha].to(y), recorded[names.beta].to(y)
            streams = alpha[..., 1:].mT @ streams + beta[..., None] * y[..., None, :]


class _Names(NamedTuple):
    """Hook points of one sublayer."""

    read: str
    route: str
    alpha: str
    beta: str


def _sublayers(n_layers: int) -> list[_Names]:
    """In order of execution."""
    return [
        _Names(*(f"blocks.{layer}.{part.format(kind)}" for part in _PARTS))
        for layer in range(n_layers)
        for kind in ("attn", "mlp")
    ]


_PARTS = ("hook_{}_read", "hook_route_{}", "{}_hc.hook_alpha", "{}_hc.hook_beta")


def _once(weights: Tensor) -> Tensor:
    """(B, T, ...), with B = T = 1 where every token has the same."""
    first = weights[:1, :1]
    return first if (weights == first).all() else weights
