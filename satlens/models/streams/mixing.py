"""Softmax mixing over depth: the arithmetic of Attention Residuals, explicit and fused.

For one token, sources s_i (D,), a query w and a read-norm weight gamma (arXiv 2603.15031):

    e_i = w . (gamma * s_i / rms(s_i)),   a = softmax(e),   h = sum_i a_i s_i

Normed sources are never formed: e_i = (s_i . (w gamma)) / rms(s_i). Several routes (roles) over
the same sources share one pass over them. The fused read also applies the sublayer's norm; what
it saves beyond the sources, which exist anyway, is the normalised mixture in the compute dtype.

Shapes: n sources, R routes, B batch, T position, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from satlens.models.layers import at_least_fp32, rms_backward, rms_scale


def route_weights(
    sources: Sequence[Float[Tensor, "B T D"]],
    queries: Float[Tensor, "R D"],
    gamma: Float[Tensor, " D"],
    scales: tuple[Float[Tensor, "B T 1"], ...],
    bias: Float[Tensor, "R n"] | None = None,
) -> Float[Tensor, "n B T R"]:
    """Route weights of every role, summing to one over n.

    Args:
        sources: n tensors (B, T, D).
        queries: (R, D), one query a role.
        gamma: (D,) weight of the read norm.
        scales: n tensors (B, T, 1), the root mean squares of the sources.
        bias: optional (R, n) added to the logits.
    """
    with torch.autocast(queries.device.type, enabled=False):
        logits = _products(sources, queries * gamma) / torch.stack(scales)
        if bias is not None:
            logits = logits + bias.t()[:, None, None]
        return logits.softmax(0)


def _products(sources: Sequence[Tensor], directions: Tensor) -> Tensor:
    """s_i . direction_r: (n, B, T, R). Run without autocast."""
    return torch.stack([s @ directions.t() for s in sources])


def mix(
    sources: Sequence[Float[Tensor, "B T D"]], weights: Float[Tensor, "n B T 1"]
) -> Float[Tensor, "B T D"]:
    """sum_i weights[i] s_i."""
    mixture = sources[0] * weights[0]
    for source, weight in zip(sources[1:], weights[1:], strict=True):
        mixture.addcmul_(source, weight)
    return mixture


class FusedRead(torch.autograd.Function):
    """Routes, mixtures and the sublayer's norm in one step, one output a role.

    Inputs: queries (R, D), gamma (D,), norm weight (D,), a base added to every weight (0 or 1),
    norm eps, output dtype, n source scales (B, T, 1) without gradient, n sources (B, T, D).
    Returns R tensors (B, T, D).
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        gamma: Tensor,
        norm_weight: Tensor,
        base: int,
        norm_eps: float,
        dtype: torch.dtype,
        scales: tuple[Tensor, ...],
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(queries.device.type, enabled=False):
            products = _products(sources, queries * gamma)
        stacked_scales = torch.stack(scales)
        weights = (products / stacked_scales).softmax(0)
        mixtures = _mix_roles(sources, weights + base if base else weights)
        norm_scales = rms_scale(mixtures, norm_eps)
        normalized = mixtures.div_(norm_scales)
        small = (queries, gamma, norm_weight, norm_scales, stacked_scales, products, weights)
        ctx.base = base
        ctx.save_for_backward(normalized.to(dtype, copy=True), *small, *sources)
        return normalized.mul_(norm_weight).to(dtype).unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        normalized, queries, gamma, norm_weight, norm_scales, *rest = ctx.saved_tensors
        scales, products, weights, *sources = rest
        with torch.autocast(queries.device.type, enabled=False):
            grad = at_least_fp32(grads[0][None] if len(grads) == 1 else torch.stack(grads))
            grad_mixtures, grad_norm = rms_backward(
                grad, at_least_fp32(normalized), norm_scales, norm_weight, normalized=True
            )
            grad_queries, grad_gamma, grad_sources = _route_backward(
                grad_mixtures, queries, gamma, ctx.base, scales, products, weights, sources
            )
        return (grad_queries, grad_gamma, grad_norm, *[None] * 4, *grad_sources)


def _mix_roles(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """The mixture of every role, (R, B, T, D), from one pass over the sources."""
    by_role = weights.movedim(-1, 1)[..., None]
    mixtures = sources[0] * by_role[0]
    for source, weight in zip(sources[1:], by_role[1:], strict=True):
        mixtures.addcmul_(source, weight)
    return mixtures


def _route_backward(
    grad_mixtures: Tensor,
    queries: Tensor,
    gamma: Tensor,
    base: int,
    scales: Tensor,
    products: Tensor,
    weights: Tensor,
    sources: Sequence[Tensor],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of queries, gamma and sources given those of the mixtures (R, B, T, D).

    A source is reached through its mixtures, through its product with the query and through its
    scale: d e_i / d s_i = (w gamma - e_i s_i / (D rms_i)) / rms_i.
    """
    width = queries.shape[1]
    direction = queries * gamma
    grad_weights = torch.stack([torch.linalg.vecdot(grad_mixtures, s) for s in sources])
    grad_weights = grad_weights.movedim(1, -1)
    grad_logits = weights * (grad_weights - (weights * grad_weights).sum(0, keepdim=True))
    grad_products = grad_logits / scales
    shrink = (grad_products * products).sum(-1, keepdim=True) / (scales.square() * width)
    rows = grad_products.flatten(1, 2)
    # Indexing inside the loop would cost as much as a pass over a small source.
    mixture_of_role = grad_mixtures.unbind()
    taken = weights + base if base else weights
    weights_of_role = [w.unbind() for w in taken.split(1, -1)]
    grad_direction = torch.zeros_like(direction)
    grad_sources = []
    for i, (source, part, own) in enumerate(zip(sources, rows, shrink, strict=True)):
        grad_source = mixture_of_role[0] * weights_of_role[0][i]
        for mixture, weight in zip(mixture_of_role[1:], weights_of_role[1:], strict=True):
            grad_source.addcmul_(mixture, weight[i])
        grad_source.addcmul_(source, own, value=-1)
        grad_source.view(-1, width).addmm_(part, direction)
        grad_direction.addmm_(part.t(), source.reshape(-1, width))
        grad_sources.append(grad_source)
    return grad_direction * gamma, (grad_direction * queries).sum(0), grad_sources
