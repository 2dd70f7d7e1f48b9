"""Per-token weights over depth: the arithmetic of MUDDFormer, explicit and fused.

For one token, states s_j (D,), the newest of them x, and the ways c (arXiv 2502.12170):

    w   = W_2 gelu(W_1 x / rms(x)) + A,   h_c = sum_j w[c, j] s_j

and with norms around the mixture (PrePostDANorm)

    m_c = sum_j w[c, j] pre_j * s_j / rms(s_j),   h_c = x + post_c * m_c / rms(m_c)

The fused steps save, beyond the states, which exist anyway, one normalised mixture a way in the
compute dtype and numbers of the size of the weights.

Shapes: n states, C ways of which the first R are normalised, B batch, T position, D model width,
H hidden width of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from satlens.models.layers import at_least_fp32, rms_backward, rms_scale

# -- weights --------------------------------------------------------------------------------------


def depth_weights(
    newest: Float[Tensor, "B T D"],
    static: Float[Tensor, "C n"],
    w1: Float[Tensor, "H D"],
    w2: Float[Tensor, "Cn H"],
    eps: float,
) -> tuple[Float[Tensor, "B T C n"], Float[Tensor, "B T H"], Float[Tensor, "B T 1"]]:
    """Weights of every way, and on the way there the hidden pre-activation and rms(x)."""
    with torch.autocast(newest.device.type, enabled=False):
        scale = rms_scale(newest, eps)
        hidden = F.linear(newest, w1) / scale
        dynamic = F.linear(F.gelu(hidden), w2)
        return dynamic.unflatten(-1, static.shape) + static, hidden, scale


class DepthWeights(torch.autograd.Function):
    """The weights alone: newest state, static, w1, w2, eps -> (B, T, C, n)."""

    @staticmethod
    def forward(
        ctx: Any, newest: Tensor, static: Tensor, w1: Tensor, w2: Tensor, eps: float
    ) -> Tensor:
        weights, hidden, scale = depth_weights(newest, static, w1, w2, eps)
        ctx.save_for_backward(newest, hidden, scale, w1, w2)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        newest, hidden, scale, w1, w2 = ctx.saved_tensors
        width = newest.shape[-1]
        rows, hidden, scales = grad.reshape(-1, len(w2)), hidden.flatten(0, 1), scale.view(-1, 1)
        with torch.autocast(grad.device.type, enabled=False):
            grad_hidden = torch.ops.aten.gelu_backward(rows @ w2, hidden)
            inner = (grad_hidden * hidden).sum(-1, keepdim=True)
            grad_w2 = rows.t() @ F.gelu(hidden)
            grad_product = grad_hidden.div_(scales)
            grad_w1 = grad_product.t() @ newest.reshape(-1, width)
            grad_newest = (grad_product @ w1).view_as(newest)
            shrink = (inner / (scales.square() * width)).view_as(scale)
            grad_newest.addcmul_(newest, shrink, value=-1)
        return grad_newest, grad.sum((0, 1)), grad_w1, grad_w2, None


# -- mixtures -------------------------------------------------------------------------------------


def mix_ways(
    terms: Iterable[Float[Tensor, "B T D"]], coefficients: Float[Tensor, "B T C n"]
) -> list[Float[Tensor, "B T D"]]:
    """sum_j coefficients[..., c, j] terms[j] of every way, from one pass over the terms."""
    sums: list[Tensor] = []
    for term, ways in zip(terms, _by_term(coefficients), strict=True):
        if not sums:
            sums = [term * way for way in ways]
            continue
        for total, way in zip(sums, ways, strict=True):
            total.addcmul_(term, way)
    return sums


def _by_term(coefficients: Tensor) -> list[tuple[Tensor, ...]]:
    """(B, T, C, n) -> of each term, the coefficient (B, T, 1) of each way."""
    return [ways.unsqueeze(-1).unbind(-2) for ways in coefficients.unbind(-1)]


def _mix_backward(
    grads: Sequence[Tensor], terms: Iterable[Tensor], coefficients: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the coefficients (B, T, C, n) and of the terms, given those of the sums."""
    # A product a token of all gradients with all terms: faster than their n C inner products.
    by_token = torch.stack(tuple(grads)).flatten(1, 2).transpose(0, 1)
    terms_by_token = torch.stack(tuple(terms)).flatten(1, 2).permute(1, 2, 0)
    grad_coefficients = torch.bmm(by_token, terms_by_token).view_as(coefficients)
    grad_terms = []
    for ways in _by_term(coefficients):
        total = grads[0] * ways[0]
        for grad, way in zip(grads[1:], ways[1:], strict=True):
            total.addcmul_(grad, way)
        grad_terms.append(total)
    return grad_coefficients, grad_terms


