"""Norms, rotary embedding, MLP: the layers shared by every variant.

Shapes: B batch, T position, D model width, H query heads, K key/value heads, E head width,
M MLP width. Each fused autograd function computes in its forward exactly what the explicit,
hookable form computes, in the same order, so that hooking changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformer_lens.hook_points import HookPoint

from satlens.models.weights import MLPWeights


def is_hooked(*points: HookPoint) -> bool:
    """Whether any of these hook points has a forward or backward hook of any origin."""
    return any(
        p._forward_hooks or p._forward_pre_hooks or p._backward_hooks or p._backward_pre_hooks
        for p in points
    )


class ReadOnly:
    """A hook that only looks: what ``look`` returns is dropped.

    It may come and go while a cache is in use, where other hooks have to stay, and is shown tensors
    of which other hooks would get a copy: what it keeps beyond a pass it must not write to.
    """

    def __init__(self, look: Callable[..., Any]) -> None:
        self.look = look

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.look(*args, **kwargs)


def is_only_looked_at(point: HookPoint) -> bool:
    """Whether no hook of a point can change what it shows."""
    if point._forward_pre_hooks or point._backward_hooks or point._backward_pre_hooks:
        return False
    looks = {h.hook.id for h in point.fwd_hooks if isinstance(h.user_hook, ReadOnly)}
    return all(key in looks for key in point._forward_hooks)


def visit(point: HookPoint, shown: Tensor) -> tuple[Tensor, bool]:
    """What a hook point leaves of a tensor, and whether that must be used in its place.

    It must where a hook replaced or overwrote it, and where a gradient has to come back through it.
    """
    if not is_hooked(point):
        return shown, False
    version = None if shown.is_inference() else shown._version
    left = point(shown)
    overwritten = version is None or shown._version != version
    return left, left is not shown or overwritten or left.requires_grad


def isolated(point: HookPoint, x: Tensor) -> Tensor:
    """Visit a hook point with a copy, where ``x`` has other readers an in-place edit must spare."""
    return point(spared(point, x)) if is_hooked(point) else x


def spared(point: HookPoint, x: Tensor) -> Tensor:
    """What to show a hook point of ``x``, which has other readers: a copy if it may be changed.

    A tensor in a graph is copied even where hooks only look: gradients of what they see are those
    of this reader alone.
    """
    if not is_hooked(point) or (is_only_looked_at(point) and not x.requires_grad):
        return x
    return x.clone()


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype matrix products run in: autocast's inside autocast, else that of the weights."""
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def at_least_fp32(x: Tensor) -> Tensor:
    """Upcast half precision to fp32, where norms and routes are computed."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def heads_first(x: Tensor) -> Tensor:
    """(B, T, H, E) with the memory layout (B, H, T, E), which attention and mixing want.

    A tensor of its own and not a view: blocks return it.
    """
    own = torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device)
    return own.copy_(x)


# -- RMSNorm ------------------------------------------------------------------------------------


def rms_scale(x: Float[Tensor, "*rows D"], eps: float) -> Float[Tensor, "*rows 1"]:
    """sqrt(mean(x^2) + eps) over the last axis, kept: (..., D) -> (..., 1)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (norm.square() / x.shape[-1] + eps).sqrt()


