"""Delta Attention Residuals (arXiv 2605.18855) by stacking, norming and einsum.

Shapes: B batch, T position, D model width, n sources.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plain.norms import plain_norm
from satlens.config import DeltaStream, ModelConfig
from satlens.models.attention import ForwardContext, Reads
from satlens.models.block import Block, DepthStream


class PlainDeltaState(NamedTuple):
    stream: Tensor
    """h~, the residual stream, (B, T, D)."""
    bank: tuple[Tensor, ...]
    """The embedding and completed block sums."""
    partial: Tensor | None
    """Running sum of the current block."""

    def add(self, y: Tensor) -> PlainDeltaState:
        partial = y if self.partial is None else self.partial + y
        return PlainDeltaState(self.stream + y, self.bank, partial)


class PlainDeltaRead(nn.Module):
    """h~ + sum_i a_i s_i, a = softmax(query . RMSNorm(s_i; gamma))."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.eps = cfg.norm_eps
        self.query = nn.Parameter(torch.zeros(cfg.d_model))
        self.gamma = nn.Parameter(torch.ones(cfg.d_model))

    def forward(self, state: PlainDeltaState) -> Tensor:
        late = () if state.partial is None else (state.partial,)
        sources = torch.stack((*state.bank, *late))
        keys = F.rms_norm(sources, self.gamma.shape, self.gamma, self.eps)
        weights = torch.einsum("nbtd,d->nbt", keys, self.query).softmax(0)
        return state.stream + torch.einsum("nbt,nbtd->btd", weights, sources)


class PlainDeltaBlock(Block):
    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        assert isinstance(cfg.stream, DeltaStream)
        self.block_size = cfg.stream.block_size
        self.attn_read, self.mlp_read = PlainDeltaRead(cfg), PlainDeltaRead(cfg)

    def close_block(self, state: PlainDeltaState, sublayer: int) -> PlainDeltaState:
        """The running sum joins the bank before every sublayer that a block starts with."""
        if sublayer % self.block_size or state.partial is None:
            return state
        return PlainDeltaState(state.stream, (*state.bank, state.partial), None)

    def read_attn(
        self, state: PlainDeltaState, context: ForwardContext
    ) -> tuple[PlainDeltaState, Reads]:
        y = plain_norm(self.ln1, self.attn_read(state))
        return self.close_block(state, 2 * self.layer), Reads(y, y, y)

    def read_mlp(
        self, state: PlainDeltaState, context: ForwardContext
    ) -> tuple[PlainDeltaState, Tensor]:
        y = plain_norm(self.ln2, self.mlp_read(state))
        return self.close_block(state, 2 * self.layer + 1), y

    def write_attn(self, state: PlainDeltaState, y: Tensor) -> PlainDeltaState:
        return state.add(y)

    def write_mlp(self, state: PlainDeltaState, y: Tensor) -> PlainDeltaState:
        return state.add(y)


class PlainDelta(DepthStream):
    block = PlainDeltaBlock

    @staticmethod
    def begin(x0: Tensor) -> PlainDeltaState:
        return PlainDeltaState(x0, (x0,), None)

    @staticmethod
    def finish(model: Any, state: PlainDeltaState, eager: bool) -> Tensor:
        return plain_norm(model.ln_final, state.stream)
