"""MUDDFormer: queries, keys, values and the residual each read their own mixture of all states.

With X_0 the embedding and X_i the state after layer i (from 1), layer i + 1 reads, per token and
for each way c of q, k, v, r (arXiv 2502.12170, its dynamic dense connections):

    w   = W_2 gelu(W_1 X_i / rms(X_i)) + A             (C, n) weights, n = i + 1 states
    X^c = sum_j w[c, j] X_j
    h   = attention(norm_q X^q, norm_k X^k, norm_v X^v) + X^r
    X_{i+1} = h + MLP(norm h)

and, with norms around the mixture (PrePostDANorm), X^c = X_i + post_c * m_c / rms(m_c) with
m_c = sum_j w[c, j] pre_j * X_j / rms(X_j). Layer 0 reads the embedding in every way; the final norm
reads one more mixture, r. W_2 starts at zero and A at one on the newest state (under PrePostDANorm
at zero), which is the transformer.

Shapes: B batch, T position, D model width, C ways, n states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from satlens.config import ModelConfig, MuddStream
from satlens.models.attention import ForwardContext, Reads
from satlens.models.block import Block, DepthStream, ReadPoints
from satlens.models.layers import (
    RMSNorm,
    at_least_fp32,
    compute_dtype,
    is_hooked,
    isolated,
    rms_scale,
    spared,
    visit,
)
from satlens.models.sites import AccessSite
from satlens.models.sources import source_state
from satlens.models.streams.mudd_mixing import (
    DepthWeights,
    FusedPrePostRead,
    FusedRead,
    depth_weights,
)
from satlens.models.streams.weighted import accumulate, cumulative_sources, unit_components

Way = Literal["q", "k", "v", "r"]
WAYS: tuple[Way, ...] = ("q", "k", "v", "r")
_POST_START = 1e-3


class MuddState(NamedTuple):
    sources: tuple[Tensor, ...]
    """The embedding, X_1, X_2, ..., (B, T, D) each."""
    x: Tensor | None
    """The sum inside a layer, (B, T, D); None at a block border."""

    def add(self, y: Tensor) -> MuddState:
        assert self.x is not None
        return self._replace(x=self.x + y)


class DepthRead(nn.Module):
    """Weights of one read of n states in C ways.

    Args:
        cfg: the model.
        n_sources: n.
        n_ways: C.
    """

    def __init__(self, cfg: ModelConfig, n_sources: int, n_ways: int) -> None:
        super().__init__()
        stream = cfg.stream
        assert isinstance(stream, MuddStream)
        self.eps = cfg.norm_eps
        self.pre_post_norm = stream.pre_post_norm
        hidden = stream.hidden_width(n_ways, n_sources, last=n_sources > cfg.n_layers)
        self.w1 = nn.Linear(cfg.d_model, hidden, bias=False)
        self.w2 = nn.Linear(hidden, n_ways * n_sources, bias=False)
        nn.init.zeros_(self.w2.weight)
        static = torch.zeros(n_ways, n_sources)
        if stream.pre_post_norm:
            self.pre = nn.Parameter(torch.ones(n_sources, cfg.d_model))
            self.post = nn.Parameter(torch.full((n_ways, cfg.d_model), _POST_START))
            self.hook_pre_scale, self.hook_post_scale = HookPoint(), HookPoint()
        else:
            static[:, -1] = 1
        self.static = nn.Parameter(static)

    def explicit(self, states: Sequence[Tensor], points: Sequence[ReadPoints]) -> list[Tensor]:
        """The mixture of every way, (B, T, D) each, with all hook points visited."""
        weights, _, _ = depth_weights(states[-1], *self._weight_parameters(), self.eps)
        by_way = zip(points, weights.unbind(-2), strict=True)
        routes = [isolated(point.route, w) for point, w in by_way]
        if self.pre_post_norm:
            mixtures = self._pre_post(states, routes)
        else:
            mixtures = [accumulate(states, route.split(1, -1)) for route in routes]
        return [isolated(p.read, m) for p, m in zip(points, mixtures, strict=True)]

    def fused(self, states: Sequence[Tensor], norms: Sequence[RMSNorm]) -> tuple[Tensor, ...]:
        """The first ways normalised, one a norm, then the others as they are, (B, T, D) each."""
        weights = DepthWeights.apply(states[-1], *self._weight_parameters(), self.eps)
        norm_weights = torch.stack([at_least_fp32(norm.weight) for norm in norms])
        norm = norm_weights, norms[0].eps, compute_dtype(norms[0].weight)
        if not self.pre_post_norm:
            return FusedRead.apply(weights, *norm, *states)
        pre, post = at_least_fp32(self.pre), at_least_fp32(self.post)
        return FusedPrePostRead.apply(weights, pre, post, self.eps, *norm, *states)

    def must_be_explicit(self, points: Sequence[ReadPoints], norms: Sequence[RMSNorm]) -> bool:
        """Whether something is hooked that the fused read does not visit."""
        scales = (self.hook_pre_scale, self.hook_post_scale) if self.pre_post_norm else ()
        return (
            is_hooked(*scales)
            or any(is_hooked(p.route, p.read) for p in points)
            or any(norm.is_hooked() for norm in norms)
        )

    def _weight_parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        parameters = self.static, self.w1.weight, self.w2.weight
        return tuple(at_least_fp32(p) for p in parameters)  # type: ignore[return-value]

    def _pre_post(self, sources: Sequence[Tensor], routes: Sequence[Tensor]) -> list[Tensor]:
        scales = torch.cat([rms_scale(s, self.eps) for s in sources], -1)
        scales = self.hook_pre_scale(scales)
        weighted = [s * w for s, w in zip(sources, at_least_fp32(self.pre), strict=True)]
        sums = [accumulate(weighted, (route / scales).split(1, -1)) for route in routes]
        sum_scales = torch.cat([rms_scale(m, self.eps) for m in sums], -1)
        sum_scales = self.hook_post_scale(sum_scales).split(1, -1)
        parts = zip(sums, sum_scales, at_least_fp32(self.post), strict=True)
        return [torch.addcmul(sources[-1], m / scale, weight) for m, scale, weight in parts]


class MuddBlock(Block):
    """Four reads at its attention; its MLP reads the sum of the r way and the attention."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        stream = cfg.stream
        assert isinstance(stream, MuddStream)
        shared = layer == 0 and stream.shared_first_norm
        norms = ("ln1",) if shared else ("ln1_q", "ln1_k", "ln1_v")
        super().__init__(cfg, layer, norms)
        self.norms: list[str] = [norms[0]] * 3 if shared else [*norms]
        self.has_shared_norm = shared
        if layer:
            self.depth_read = DepthRead(cfg, layer + 1, len(WAYS))
            for way in WAYS:
                setattr(self, f"hook_route_{way}", HookPoint())
        for way in WAYS:
            setattr(self, f"hook_attn_read_{way}", HookPoint())
        self.hook_mlp_read = HookPoint()

    def _points(self) -> list[ReadPoints]:
        return [
            ReadPoints(getattr(self, f"hook_route_{way}"), getattr(self, f"hook_attn_read_{way}"))
            for way in WAYS
        ]

    def read_attn(self, state: MuddState, context: ForwardContext) -> tuple[MuddState, Reads]:
        if not self.layer:
            return self._read_embedding(state, context.eager)
        points, norms = self._points(), [getattr(self, name) for name in self.norms]
        if context.eager or self.depth_read.must_be_explicit(points, norms):
            *reads, r = self.depth_read.explicit(state.sources, points)
            normed = [norm(x, context.eager) for norm, x in zip(norms, reads, strict=True)]
        else:
            *normed, r = self.depth_read.fused(state.sources, norms)
        return state._replace(x=r), Reads(*normed)

    def _read_embedding(self, state: MuddState, eager: bool) -> tuple[MuddState, Reads]:
        """Layer 0: one norm of one read serves q, k and v until a hook tells them apart."""
        (embedding,) = state.sources
        points = [getattr(self, f"hook_attn_read_{way}") for way in WAYS]
        r = isolated(points[-1], embedding)
        reads, edited = [], []
        for point in points[:-1]:
            read, changed = visit(point, spared(point, embedding))
            reads.append(read)
            edited.append(changed)
        norms = [getattr(self, name) for name in self.norms]
        if self.has_shared_norm and not any(edited):
            y = norms[0](embedding, eager)
            normed = [y, y, y]
        else:
            normed = [norm(x, eager) for norm, x in zip(norms, reads, strict=True)]
        return state._replace(x=r), Reads(*normed)

    def write_attn(self, state: MuddState, y: Tensor) -> MuddState:
        return state.add(y)

    def read_mlp(self, state: MuddState, context: ForwardContext) -> tuple[MuddState, Tensor]:
        assert state.x is not None
        return state, self.ln2(isolated(self.hook_mlp_read, state.x), context.eager)

    def write_mlp(self, state: MuddState, y: Tensor) -> MuddState:
        x = state.add(y).x
        assert x is not None
        return MuddState((*state.sources, x), None)