def rms_backward(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, normalized: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of x (..., D) and weight (D,) given that of weight * x / scale(x), all wide.

    ``normalized`` says that what is given as x is already x / scale(x). Sums over rows and over
    the width are matrix-vector products with grad * x. Run without autocast; overwrites nothing.
    """
    width = x.shape[-1]
    product = (grad * x).reshape(-1, width)
    inverse = scale.reciprocal()
    unit = torch.ones_like(inverse) if normalized else inverse
    grad_weight = unit.reshape(-1) @ product
    inner = (product @ weight).view_as(scale) * unit.square() * inverse / width
    grad_x = (grad * weight).mul_(inverse).addcmul_(x, inner, value=-1)
    return grad_x, grad_weight


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one number a row; F.rms_norm is a slow composite on CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = at_least_fp32(x)
        scale = rms_scale(wide, eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide / scale).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad_x, grad_weight = rms_backward(
                at_least_fp32(grad).contiguous(),
                at_least_fp32(x).contiguous(),
                scale,
                at_least_fp32(weight),
            )
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps), in fp32, cast to the compute dtype.

    Args:
        width: D, the size of the last axis.
        eps: added to the mean square.
        own_weight: False for a second norm that shares another one's weight and only adds hooks.
    """

    def __init__(self, width: int, eps: float, own_weight: bool = True) -> None:
        super().__init__()
        self.eps = eps
        if own_weight:
            self.weight = nn.Parameter(torch.ones(width))
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def is_hooked(self) -> bool:
        return is_hooked(self.hook_scale, self.hook_normalized)

    def explicit(self, x: Tensor) -> Tensor:
        """The same result with every hook point visited."""
        wide = at_least_fp32(x)
        normalized = self.hook_normalized(wide / self.hook_scale(rms_scale(wide, self.eps)))
        return (normalized * self.weight).to(compute_dtype(self.weight))

    def forward(self, x: Float[Tensor, "*rows D"], eager: bool = False) -> Float[Tensor, "*rows D"]:
        """The normalised rows, times the weight."""
        if eager or self.is_hooked():
            return self.explicit(x)
        return _RMSNorm.apply(x, self.weight, self.eps, compute_dtype(self.weight))


def norm_pair(first: RMSNorm, second: RMSNorm, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise two reads with the weight of the first norm, visiting the hook points of both.

    The results are one tensor when the reads are one tensor and no hook tells them apart.
    """
    wide, wide_other = at_least_fp32(x), at_least_fp32(other)
    rms = rms_scale(wide, first.eps)
    same = other is x
    # Made before any hook runs: an in-place edit of one scale must spare the other.
    rms_other = rms.clone() if same else rms_scale(wide_other, first.eps)
    scale, edited = visit(first.hook_scale, rms)
    scale_other, edited_other = visit(second.hook_scale, rms_other)
    same = same and not edited and not edited_other
    normalized, edited = visit(first.hook_normalized, wide / scale)
    normalized_other, edited_other = visit(second.hook_normalized, wide_other / scale_other)
    same = same and not edited and not edited_other
    dtype = compute_dtype(first.weight)
    y = (normalized * first.weight).to(dtype)
    return y, y if same else (normalized_other * first.weight).to(dtype)


class HeadNorm(nn.Module):
    """RMSNorm over each head's width with one weight for all heads (qk-norm); no hook points."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "B T H E"]) -> Float[Tensor, "B T H E"]:
        """Every head's vector, normalised."""
        return _RMSNorm.apply(x, self.weight, self.eps, x.dtype)


# -- rotary position embedding -------------------------------------------------------------------


@lru_cache(maxsize=32)
def rope_table(
    length: int, width: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Coefficients of RoPE, half-split layout, computed in fp64: each (T, E).

    With x = (a, b) in halves, RoPE(x) = (cos, cos) x + (-sin, sin) (b, a).
    """
    with torch.inference_mode(False), torch.device("cpu"):
        frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return cos.to(device), sin.to(device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads precede positions in memory: the tables broadcast fast and attention wants it so."""
    by_head = x.transpose(1, 2)
    wide = torch.empty(by_head.shape, dtype=cos.dtype, device=x.device).copy_(by_head)
    half = x.shape[-1] // 2
    swapped = torch.cat((wide[..., half:], wide[..., :half]), -1)
    return wide.mul_(cos).addcmul_(swapped, sin).to(x.dtype).transpose(1, 2)


class _RoPE(torch.autograd.Function):
    """A rotation: its backward is the opposite rotation and needs no saved activation."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.table = cos, sin
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Any:
        cos, sin = ctx.table
        return _rotate(grad_q, cos, -sin), _rotate(grad_k, cos, -sin), None, None


def rope(
    q: Float[Tensor, "B T H E"],
    k: Float[Tensor, "B T K E"],
    cos: Float[Tensor, "T E"],
    sin: Float[Tensor, "T E"],
) -> tuple[Float[Tensor, "B T H E"], Float[Tensor, "B T K E"]]:
    """Rotate queries (B, T, H, E) and keys (B, T, K, E) by position, over the full head width."""
    return _RoPE.apply(q, k, cos, sin)


# -- MLP ------------------------------------------------------------------------------------------


def swiglu(gate: Float[Tensor, "B T M"], up: Float[Tensor, "B T M"]) -> Float[Tensor, "B T M"]:
    """silu(gate) * up; silu on strided rows would be twice as slow."""
    return F.silu(gate.contiguous()) * up


class _SwiGLU(torch.autograd.Function):
    """:func:`swiglu` of the two halves of the last axis; saves only its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.contiguous()).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.contiguous()
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        torch.mul(F.silu(gate), grad, out=grad_up)
        return grad_gate_up


class MLP(MLPWeights):
    """W_down(silu(W_gate y) * W_up y); a width of zero adds nothing.

    The gate and up projections are one matrix, rows in that order.
    """

    def __init__(self, d_model: int, d_mlp: int) -> None:
        super().__init__()
        self.d_mlp = d_mlp
        if d_mlp:
            self.gate_up = nn.Linear(d_model, 2 * d_mlp, bias=False)
            self.down = nn.Linear(d_mlp, d_model, bias=False)
            self.hook_pre = HookPoint()
            self.hook_pre_linear = HookPoint()
            self.hook_post = HookPoint()

    def forward(self, y: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """What the MLP adds."""
        if not self.d_mlp:
            return torch.zeros_like(y)
        gate_up = self.gate_up(y)
        if is_hooked(self.hook_pre, self.hook_pre_linear):
            gate, up = gate_up.chunk(2, dim=-1)
            product = swiglu(self.hook_pre(gate), self.hook_pre_linear(up))
        elif torch.compiler.is_compiling():  # which fuses it, and chooses what to save
            product = swiglu(*gate_up.chunk(2, dim=-1))
        else:
            product = _SwiGLU.apply(gate_up)
        return self.down(self.hook_post(product))


class Unembed(nn.Module):
    """Logits from the final norm's output; tied models pass the embedding table."""

    def __init__(self, d_model: int, d_vocab: int, tied: bool) -> None:
        super().__init__()
        if not tied:
            self.weight = nn.Parameter(torch.empty(d_vocab, d_model))

    def forward(
        self, x: Float[Tensor, "B T D"], tied_weight: Float[Tensor, "V D"]
    ) -> Float[Tensor, "B T V"]:
        """Logits in the compute dtype."""
        return F.linear(x, getattr(self, "weight", tied_weight))
