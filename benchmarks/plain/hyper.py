"""Hyper-Connections as the paper writes them: normed streams, two products, one einsum.

Streams are (B, T, n, D) here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plain.norms import plain_norm
from satlens.models.attention import ForwardContext, Reads
from satlens.models.layers import RMSNorm, at_least_fp32
from satlens.models.streams.hyper import Hyper, HyperBlock, HyperConnection, HyperState


def matrices(hc: HyperConnection, streams: Tensor) -> tuple[Tensor, Tensor]:
    """A (B, T, n, n + 1) and b (B, T, n); without B and T where they are static."""
    if not hc.dynamic:
        return hc.static_alpha, hc.static_beta
    normed = hc.norm(streams)
    alpha, beta = normed @ hc.dynamic_alpha, normed @ hc.dynamic_beta
    if hc.tanh:
        alpha, beta = alpha.tanh(), beta.tanh()
    return hc.static_alpha + hc.alpha_scale * alpha, hc.static_beta + hc.beta_scale * beta


def read(hc: HyperConnection, streams: Tensor, norm: RMSNorm) -> tuple[HyperState, Tensor]:
    """The new streams without the sublayer's output, and what it reads, normalised."""
    with torch.autocast(streams.device.type, enabled=False):
        alpha, beta = matrices(hc, streams)
        mixed = torch.einsum("...nm,...nd->...md", alpha, streams)
    y = plain_norm(norm, mixed[..., 0, :])
    return HyperState(mixed[..., 1:, :], beta), y


def write(state: HyperState, y: Tensor) -> HyperState:
    """b (outer) y joins the new streams."""
    assert state.beta is not None
    return HyperState(state.streams + state.beta[..., None] * at_least_fp32(y)[..., None, :])


class PlainHyperBlock(HyperBlock):
    def read_attn(self, state: HyperState, context: ForwardContext) -> tuple[HyperState, Reads]:
        streams = state.streams.expand(-1, -1, self.attn_hc.n, -1)
        state, y = read(self.attn_hc, streams, self.ln1)
        return state, Reads(y, y, y)

    def write_attn(self, state: HyperState, y: Tensor) -> HyperState:
        return write(state, y)

    def read_mlp(self, state: HyperState, context: ForwardContext) -> tuple[HyperState, Tensor]:
        return read(self.mlp_hc, state.streams, self.ln2)

    def write_mlp(self, state: HyperState, y: Tensor) -> HyperState:
        return write(state, y)


class PlainHyper(Hyper):
    block = PlainHyperBlock

    @staticmethod
    def begin(x0: Tensor) -> HyperState:
        return HyperState(at_least_fp32(x0)[..., None, :])

    @staticmethod
    def finish(model: Any, state: HyperState, eager: bool) -> Tensor:
        return plain_norm(model.ln_final, state.streams.sum(-2))
