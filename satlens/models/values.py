"""Value residuals: what is added to a layer's values from V_1, the first layer's.

V_1 (B, T, K, E) is the raw output of layer 0's value projection, not detached. Mixing happens
right after the value projection, so attention weights are shared by both parts:

    V'_n = scale_n V_n + gate_n V_1
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from satlens.config import GatedValueResidual, ModelConfig, StaticValueResidual
from satlens.models.sites import V_FIRST, AccessSite


class SharedLambda(nn.Module):
    """lambda1 of ResFormer's learnable_plus: s * softmax(z) over layers 1 to L-1.

    s starts at L, z at zero, so every layer starts at L / (L - 1) (arXiv 2410.17897).
    """

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([float(n_layers)]))
        self.logits = nn.Parameter(torch.zeros(n_layers - 1))

    def forward(self) -> Tensor:
        """(L - 1,): entry n - 1 is layer n."""
        return self.scale * self.logits.softmax(-1)


class StaticValues(nn.Module):
    """One lambda1 and one lambda2 a layer, fixed or trained (ResFormer).

    Trained ones have shape (1,): FSDP2 does not shard 0-d parameters.
    """

    def __init__(self, config: StaticValueResidual, layer: int) -> None:
        super().__init__()
        self.layer = layer
        first, second = (0.5, 0.5) if config.mode == "identity" else config.weights
        self.shared = config.mode == "learnable_plus"
        if config.mode == "learnable":
            self.lambda1 = nn.Parameter(torch.tensor([first]))
            self.lambda2 = nn.Parameter(torch.tensor([second]))
        elif self.shared:
            self.lambda2 = nn.Parameter(torch.tensor([config.lambda2_init]))
        else:
            # Constants of the config, not weights: kept out of checkpoints.
            self.lambda1, self.lambda2 = first, second

    def weights(self, like: Tensor, shared_lambda: Tensor | None) -> tuple[Tensor, Tensor]:
        """(lambda1, lambda2), 0-d or (1,), in fp32 or wider: hook points show them unrounded."""
        first = shared_lambda[self.layer - 1] if shared_lambda is not None else self.lambda1
        dtype = torch.promote_types(like.dtype, torch.float32)
        return tuple(  # type: ignore[return-value]
            torch.as_tensor(w, device=like.device, dtype=dtype) for w in (first, self.lambda2)
        )


class _AddGated(torch.autograd.Function):
    """v + gate v_first, laid out as attention wants it: heads before positions in memory."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, gate: Tensor, v_first: Tensor) -> Tensor:
        ctx.save_for_backward(gate, v_first)
        mixed = v.new_empty(v.transpose(1, 2).shape).transpose(1, 2)
        return torch.addcmul(v, gate[..., None], v_first, out=mixed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, v_first = ctx.saved_tensors
        return grad, torch.linalg.vecdot(grad, v_first), grad * gate[..., None]


def add_gated(
    v: Float[Tensor, "B T K E"], gate: Float[Tensor, "B T K"], v_first: Float[Tensor, "B T K E"]
) -> Float[Tensor, "B T K E"]:
    """v + gate v_first, a gate a token and head."""
    if torch.compiler.is_compiling():  # which lays it out and fuses it itself
        return torch.addcmul(v, gate[..., None], v_first)
    return _AddGated.apply(v, gate, v_first)


class GatedValues(nn.Module):
    """A gate per token and KV head (SATFormer, arXiv 2605.03953, its gate equation)."""

    def __init__(self, config: GatedValueResidual, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.gate = config.gate
        self.alpha = nn.Linear(d_model, n_heads, bias=config.bias)

    def activate(self, pre: Float[Tensor, "B T K"]) -> Float[Tensor, "B T K"]:
        """Gate function g on pre-activations."""
        match self.gate:
            case "relu":
                return pre.relu()
            case "sigmoid":
                return pre.sigmoid()
            case "tanh":
                return pre.tanh()
            case "softmax":
                return F.softmax(pre, -1) * pre.shape[-1]
            case "softmax_sigmoid":
                return F.softmax(pre, -1) * pre.sigmoid() * pre.shape[-1]
            case _:
                return pre


def make_values(cfg: ModelConfig, layer: int) -> StaticValues | GatedValues | None:
    """The value residual of one layer, or None where values are plain."""
    if layer not in cfg.value_layers:
        return None
    if isinstance(cfg.value_residual, StaticValueResidual):
        return StaticValues(cfg.value_residual, layer)
    assert isinstance(cfg.value_residual, GatedValueResidual)
    return GatedValues(cfg.value_residual, cfg.d_model, cfg.n_key_value_heads)


def value_sites(cfg: ModelConfig) -> list[AccessSite]:
    """One gate site a mixing layer; static weights are one number for all heads and tokens."""
    residual = cfg.value_residual
    gated = isinstance(residual, GatedValueResidual)
    signed = not isinstance(residual, GatedValueResidual) or residual.gate in ("tanh", "identity")
    return [
        AccessSite(
            hook=f"blocks.{layer}.attn.hook_v_gate",
            kind="gate",
            layer=layer,
            sublayer="attn",
            role="v",
            sources=(V_FIRST,),
            support="signed" if signed else "nonnegative",
            per_token=gated,
            base="own",
            n_heads=cfg.n_key_value_heads,
        )
        for layer in cfg.value_layers
    ]