class Mudd(DepthStream):
    """MUDDFormer, plain and with PrePostDANorm."""

    block = MuddBlock

    @staticmethod
    def begin(x0: Tensor) -> MuddState:
        return MuddState((at_least_fp32(x0),), None)

    @staticmethod
    def output_read(cfg: ModelConfig) -> DepthRead:
        return DepthRead(cfg, cfg.n_layers + 1, 1)

    @staticmethod
    def standing_still(cfg: ModelConfig, state: MuddState) -> MuddState:
        """The newest state stands for those to come, which the output read weighs too."""
        newer = (state.sources[-1],) * (cfg.n_layers + 1 - len(state.sources))
        return state._replace(sources=(*state.sources, *newer))

    @staticmethod
    def finish(model: Any, state: MuddState, eager: bool) -> Tensor:
        points = [ReadPoints(model.hook_route_out, model.hook_out_read)]
        if eager or model.out_read.must_be_explicit(points, [model.ln_final]):
            (read,) = model.out_read.explicit(state.sources, points)
            return model.ln_final(read, eager)
        return model.out_read.fused(state.sources, [model.ln_final])[0]

    @staticmethod
    def sites(cfg: ModelConfig) -> list[AccessSite]:
        stream = cfg.stream
        assert isinstance(stream, MuddStream)

        def site(hook: str, layer: int, sublayer: Literal["attn", "out"], role: Way) -> AccessSite:
            return AccessSite(
                hook=hook,
                kind="route",
                layer=layer,
                sublayer=sublayer,
                role=role,
                sources=cumulative_sources(range(layer + 1)),
                support="signed",
                per_token=True,
                base="residual" if stream.pre_post_norm else "none",
            )

        return [
            *(
                site(f"blocks.{layer}.hook_route_{way}", layer, "attn", way)
                for layer in range(1, cfg.n_layers)
                for way in WAYS
            ),
            site("hook_route_out", cfg.n_layers, "out", "r"),
        ]

    @classmethod
    def unfolded_from(cls, cfg: ModelConfig) -> list[str]:
        names = super().unfolded_from(cfg)
        assert isinstance(cfg.stream, MuddStream)
        if cfg.stream.pre_post_norm:
            reads = [f"blocks.{layer}.depth_read" for layer in range(1, cfg.n_layers)]
            parts = ("hook_pre_scale", "hook_post_scale")
            names += [f"{read}.{part}" for read in (*reads, "out_read") for part in parts]
        return names

    @staticmethod
    def unfolds_by_channel(cfg: ModelConfig) -> bool:
        """The weights of the norms around a mixture differ between channels."""
        assert isinstance(cfg.stream, MuddStream)
        return cfg.stream.pre_post_norm

    @staticmethod
    def unfold(model: Any, recorded: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """A state is its layer's r read plus the layer's two outputs."""
        cfg = model.cfg
        unit = unit_components(model, recorded)
        if cfg.stream.pre_post_norm:
            unit = unit[..., None].expand(-1, -1, -1, -1, cfg.d_model)
        states = [unit[0]]
        for layer in range(cfg.n_layers):
            at = f"blocks.{layer}."
            reads = [states[0]] * len(WAYS)
            if layer:
                routes = [recorded[f"{at}hook_route_{way}"] for way in WAYS]
                name = f"{at}depth_read"
                reads = _unfolded(model.blocks[layer].depth_read, name, routes, states, recorded)
            for way, read in zip(WAYS, reads, strict=True):
                yield f"{at}hook_attn_read_{way}", read
            mid = reads[-1] + unit[1 + 2 * layer]
            yield f"{at}hook_mlp_read", mid
            states.append(mid + unit[2 + 2 * layer])
        routes = [recorded["hook_route_out"]]
        (read,) = _unfolded(model.out_read, "out_read", routes, states, recorded)
        yield "hook_out_read", read

    @classmethod
    def source_norms(
        cls, model: Any, recorded: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Under PrePostDANorm weights meet normed states."""
        if not model.cfg.stream.pre_post_norm:
            yield from super().source_norms(model, recorded)
            return
        n_layers = model.cfg.n_layers
        for layer in range(1, n_layers + 1):
            (site, *others) = [s for s in cls.sites(model.cfg) if s.layer == layer]
            read = model.out_read if site.sublayer == "out" else model.blocks[layer].depth_read
            norms = []
            for source, weight in zip(site.sources, read.pre.detach(), strict=True):
                state = source_state(source, recorded, n_layers)
                normed = state * weight.to(state) / rms_scale(state, read.eps)
                norms.append(torch.linalg.vector_norm(normed, dim=-1))
            for each in (site, *others):
                yield each.hook, torch.stack(norms, -1).double()


def _unfolded(
    read: DepthRead,
    name: str,
    routes: Sequence[Tensor],
    states: Sequence[Tensor],
    recorded: Mapping[str, Tensor],
) -> list[Tensor]:
    """Coefficients of each way of a read, given those of the states: (B, T, M) or (B, T, M, D)."""
    if not read.pre_post_norm:
        return [accumulate(states, route.double().split(1, -1)) for route in routes]
    pre_scales = recorded[f"{name}.hook_pre_scale"].double()
    post_scales = recorded[f"{name}.hook_post_scale"].double()
    pre, post = (p.detach().to(pre_scales) for p in (read.pre, read.post))
    normed = [state * weight for state, weight in zip(states, pre, strict=True)]
    reads = []
    for route, scale, weight in zip(routes, post_scales.split(1, -1), post, strict=True):
        by_source = (route.double() / pre_scales / scale)[..., None, None].unbind(2)
        reads.append(states[-1] + accumulate(normed, by_source) * weight)
    return reads
