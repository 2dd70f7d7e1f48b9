"""DenseFormer (arXiv 2402.02622) by stacking all states after every weighed layer and einsum.

Shapes: B batch, T position, D model width, m weighed states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plain.norms import plain_norm
from satlens.config import DenseStream, ModelConfig
from satlens.models.attention import ForwardContext, Reads
from satlens.models.block import Block, DepthStream


class PlainDenseState(NamedTuple):
    x: Tensor
    """What is read and added to, (B, T, D)."""
    states: tuple[Tensor, ...]
    """The embedding, X_1, X_2, ..., (B, T, D) each."""


class PlainDenseBlock(Block):
    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        stream, i = cfg.stream, layer + 1
        assert isinstance(stream, DenseStream)
        self.weighed = slice(i % stream.dilation, i + 1, stream.dilation)
        if i % stream.period == 0:
            weights = torch.zeros(len(range(i + 1)[self.weighed]))
            weights[-1] = 1
            self.depth_weights = nn.Parameter(weights)

    def read_attn(
        self, state: PlainDenseState, context: ForwardContext
    ) -> tuple[PlainDenseState, Reads]:
        y = plain_norm(self.ln1, state.x)
        return state, Reads(y, y, y)

    def read_mlp(
        self, state: PlainDenseState, context: ForwardContext
    ) -> tuple[PlainDenseState, Tensor]:
        return state, plain_norm(self.ln2, state.x)

    def write_attn(self, state: PlainDenseState, y: Tensor) -> PlainDenseState:
        return state._replace(x=state.x + y)

    def write_mlp(self, state: PlainDenseState, y: Tensor) -> PlainDenseState:
        x = state.x + y
        states = (*state.states, x)
        if hasattr(self, "depth_weights"):
            stacked = torch.stack(states[self.weighed])
            with torch.autocast(x.device.type, enabled=False):
                x = torch.einsum("m,mbtd->btd", self.depth_weights, stacked)
        return PlainDenseState(x, states)


class PlainDense(DepthStream):
    block = PlainDenseBlock

    @staticmethod
    def begin(x0: Tensor) -> PlainDenseState:
        return PlainDenseState(x0, (x0,))

    @staticmethod
    def finish(model: Any, state: PlainDenseState, eager: bool) -> Tensor:
        return plain_norm(model.ln_final, state.x)
