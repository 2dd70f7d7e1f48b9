"""Signed weighted sums over depth: the arithmetic of DenseFormer and MUDDFormer.

Shapes: n sources, B batch, T position, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from satlens.models.sites import EMBEDDING, Source


def cumulative_sources(states: Iterable[int]) -> tuple[Source, ...]:
    """Typed sources X_j: the embedding is X_0, X_j the state after layer j (from 1)."""
    return tuple(Source(kind="cumulative", last=2 * j - 1) if j else EMBEDDING for j in states)


def unit_components(model: Any, recorded: Mapping[str, Tensor]) -> Tensor:
    """Each component's coefficients in itself, (M, 1, 1, M) with M = 1 + 2 L, in float64.

    On the device of what was recorded, which need not be the model's.
    """
    like = next(iter(recorded.values()), None)
    device = model.device if like is None else like.device
    return torch.eye(1 + 2 * model.cfg.n_layers, dtype=torch.float64, device=device)[:, None, None]


def accumulate(sources: Sequence[Tensor], weights: Iterable[Tensor]) -> Tensor:
    """sum_j weights[j] sources[j], in this order; each weight broadcasts to its source."""
    (first, weight), *others = zip(sources, weights, strict=True)
    total = first * weight
    for source, weight in others:
        total = torch.addcmul(total, source, weight)
    return total


class StaticSum(torch.autograd.Function):
    """sum_j weights[j] sources[j] for weights (n,); saves its inputs only."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *sources)
        total = sources[0] * weights[0]
        for source, weight in zip(sources[1:], weights[1:], strict=True):
            total.addcmul_(source, weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        weights, *sources = ctx.saved_tensors
        flat = grad.reshape(-1)
        grad_weights = torch.stack([torch.dot(flat, s.reshape(-1)) for s in sources])
        return grad_weights, *(grad * weight for weight in weights)


def static_sum(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """sum_j weights[..., j] sources[j]; weights (n,), or (B, T, n) where a hook saw them."""
    if weights.ndim == 1:
        return StaticSum.apply(weights, *sources)
    return accumulate(sources, weights.movedim(-1, 0)[..., None])
