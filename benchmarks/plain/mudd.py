"""MUDDFormer (arXiv 2502.12170) by norming, stacking and einsum.

Shapes: B batch, T position, D model width, C ways, n states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plain.norms import plain_norm
from satlens.config import ModelConfig, MuddStream
from satlens.models.attention import ForwardContext, Reads
from satlens.models.block import Block, DepthStream
from satlens.models.streams.mudd import DepthRead


class PlainDepthRead(DepthRead):
    """X^c = sum_j w_cj X_j, w = W_2 gelu(W_1 norm(X_i)) + A."""

    def forward(self, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The C mixtures, (B, T, D) each, in fp32 as satlens computes them."""
        with torch.autocast(states[0].device.type, enabled=False):
            return self._mixtures(states)

    def _mixtures(self, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        newest, width = states[-1], states[-1].shape[-1:]
        hidden = F.gelu(self.w1(F.rms_norm(newest, width, eps=self.eps)))
        weights = self.w2(hidden).unflatten(-1, self.static.shape) + self.static
        if not self.pre_post_norm:
            return torch.einsum("btcn,nbtd->cbtd", weights, torch.stack(states)).unbind()
        normed = [F.rms_norm(s, width, w, self.eps) for s, w in zip(states, self.pre, strict=True)]
        mixtures = torch.einsum("btcn,nbtd->cbtd", weights, torch.stack(normed))
        pairs = zip(mixtures, self.post, strict=True)
        return tuple(newest + F.rms_norm(m, width, w, self.eps) for m, w in pairs)


class PlainMuddState(NamedTuple):
    states: tuple[Tensor, ...]
    """The embedding, X_1, X_2, ..., (B, T, D) each."""
    x: Tensor
    """The sum inside a layer, (B, T, D)."""


class PlainMuddBlock(Block):
    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        stream = cfg.stream
        assert isinstance(stream, MuddStream)
        shared = layer == 0 and stream.shared_first_norm
        self.names = ("ln1",) * 3 if shared else ("ln1_q", "ln1_k", "ln1_v")
        super().__init__(cfg, layer, tuple(dict.fromkeys(self.names)))
        if layer:
            self.depth_read = PlainDepthRead(cfg, layer + 1, 4)

    def read_attn(
        self, state: PlainMuddState, context: ForwardContext
    ) -> tuple[PlainMuddState, Reads]:
        *reads, r = self.depth_read(state.states) if self.layer else state.states * 4
        norms = [getattr(self, name) for name in self.names]
        return state._replace(x=r), Reads(*map(plain_norm, norms, reads))

    def read_mlp(
        self, state: PlainMuddState, context: ForwardContext
    ) -> tuple[PlainMuddState, Tensor]:
        return state, plain_norm(self.ln2, state.x)

    def write_attn(self, state: PlainMuddState, y: Tensor) -> PlainMuddState:
        return state._replace(x=state.x + y)

    def write_mlp(self, state: PlainMuddState, y: Tensor) -> PlainMuddState:
        x = state.x + y
        return PlainMuddState((*state.states, x), x)


class PlainMudd(DepthStream):
    block = PlainMuddBlock

    @staticmethod
    def begin(x0: Tensor) -> PlainMuddState:
        return PlainMuddState((x0,), x0)

    @staticmethod
    def output_read(cfg: ModelConfig) -> PlainDepthRead:
        return PlainDepthRead(cfg, cfg.n_layers + 1, 1)

    @staticmethod
    def finish(model: Any, state: PlainMuddState, eager: bool) -> Tensor:
        return plain_norm(model.ln_final, *model.out_read(state.states))
