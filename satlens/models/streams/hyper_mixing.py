"""Hyper-Connections: the arithmetic of reading and writing n streams, explicit and fused.

For one token with streams H (n, D) (arXiv 2409.19606):

    [A | b] = S + s tanh(Norm(H) W),   read = A[:, 0]^T H,   H <- A[:, 1:]^T H + b (outer) y

Normed streams are never formed: Norm(H) W = (H W) / scale, with the norm's weight (and, for a layer
norm, its centring) in W. Streams come first, so that every step runs over long rows. A read also
makes the new streams without the output, A[:, 1:]^T H, so that its backward is one pass over the
old ones. The fused reads apply the sublayer's norm too; beyond the streams and the small matrices
they save the normalised mixture in the compute dtype. Fused and explicit forms do the same
operations in the same order.

Shapes: B batch, T position, n streams, C = n + 2 columns of [A | b], D model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from satlens.models.layers import at_least_fp32, rms_backward, rms_scale


class Dynamic(NamedTuple):
    """What makes [A | b] depend on the token."""

    directions: Float[Tensor, "C D"]
    """W transposed, with the norm's weight; rows that sum to zero for a layer norm."""
    offset: Float[Tensor, " C"] | None
    """What the norm's bias adds: a layer norm's; None is an RMS norm."""
    scales: Float[Tensor, " C"]
    """s of every column."""
    eps: float
    """The norm's."""
    tanh: bool


def norm_scale(streams: Float[Tensor, "n B T D"], dynamic: Dynamic) -> Float[Tensor, "n B T"]:
    """What the norm divides each stream by: its rms, or its standard deviation."""
    if dynamic.offset is not None:
        streams = streams - streams.mean(-1, keepdim=True)
    return rms_scale(streams, dynamic.eps)[..., 0]


def normed_products(
    streams: Float[Tensor, "n B T D"], scale: Float[Tensor, "n B T"], dynamic: Dynamic
) -> Float[Tensor, "C n B T"]:
    """Norm(H) W."""
    rows = streams.flatten(0, 2)
    with torch.autocast(streams.device.type, enabled=False):
        products = (dynamic.directions @ rows.t()).view(-1, *scale.shape) / scale
    return products if dynamic.offset is None else products + _column(dynamic.offset)


def connection_weights(
    products: Float[Tensor, "C n B T"], static: Float[Tensor, "C n"], dynamic: Dynamic
) -> Float[Tensor, "C n B T"]:
    """[A | b] from Norm(H) W."""
    bounded = products.tanh() if dynamic.tanh else products
    return torch.addcmul(static[..., None, None], _column(dynamic.scales), bounded)


def _column(vector: Tensor) -> Tensor:
    """(C,) -> (C, 1, 1, 1)."""
    return vector[:, None, None, None]


def combine(streams: Float[Tensor, "n B T D"], weights: Tensor) -> Float[Tensor, "*rows B T D"]:
    """sum_i weights_i H_i.

    Args:
        streams: H.
        weights: (n, B, T) for one combination or (m, n, B, T) for m; without B and T where they are
            the same for every token.
    """
    if weights.ndim == 2:
        with torch.autocast(streams.device.type, enabled=False):
            return (weights @ streams.flatten(1)).unflatten(1, streams.shape[1:])
    wide = weights[..., None] if weights.ndim > 2 else weights[..., None, None, None]
    first, *others = streams.unbind()
    weight, *more = wide.unbind(-4)
    total = first * weight
    for stream, w in zip(others, more, strict=True):
        total.addcmul_(stream, w)
    return total


# -- fused -----------------------------------------------------------------------------------------


