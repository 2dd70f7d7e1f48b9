"""Negative log-likelihood of targets under logits.

Shapes: B rows, T positions, N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from satlens.models.layers import at_least_fp32

IGNORED = -100
CHUNK_ELEMENTS = 2**18
"""Logits treated at once on a CPU: about what its cache holds in fp32."""


def negative_log_likelihood(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"], per_token: bool
) -> Float[Tensor, " N"] | Float[Tensor, ""]:
    """-log softmax(logits)[target] in nats, computed in fp32 or better.

    Args:
        logits: (N, V) in any floating dtype.
        targets: (N,) ids, -100 where a token is not scored.
        per_token: (N,) values, 0 where not scored, instead of the mean over scored tokens.
    """
    if logits.device.type == "cpu" and not torch.compiler.is_compiling():
        return _ChunkedNLL.apply(logits, targets, per_token)
    reduction = "none" if per_token else "mean"
    return F.cross_entropy(
        at_least_fp32(logits), targets, ignore_index=IGNORED, reduction=reduction
    )


def loss_of(
    logits: Tensor,
    tokens: Tensor,
    targets: Tensor | None,
    documents: Tensor | None,
    per_token: bool,
) -> Tensor:
    """Negative log-likelihood in nats: the mean over scored positions, or each.

    Args:
        logits: (B, T, V).
        tokens: (B, T) ids.
        targets: (B, T) ids, -100 where not scored; None for the next tokens, of the same document
            and no padding.
        documents: (B, T) ids, -1 where padding; read without targets only.
        per_token: (B, T) values, (B, T - 1) without targets, instead of the mean.
    """
    if targets is None:
        targets = tokens[:, 1:]
        logits = logits[:, :-1]
        if documents is not None:
            real = documents[:, 1:] >= 0
            within = documents[:, 1:] == documents[:, :-1]
            targets = targets.masked_fill(~(real & within), IGNORED)
    flat = logits.reshape(-1, logits.shape[-1])
    loss = negative_log_likelihood(flat, targets.reshape(-1), per_token)
    return loss.view(targets.shape) if per_token else loss


class _ChunkedNLL(torch.autograd.Function):
    """Loss and gradient a few rows at a time, so that no (N, V) tensor in fp32 exists.

    The gradient of the loss, (softmax - onehot) / scored tokens, needs the softmax that the
    forward pass has at hand: it is computed there and kept in the dtype of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, per_token: bool) -> Tensor:
        scored = targets != IGNORED
        share = scored.to(at_least_fp32(logits[:0]).dtype)
        if not per_token:
            share = share / scored.sum()
        safe_targets = targets.masked_fill(~scored, 0)[:, None]
        nll = torch.empty_like(share)
        grad = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
        for start in range(0, len(logits), rows):
            chunk = slice(start, start + rows)
            wide, target = at_least_fp32(logits[chunk]), safe_targets[chunk]
            p = wide.softmax(-1)
            # The largest logit's probability gives the normaliser; it cannot underflow.
            normalizer = wide.amax(-1) - p.amax(-1).log()
            nll[chunk] = normalizer - wide.gather(-1, target)[:, 0]
            if grad is not None:
                p.scatter_add_(-1, target, p.new_full((1, 1), -1).expand_as(target))
                grad[chunk] = p.mul_(share[chunk, None])
        ctx.per_token = per_token
        ctx.save_for_backward(grad)
        nll = nll.masked_fill_(~scored, 0)
        return nll if per_token else (nll * share).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        if ctx.per_token:
            return (grad * grad_output[:, None]).to(grad.dtype), None, None
        # The usual case, a loss that is the root of the graph, needs no copy of (N, V).
        return grad if grad_output == 1 else grad * grad_output, None, None
