"""Causal self-attention with grouped KV heads, value residuals and four exact implementations.

Shapes: B batch, T position, S key position (T after those of a cache), D model width, H query
heads, K KV heads, E head width, G = H / K.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from satlens.config import ModelConfig
from satlens.errors import ConfigError
from satlens.models.blocked import blocked_attention
from satlens.models.cache import KVCache
from satlens.models.flex import flex, supports
from satlens.models.layers import HeadNorm, is_hooked, isolated, rope
from satlens.models.values import GatedValues, StaticValues, add_gated, make_values
from satlens.models.weights import AttentionWeights

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Implementation = Literal["auto", "eager", "fused", "flex"]
_implementation: ContextVar[Implementation] = ContextVar("satlens_attention", default="auto")

# Above this length the (T, T) pattern costs more than it saves on any CPU.
LONGEST_EXPLICIT = 1024


@contextmanager
def attention(implementation: Implementation) -> Iterator[None]:
    """Choose how attention is computed inside the context.

    eager: scores and pattern exist as tensors and every hook point of the model is visited, also
    those that a fused step would skip; fused: torch's scaled_dot_product_attention, given the mask
    as a tensor; flex: where documents or a window mask anything, torch's FlexAttention, which needs
    no such tensor and skips what is not seen; auto (the default): the fastest for the device, dtype
    and length. Clean and intervened passes of one comparison must use the same.

    flex is fused wherever its kernel is not certain to exist: it needs bf16 or fp16 on an NVIDIA
    GPU from Ampere on, heads of width 16, 32, 64 or 128, a length that is a multiple of 128, no
    cache and no hooks on scores or patterns. auto takes it there for passes that record gradients:
    kernels are compiled for each shape, of which training has few and an analysis many.

    Raises:
        ConfigError: another name.
    """
    if implementation not in get_args(Implementation):
        raise ConfigError(f"attention: must be auto, eager, fused or flex, got {implementation!r}")
    token = _implementation.set(implementation)
    try:
        yield
    finally:
        _implementation.reset(token)


def chosen_attention() -> Implementation:
    """The implementation asked for by the innermost :func:`attention` context."""
    return _implementation.get()


class Reads(NamedTuple):
    """What an attention sublayer receives, normalised; q is k is v where they are shared."""

    q: Tensor
    k: Tensor
    v: Tensor


class ForwardContext(NamedTuple):
    """What every block of one forward pass shares."""

    cos: Tensor
    sin: Tensor
    allowed: Tensor | None
    """(B or 1, T, S) bool: which keys a query sees; None means all earlier ones."""
    bias: Tensor | None
    """The same as an additive (B K or 1, G T, S) in the compute dtype, when scores are explicit."""
    implementation: Implementation
    shared_lambda: Tensor | None
    """(L - 1,) lambda1 of ResFormer's learnable_plus."""
    past: KVCache | None = None
    """Earlier positions, which each layer reads and appends to."""
    blocks: BlockMask | None = None
    """What is seen as FlexAttention takes it, in place of ``allowed``."""

    @property
    def eager(self) -> bool:
        return self.implementation == "eager"


class Projected(NamedTuple):
    """Projections of one attention sublayer, before mixing and RoPE."""

    q: Float[Tensor, "B T H E"]
    k: Float[Tensor, "B T K E"]
    v: Float[Tensor, "B T K E"]
    gate_pre: Float[Tensor, "B T K"] | None