def _norm_ways(
    reads: Sequence[Tensor], norm_weights: Tensor, eps: float, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each normalised way: the output, x / scale in the output's dtype, the scale.

    Overwrites the reads.
    """
    for read, weight in zip(reads, norm_weights.unbind(), strict=False):
        scale = rms_scale(read, eps)
        normalized = read.div_(scale)
        kept = normalized.to(dtype, copy=True)
        yield normalized.mul_(weight).to(dtype), kept, scale


class FusedRead(torch.autograd.Function):
    """Mixtures and the sublayer's norms in one step.

    Inputs: weights (B, T, C, n), norm weights (R, D), norm eps, output dtype, n states (B, T, D).
    Returns R ways normalised, in the output dtype, and C - R as they are, (B, T, D) each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        norm_weights: Tensor,
        norm_eps: float,
        dtype: torch.dtype,
        *states: Tensor,
    ) -> tuple[Tensor, ...]:
        reads = mix_ways(states, weights)
        n = len(norm_weights)
        outputs, kept, scales = zip(*_norm_ways(reads, norm_weights, norm_eps, dtype), strict=True)
        ctx.save_for_backward(weights, norm_weights, *kept, *scales, *states)
        return (*outputs, *reads[n:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weights, norm_weights, *rest = ctx.saved_tensors
        n = len(norm_weights)
        kept, scales, states = rest[:n], rest[n : 2 * n], rest[2 * n :]
        grad_sums, grad_norms = list(grads), []
        with torch.autocast(weights.device.type, enabled=False):
            for i, weight in enumerate(norm_weights.unbind()):
                grad, normalized = at_least_fp32(grads[i]), at_least_fp32(kept[i])
                grad_sums[i], grad_norm = rms_backward(grad, normalized, scales[i], weight, True)
                grad_norms.append(grad_norm)
            grad_weights, grad_states = _mix_backward(grad_sums, states, weights)
        return (grad_weights, torch.stack(grad_norms), None, None, *grad_states)


class FusedPrePostRead(torch.autograd.Function):
    """The same with norms around the mixture (PrePostDANorm).

    Inputs: weights (B, T, C, n), pre (n, D), post (C, D), their eps, then as in :class:`FusedRead`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        pre: Tensor,
        post: Tensor,
        eps: float,
        norm_weights: Tensor,
        norm_eps: float,
        dtype: torch.dtype,
        *states: Tensor,
    ) -> tuple[Tensor, ...]:
        pre_scales = torch.cat([rms_scale(s, eps) for s in states], -1)
        sums = mix_ways(_scaled(states, pre), weights / pre_scales.unsqueeze(-2))
        post_scales = [rms_scale(m, eps) for m in sums]
        mixtures = [m.div_(scale) for m, scale in zip(sums, post_scales, strict=True)]
        kept = [m.to(dtype, copy=True) for m in mixtures]
        parts = zip(mixtures, post.unbind(), strict=True)
        reads = [torch.addcmul(states[-1], m, weight) for m, weight in parts]
        n = len(norm_weights)
        outputs, _, scales = zip(*_norm_ways(reads, norm_weights, norm_eps, dtype), strict=True)
        ctx.save_for_backward(
            weights, pre, post, norm_weights, pre_scales, *kept, *post_scales, *scales, *states
        )
        return (*outputs, *reads[n:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weights, pre, post, norm_weights, pre_scales, *rest = ctx.saved_tensors
        n_ways, n = len(post), len(norm_weights)
        kept, post_scales = rest[:n_ways], rest[n_ways : 2 * n_ways]
        scales, states = rest[2 * n_ways : 2 * n_ways + n], rest[2 * n_ways + n :]
        grad_newest = torch.zeros_like(states[-1])
        grad_sums, grad_posts, grad_norms = [], [], []
        with torch.autocast(weights.device.type, enabled=False):
            for i, post_weight in enumerate(post.unbind()):
                grad, mixture = at_least_fp32(grads[i]), at_least_fp32(kept[i])
                if i < n:
                    x = torch.addcmul(states[-1], mixture, post_weight).div_(scales[i])
                    grad, grad_norm = rms_backward(grad, x, scales[i], norm_weights[i], True)
                    grad_norms.append(grad_norm)
                grad_newest += grad
                grad, grad_post = rms_backward(grad, mixture, post_scales[i], post_weight, True)
                grad_sums.append(grad)
                grad_posts.append(grad_post)
            grad_weights, grad_pre, grad_states = _pre_backward(
                grad_sums, weights, pre, pre_scales, states
            )
        grad_states[-1] += grad_newest
        small = grad_pre, torch.stack(grad_posts), None, torch.stack(grad_norms)
        return (grad_weights, *small, None, None, *grad_states)


def _scaled(states: Sequence[Tensor], pre: Tensor) -> Iterator[Tensor]:
    return (state * weight for state, weight in zip(states, pre.unbind(), strict=True))


def _pre_backward(
    grad_sums: Sequence[Tensor],
    weights: Tensor,
    pre: Tensor,
    pre_scales: Tensor,
    states: Sequence[Tensor],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of weights, pre and states given those of the sums over normed states.

    A state is reached through its term pre_j s_j and through its scale.
    """
    by_way = pre_scales.unsqueeze(-2)
    coefficients = weights / by_way
    grad_coefficients, grads = _mix_backward(grad_sums, _scaled(states, pre), coefficients)
    inner = (grad_coefficients * coefficients).sum(-2) / (pre_scales.square() * pre.shape[1])
    shrink = inner.unsqueeze(-1).unbind(-2)
    grad_pre = []
    for j, (grad, state) in enumerate(zip(grads, states, strict=True)):
        grad_pre.append((grad * state).sum((0, 1)))
        grad.mul_(pre[j]).addcmul_(state, shrink[j], value=-1)
    return grad_coefficients / by_way, torch.stack(grad_pre), grads
