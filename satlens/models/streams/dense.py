"""DenseFormer: after a layer, a static weighted sum of the states after all earlier ones.

With X_0 the embedding, X_i the state after layer i (from 1) and Y_i what the next layer receives
(arXiv 2402.02622, its depth-weighted average with dilation k and period p):

    X_i = Layer_i(Y_{i-1}),   Y_0 = X_0
    Y_i = sum_j a_ij X_j over j <= i with j = i (mod k)   where p divides i, else X_i

The weights are signed, one a pair of layers; a_ii starts at one and the others at zero, which is
the transformer.

Shapes: B batch, T position, D model width, m weighed states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from satlens.config import DenseStream, ModelConfig
from satlens.models.attention import ForwardContext, Reads
from satlens.models.block import Block, DepthStream, final_norm
from satlens.models.layers import at_least_fp32, is_hooked, isolated
from satlens.models.sites import AccessSite
from satlens.models.streams.weighted import (
    accumulate,
    cumulative_sources,
    static_sum,
    unit_components,
)


class DenseState(NamedTuple):
    x: Tensor
    """What is read and added to, (B, T, D): Y_i at a block border."""
    past: tuple[Tensor, ...]
    """The X_j that a later block weighs, ascending in j, (B, T, D) each."""


def weighed(stream: DenseStream, i: int) -> range:
    """The j whose X_j are weighed after layer i (from 1): none unless the period divides i."""
    if i % stream.period:
        return range(0)
    return range(i % stream.dilation, i + 1, stream.dilation)


def kept(cfg: ModelConfig, i: int) -> list[int]:
    """The j <= i whose X_j some later layer weighs, ascending; at first the embedding, always."""
    assert isinstance(cfg.stream, DenseStream)
    if i == 0:
        return [0]  # the stream begins without knowing the config
    later = range(i + 1, cfg.n_layers + 1)
    return sorted({j for n in later for j in weighed(cfg.stream, n) if j <= i})


class DenseBlock(Block):
    """Reads the stream as it is and adds to it; ends with the weighted sum where it has one."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        assert isinstance(cfg.stream, DenseStream)
        self.hook_attn_read, self.hook_mlp_read = HookPoint(), HookPoint()
        held = [*kept(cfg, layer), layer + 1]
        sources = weighed(cfg.stream, layer + 1)
        # Positions among the states at hand: those kept before this layer, then the newest.
        self.weighed = [held.index(j) for j in sources]
        self.kept = [held.index(j) for j in kept(cfg, layer + 1)]
        if sources:
            start = torch.zeros(len(sources))
            start[-1] = 1
            self.depth_weights = nn.Parameter(start)
            self.hook_route_depth = HookPoint()

    def read_attn(self, state: DenseState, context: ForwardContext) -> tuple[DenseState, Reads]:
        y = self.ln1(isolated(self.hook_attn_read, state.x), context.eager)
        return state, Reads(y, y, y)

    def write_attn(self, state: DenseState, y: Tensor) -> DenseState:
        return state._replace(x=state.x + y)

    def read_mlp(self, state: DenseState, context: ForwardContext) -> tuple[DenseState, Tensor]:
        return state, self.ln2(isolated(self.hook_mlp_read, state.x), context.eager)

    def write_mlp(self, state: DenseState, y: Tensor) -> DenseState:
        states = (*state.past, state.x + y)
        x = self._sum([states[i] for i in self.weighed]) if self.weighed else states[-1]
        return DenseState(x, tuple(states[i] for i in self.kept))

    def _sum(self, states: list[Tensor]) -> Tensor:
        weights = at_least_fp32(self.depth_weights)
        if is_hooked(self.hook_route_depth):
            shape = *states[0].shape[:-1], len(weights)
            weights = self.hook_route_depth(weights.expand(shape).clone())
        return static_sum(states, weights)


class Dense(DepthStream):
    """DenseFormer."""

    block = DenseBlock

    @staticmethod
    def begin(x0: Tensor) -> DenseState:
        x = at_least_fp32(x0)
        return DenseState(x, (x,))

    @staticmethod
    def finish(model: Any, state: DenseState, eager: bool) -> Tensor:
        return final_norm(model, state.x, eager)

    @staticmethod
    def sites(cfg: ModelConfig) -> list[AccessSite]:
        assert isinstance(cfg.stream, DenseStream)
        rows = [(layer, weighed(cfg.stream, layer + 1)) for layer in range(cfg.n_layers)]
        return [
            AccessSite(
                hook=f"blocks.{layer}.hook_route_depth",
                kind="route",
                layer=layer,
                sublayer="depth",
                role="shared",
                sources=cumulative_sources(states),
                support="signed",
                per_token=False,
                base="none",
            )
            for layer, states in rows
            if states
        ]

    @staticmethod
    def unfold(model: Any, recorded: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """A state is a mixture of earlier ones plus its two sublayers' outputs."""
        cfg = model.cfg
        unit = unit_components(model, recorded)
        read = unit[0]
        states = [read]
        for layer in range(cfg.n_layers):
            yield f"blocks.{layer}.hook_attn_read", read
            read = read + unit[1 + 2 * layer]
            yield f"blocks.{layer}.hook_mlp_read", read
            read = read + unit[2 + 2 * layer]
            states.append(read)
            sources = weighed(cfg.stream, layer + 1)
            if sources:
                weights = recorded[f"blocks.{layer}.hook_route_depth"].double()
                read = accumulate([states[j] for j in sources], weights.split(1, -1))
        yield "hook_out_read", read