class Attention(AttentionWeights):
    """One attention sublayer. Query, key and value projections are one matrix, rows q | k | v."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads, self.n_kv = cfg.n_heads, cfg.n_key_value_heads
        self.d_head = cfg.d_head
        self.scale = cfg.d_head**-0.5
        self.qk_rows = (self.n_heads + self.n_kv) * self.d_head
        rows = self.qk_rows + self.n_kv * self.d_head
        self.qkv = nn.Linear(cfg.d_model, rows, bias=cfg.qkv_bias)
        self.o = nn.Linear(self.n_heads * self.d_head, cfg.d_model, bias=False)
        self.q_norm = HeadNorm(cfg.d_head, cfg.qk_norm_eps) if cfg.qk_norm else None
        self.k_norm = HeadNorm(cfg.d_head, cfg.qk_norm_eps) if cfg.qk_norm else None
        self.values = make_values(cfg, layer)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        if self.values is not None:
            self.hook_v_first = HookPoint()
            if isinstance(self.values, GatedValues):
                self.hook_v_gate_pre = HookPoint()
            self.hook_v_gate, self.hook_v_scale = HookPoint(), HookPoint()
        self.hook_v_mixed = HookPoint()
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        self.hook_z = HookPoint()

    # -- projections --------------------------------------------------------------------------

    def project(self, reads: Reads, few: bool = False) -> Projected:
        """Reads (B, T, D) -> q (B, T, H, E), k and v (B, T, K, E), gate rows (B, T, K).

        The gate reads the same state as the values, so its rows ride on their product, unless the
        tokens are too ``few`` to pay for stacking the matrices.
        """
        widths = [self.n_heads * self.d_head, *[self.n_kv * self.d_head] * 2]
        if few:
            weight, bias = self.qkv.weight, self.qkv.bias
        else:
            weight, bias = self._stacked_rows(reads.v.dtype)
        if weight.shape[0] > sum(widths):
            widths.append(weight.shape[0] - sum(widths))
        if reads.q is reads.k is reads.v:
            products = [(reads.v, widths)]
        elif reads.q is reads.k:
            products = [(reads.q, widths[:2]), (reads.v, widths[2:])]
        else:
            products = [(reads.q, widths[:1]), (reads.k, widths[1:2]), (reads.v, widths[2:])]
        rows = [sum(parts) for _, parts in products]
        weights = weight.split(rows) if len(rows) > 1 else (weight,)
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        q, k, v, *gate_pre = (
            part
            for (read, parts), w, b in zip(products, weights, biases, strict=True)
            for part in F.linear(read, w, b).split(parts, -1)
        )
        if few and isinstance(self.values, GatedValues):
            alpha = self.values.alpha
            gate_pre = [F.linear(reads.v, alpha.weight, alpha.bias)]
        q = q.unflatten(-1, (self.n_heads, self.d_head))
        k = k.unflatten(-1, (self.n_kv, self.d_head))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        v = self.hook_v(v.unflatten(-1, (self.n_kv, self.d_head)))
        return Projected(self.hook_q(q), self.hook_k(k), v, gate_pre[0] if gate_pre else None)

    def _stacked_rows(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The qkv matrix, with the gate's rows below when there is a gate."""
        weight, bias = self.qkv.weight, self.qkv.bias
        if not isinstance(self.values, GatedValues):
            return weight, bias
        alpha = self.values.alpha
        weight = torch.cat((weight.to(dtype), alpha.weight.to(dtype)))
        if bias is not None or alpha.bias is not None:
            zeros = weight.new_zeros(weight.shape[0])
            first = zeros[: self.qkv.out_features] if bias is None else bias.to(dtype)
            second = zeros[: alpha.out_features] if alpha.bias is None else alpha.bias.to(dtype)
            bias = torch.cat((first, second))
        return weight, bias

    # -- value residual -----------------------------------------------------------------------

    def mix_values(
        self,
        v: Float[Tensor, "B T K E"],
        v_first: Float[Tensor, "B T K E"],
        gate_pre: Float[Tensor, "B T K"] | None,
        shared_lambda: Float[Tensor, " layers"] | None,
    ) -> Float[Tensor, "B T K E"]:
        """V' = scale V + gate V_1."""
        v_first = isolated(self.hook_v_first, v_first)
        shape = v.shape[:-1]
        if isinstance(self.values, StaticValues):
            first, second = self.values.weights(v, shared_lambda)
            gate = _hooked_static(self.hook_v_gate, first, shape).to(v.dtype)
            scale = _hooked_static(self.hook_v_scale, second, shape).to(v.dtype)
            return torch.addcmul(scale * v, gate, v_first)
        assert isinstance(self.values, GatedValues) and gate_pre is not None
        gate = self.hook_v_gate(self.values.activate(self.hook_v_gate_pre(gate_pre)))
        if is_hooked(self.hook_v_scale):
            v = v * self.hook_v_scale(v.new_ones(shape))[..., None]
        return add_gated(v, gate, v_first)

    # -- attention ----------------------------------------------------------------------------

    def forward(
        self,
        projected: Projected,
        v_first: Float[Tensor, "B T K E"] | None,
        context: ForwardContext,
    ) -> Float[Tensor, "B T D"]:
        """Projections -> what the sublayer adds."""
        q, k, v, gate_pre = projected
        if self.values is not None and v_first is not None:
            v = self.mix_values(v, v_first, gate_pre, context.shared_lambda)
        v = isolated(self.hook_v_mixed, v)
        q, k = rope(q, k, context.cos, context.sin)
        q, k = self.hook_rot_q(q), self.hook_rot_k(k)
        if context.past is not None:
            k, v = context.past.append(self.layer, k, v)
        if context.eager or is_hooked(self.hook_attn_scores, self.hook_pattern):
            z = self._explicit(q, k, v, context)
        elif context.blocks is not None:
            z = self._flex(q, k, v, context.blocks)
        elif context.bias is not None and k.shape[1] == q.shape[1]:
            z = self._blocked(q, k, v, context.bias)
        elif context.bias is not None:
            z = self._explicit(q, k, v, context)
        else:
            z = self._fused(q, k, v, context)
        z = self.hook_z(z)
        return self.o(z.flatten(-2))

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        """softmax(q k^T / sqrt(E) + mask) v with scores and pattern as tensors.

        The G query heads of a KV head are stacked along time, so grouped heads need no copies of
        keys and values.
        """
        batch, length = q.shape[:2]
        group, keys_len = self.n_heads // self.n_kv, k.shape[1]
        bias = context.bias
        if bias is None:
            past = keys_len - length
            bias = additive_bias(context.allowed, length, self.n_kv, group, q, past)
        with torch.autocast(q.device.type, enabled=False):
            stacked = q.unflatten(2, (self.n_kv, group)).permute(0, 2, 3, 1, 4)
            stacked = stacked.reshape(-1, group * length, self.d_head)
            keys = k.permute(0, 2, 3, 1).reshape(-1, self.d_head, keys_len)
            scores = torch.baddbmm(bias, stacked, keys, alpha=self.scale)
            scores = self.hook_attn_scores(scores.view(batch, self.n_heads, length, keys_len))
            pattern = self.hook_pattern(F.softmax(scores, -1))
            z = torch.bmm(
                pattern.reshape(-1, group * length, keys_len),
                v.transpose(1, 2).reshape(-1, keys_len, self.d_head),
            )
        return z.view(batch, self.n_heads, length, self.d_head).transpose(1, 2)

    def _blocked(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """The same by blocks of queries, without the hook points of scores and pattern."""
        grouped = q.transpose(1, 2).reshape(-1, self.n_heads // self.n_kv, *q.shape[1:4:2])
        keys, values = k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)
        z = blocked_attention(grouped, keys, values, bias, self.scale)
        return z.view(len(q), self.n_heads, *z.shape[2:]).transpose(1, 2)

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex(q, k, v, blocks, self.scale).transpose(1, 2)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        mask = None if context.allowed is None else context.allowed[:, None]
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            # torch aligns its causal mask with the first key; one last query sees every key.
            is_causal=mask is None and q.shape[1] > 1,
            enable_gqa=self.n_heads != self.n_kv,
        )
        return z.transpose(1, 2)