class FusedStaticRead(torch.autograd.Function):
    """A read by static weights, and the sublayer's norm.

    Inputs: streams (n, B, T, D), A transposed (n + 1, n), norm weight (D,), norm eps, output dtype.
    Returns the normalised mixture (B, T, D) and the new streams without the output.
    """

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, alpha: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        y, *norm = _normalised(combine(streams, alpha[0]), weight, eps, dtype)
        ctx.save_for_backward(streams, alpha, weight, *norm)
        return y, combine(streams, alpha[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_new: Tensor) -> Any:
        streams, alpha, *norm = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad_mixture, grad_weight = _norm_backward(grad, *norm)
            rows = streams.flatten(1)
            grad_route, grad_mixing = rows @ grad_mixture.flatten(), grad_new.flatten(1) @ rows.t()
            grad_alpha = torch.cat((grad_route[None], grad_mixing))
            grad_streams = combine(grad_new, alpha[1:].t())
            grad_streams.addcmul_(grad_mixture, alpha[0, :, None, None, None])
        return grad_streams, grad_alpha, grad_weight, None, None


class FusedDynamicRead(torch.autograd.Function):
    """[A | b] of every token, the read, and the sublayer's norm.

    Inputs: streams (n, B, T, D), static part (C, n), the fields of :class:`Dynamic`, norm weight
    (D,), norm eps, output dtype. Returns the normalised mixture (B, T, D), the new streams without
    the output, and b (n, B, T).
    """

    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        static: Tensor,
        directions: Tensor,
        offset: Tensor | None,
        scales: Tensor,
        eps: float,
        tanh: bool,
        weight: Tensor,
        norm_eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dynamic = Dynamic(directions, offset, scales, eps, tanh)
        scale = norm_scale(streams, dynamic)
        products = normed_products(streams, scale, dynamic)
        weights = connection_weights(products, static, dynamic)
        y, *norm = _normalised(combine(streams, weights[0]), weight, norm_eps, dtype)
        kept = (streams, directions, offset, scales, scale, products, weights)
        ctx.save_for_backward(*kept, weight, *norm)
        ctx.numbers = eps, tanh
        return y, combine(streams, weights[1:-1]), weights[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_new: Tensor, grad_beta: Tensor) -> Any:
        streams, directions, offset, scales, scale, products, weights, *norm = ctx.saved_tensors
        dynamic = Dynamic(directions, offset, scales, *ctx.numbers)
        grad_new = grad_new.contiguous()
        with torch.autocast(grad.device.type, enabled=False):
            grad_mixture, grad_norm = _norm_backward(grad, *norm)
            grad_route = torch.linalg.vecdot(streams, grad_mixture)
            grad_mixing = _products(grad_new, streams)
            grad_weights = torch.cat((grad_route[None], grad_mixing, grad_beta[None]))
            small = _weights_backward(grad_weights, products, scale, dynamic)
            grad_streams = combine(grad_new, weights[1:-1].transpose(0, 1))
            grad_directions = _add_to_streams(
                grad_streams, streams, weights[0], grad_mixture, small, dynamic
            )
        grads = grad_streams, small.static, grad_directions, small.offset, small.scales
        return *grads, None, None, grad_norm, None, None


class AddOutput(torch.autograd.Function):
    """The streams after a sublayer: b (outer) y is added to the new streams.

    Inputs: streams (n, B, T, D), b (n, B, T), or (n,) where it is the same for every token, and the
    sublayer's output (B, T, D), in half precision too.
    """

    @staticmethod
    def forward(ctx: Any, streams: Tensor, beta: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(beta, y)
        wide = beta[..., None] if beta.ndim > 1 else beta[:, None, None, None]
        return torch.addcmul(streams, wide, at_least_fp32(y))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        beta, y = ctx.saved_tensors
        wide = at_least_fp32(y)
        with torch.autocast(grad.device.type, enabled=False):
            if beta.ndim > 1:
                grad_beta = torch.linalg.vecdot(grad, wide)
            else:
                grad_beta = grad.flatten(1) @ wide.flatten()
            grad_y = combine(grad, beta).to(y.dtype)
        return grad, grad_beta, grad_y


def _products(a: Float[Tensor, "m B T D"], b: Float[Tensor, "n B T D"]) -> Tensor:
    """Every a times every b, token by token: (m, n, B, T)."""
    products = torch.bmm(a.flatten(1, 2).transpose(0, 1), b.flatten(1, 2).permute(1, 2, 0))
    return products.permute(1, 2, 0).unflatten(-1, a.shape[1:3])


def _normalised(
    mixture: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of a mixture, overwritten; the same without the weight; its scale."""
    scale = rms_scale(mixture, eps)
    mixture.div_(scale)
    normalized = mixture.to(dtype, copy=True)
    return mixture.mul_(weight).to(dtype), normalized, scale


def _norm_backward(
    grad: Tensor, weight: Tensor, normalized: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the mixture and of the norm's weight."""
    return rms_backward(
        at_least_fp32(grad), at_least_fp32(normalized), scale, weight, normalized=True
    )


class _WeightsGradient(NamedTuple):
    """What a gradient of [A | b] becomes."""

    static: Tensor
    """(C, n)."""
    offset: Tensor | None
    """(C,)."""
    scales: Tensor
    """(C,)."""
    raw: Tensor
    """Of H W, (C, n, B, T)."""
    shrink: Tensor
    """How much of itself a stream loses through its scale, (n, B, T)."""


def _weights_backward(
    grad: Tensor, products: Tensor, scale: Tensor, dynamic: Dynamic
) -> _WeightsGradient:
    """Backward of :func:`connection_weights` and of all but the product in Norm(H) W.

    A stream h is reached through its products and through its scale; without the norm's weight,
    d (Norm(h) w) / d h = (w - (Norm(h) w) Norm(h) / D) / scale.
    """
    bounded = products.tanh() if dynamic.tanh else products
    of_products = grad * _column(dynamic.scales)
    if dynamic.tanh:
        of_products.mul_(1 - bounded.square())
    inner = of_products * products
    of_offset = None
    if dynamic.offset is not None:
        of_offset = of_products.sum((1, 2, 3))
        inner -= of_products * _column(dynamic.offset)
    return _WeightsGradient(
        grad.sum((2, 3)),
        of_offset,
        (grad * bounded).sum((1, 2, 3)),
        of_products / scale,
        inner.sum(0) / (scale.square() * dynamic.directions.shape[1]),
    )


def _add_to_streams(
    total: Tensor,
    streams: Tensor,
    route: Tensor,
    grad_mixture: Tensor,
    small: _WeightsGradient,
    dynamic: Dynamic,
) -> Tensor:
    """Add what reaches the streams through the read, the products and the scales to ``total``
    (n, B, T, D); the gradient of the directions.

    Stream by stream, so that each is worked on while it is in a cache.
    """
    grad_directions = torch.zeros_like(dynamic.directions)
    parts = (x.unbind() for x in (total, streams, route, small.raw.transpose(0, 1), small.shrink))
    for out, stream, weight, raw, shrink in zip(*parts, strict=True):
        rows, raw = stream.flatten(0, 1), raw.flatten(1)
        out.addcmul_(grad_mixture, weight[..., None])
        out.view(rows.shape).addmm_(raw.t(), dynamic.directions)
        out.addcmul_(stream, shrink[..., None], value=-1)
        if dynamic.offset is not None:
            out.add_((shrink * stream.mean(-1))[..., None])
        grad_directions.addmm_(raw, rows)
    return grad_directions
