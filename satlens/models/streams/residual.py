"""The ordinary residual stream: x, x + attention, x + attention + MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from satlens.config import ModelConfig
from satlens.models.attention import ForwardContext, Reads
from satlens.models.block import Block, DepthStream, final_norm
from satlens.models.layers import isolated


class ResidualState(NamedTuple):
    x: Tensor
    """The residual stream, (B, T, D)."""


class ResidualBlock(Block):
    """Reads the stream as it is and adds to it."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        self.hook_resid_pre, self.hook_resid_mid = HookPoint(), HookPoint()
        self.hook_resid_post = HookPoint()
        self.hook_attn_read, self.hook_mlp_read = HookPoint(), HookPoint()

    def read_attn(
        self, state: ResidualState, context: ForwardContext
    ) -> tuple[ResidualState, Reads]:
        x = self.hook_resid_pre(state.x)
        y = self.ln1(isolated(self.hook_attn_read, x), context.eager)
        return ResidualState(x), Reads(y, y, y)

    def write_attn(self, state: ResidualState, y: Tensor) -> ResidualState:
        return ResidualState(self.hook_resid_mid(state.x + y))

    def read_mlp(
        self, state: ResidualState, context: ForwardContext
    ) -> tuple[ResidualState, Tensor]:
        return state, self.ln2(isolated(self.hook_mlp_read, state.x), context.eager)

    def write_mlp(self, state: ResidualState, y: Tensor) -> ResidualState:
        return ResidualState(self.hook_resid_post(state.x + y))


class Residual(DepthStream):
    block = ResidualBlock

    @staticmethod
    def begin(x0: Tensor) -> ResidualState:
        return ResidualState(x0)

    @staticmethod
    def finish(model: Any, state: ResidualState, eager: bool) -> Tensor:
        return final_norm(model, state.x, eager)

    @staticmethod
    def unfold(model: Any, recorded: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        total = 1 + 2 * model.cfg.n_layers
        ones = torch.ones(total, total, dtype=torch.float64, device=model.device)
        ones = ones.tril()[:, None, None]
        for layer in range(model.cfg.n_layers):
            yield f"blocks.{layer}.hook_attn_read", ones[2 * layer]
            yield f"blocks.{layer}.hook_mlp_read", ones[2 * layer + 1]
        yield "hook_out_read", ones[-1]