def _hooked_static(point: HookPoint, weight: Tensor, shape: torch.Size) -> Tensor:
    """A static weight, as its hook point leaves it where it is hooked: a copy to write to."""
    if not is_hooked(point):
        return weight
    return point(weight.expand(shape).clone())[..., None]


# -- masks ----------------------------------------------------------------------------------------


def allowed_keys(
    length: int,
    window: int | None,
    documents: Int[Tensor, "B S"] | None,
    device: torch.device,
    past: int = 0,
) -> Bool[Tensor, "batch T S"] | None:
    """Which keys each query sees, for each sequence or for all; None means all earlier ones.

    Args:
        length: T, queries; they are at the last positions.
        window: query i sees keys i - window < j <= i.
        documents: ids of all keys; attention stays within equal ids (padding is one more document).
        past: keys before the first query. None is returned for one query or no earlier keys only.
    """
    total = past + length
    if documents is None and (window is None or window >= total) and (length == 1 or not past):
        return None
    position = torch.arange(total, device=device)
    distance = position[past:, None] - position
    allowed = (distance >= 0)[None]
    if window is not None:
        allowed = allowed & (distance < window)
    if documents is not None:
        allowed = allowed & (documents[:, past:, None] == documents[:, None, :])
    return allowed


def additive_bias(
    allowed: Tensor | None, length: int, n_kv: int, group: int, like: Tensor, past: int = 0
) -> Tensor:
    """0 where a key is seen and -inf elsewhere, in the layout of explicit scores.

    Returns:
        (1 or B K, G T, S) in the dtype and on the device of ``like``.
    """
    total = past + length
    if allowed is None:
        allowed = torch.ones(length, total, dtype=torch.bool, device=like.device).tril(past)[None]
    bias = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
    bias = bias.masked_fill_(~allowed, float("-inf"))
    heads = 1 if len(bias) == 1 else n_kv
    return bias[:, None, None].expand(-1, heads, group, -1, -1).reshape(-1, group * length, total)


def prefers_explicit(length: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether explicit scores beat the fused kernel: bf16 on CPUs at short lengths does."""
    return device.type == "cpu" and dtype == torch.bfloat16 and length <= LONGEST_EXPLICIT


def takes_flex(
    implementation: Implementation,
    length: int,
    d_head: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether a masked pass without a cache and without hooked scores goes to FlexAttention."""
    wanted = implementation == "flex" or (implementation == "auto" and torch.is_grad_enabled())
    return wanted and supports(length, d_head, dtype, device)
