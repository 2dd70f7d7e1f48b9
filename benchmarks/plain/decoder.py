"""A decoder as one would first write it: nanoGPT with RMSNorm, RoPE, SwiGLU and SATFormer's gate.

One product for each matrix, ``F.rms_norm``, ``F.scaled_dot_product_attention``, and everything else
left to autocast. It is what satlens' trainer is timed against and checked by.

Shapes: B batch, T position, D model width, H heads, E head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from satlens.config import ModelConfig
from satlens.models.decoder import Decoder

IGNORED = -100


def rotary_table(length: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of t theta^(-2i / E), (T, E / 2) each."""
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, H, T, E) with entries i and i + E/2 turned as one complex number, in fp32 or wider."""
    a, b = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class PlainNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PlainAttention(nn.Module):
    """Causal attention; V' = V + relu(x W_alpha) V_1 where a layer is gated."""

    def __init__(self, cfg: ModelConfig, gated: bool) -> None:
        super().__init__()
        self.n_heads, width = cfg.n_heads, cfg.n_heads * cfg.d_head
        self.q = nn.Linear(cfg.d_model, width, bias=False)
        self.k = nn.Linear(cfg.d_model, width, bias=False)
        self.v = nn.Linear(cfg.d_model, width, bias=False)
        self.o = nn.Linear(width, cfg.d_model, bias=False)
        self.alpha = nn.Linear(cfg.d_model, cfg.n_heads, bias=False) if gated else None

    def forward(
        self, x: Tensor, v_first: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the sublayer adds (B, T, D), and the values before mixing (B, H, T, E)."""
        batch, length, _ = x.shape
        q, k, v = (
            linear(x).view(batch, length, self.n_heads, -1).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        mixed = v
        if self.alpha is not None and v_first is not None:
            gate = F.relu(self.alpha(x)).transpose(1, 2)
            mixed = v + gate[..., None] * v_first
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        z = F.scaled_dot_product_attention(q, k, mixed, is_causal=True)
        return self.o(z.transpose(1, 2).contiguous().view(batch, length, -1)), v


class PlainMLP(nn.Module):
    def __init__(self, d_model: int, d_mlp: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_mlp, bias=False)
        self.up = nn.Linear(d_model, d_mlp, bias=False)
        self.down = nn.Linear(d_mlp, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PlainBlock(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.ln1 = PlainNorm(cfg.d_model, cfg.norm_eps)
        self.attn = PlainAttention(cfg, layer in cfg.value_layers)
        self.ln2 = PlainNorm(cfg.d_model, cfg.norm_eps)
        self.mlp = PlainMLP(cfg.d_model, cfg.d_mlp_of(layer))

    def forward(
        self, x: Tensor, v_first: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        added, v = self.attn(self.ln1(x), v_first, cos, sin)
        x = x + added
        return x + self.mlp(self.ln2(x)), v


class PlainDecoder(nn.Module):
    """A transformer or a SATFormer with the weights of ``source``.

    Raises:
        ValueError: an architecture that is not written here.
    """

    def __init__(self, source: Decoder) -> None:
        super().__init__()
        cfg = source.cfg
        _check(cfg)
        self.embed = nn.Embedding(cfg.d_vocab, cfg.d_model)
        self.blocks = nn.ModuleList(PlainBlock(cfg, i) for i in range(cfg.n_layers))
        self.ln_final = PlainNorm(cfg.d_model, cfg.norm_eps)
        self.unembed = nn.Linear(cfg.d_model, cfg.d_vocab, bias=False)
        self.table = rotary_table(cfg.n_ctx, cfg.d_head, cfg.rope_theta)
        self.load_state_dict(separated(source.state_dict()))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """(B, T) ids -> the mean loss in nats over targets that are not -100."""
        cos, sin = (table[: tokens.shape[1]] for table in self.table)
        x, v_first = self.embed(tokens), None
        for layer, block in enumerate(self.blocks):
            x, v = block(x, v_first, cos, sin)
            v_first = v if layer == 0 else v_first
        logits = self.unembed(self.ln_final(x))
        return F.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED
        )


def _check(cfg: ModelConfig) -> None:
    """Only what is written above: anything else would be another model."""
    gate = getattr(cfg.value_residual, "gate", "relu")
    plain = (
        cfg.stream.kind == "residual"
        and cfg.value_residual.kind in ("none", "gated")
        and gate == "relu"
        and not getattr(cfg.value_residual, "bias", False)
        and cfg.n_key_value_heads == cfg.n_heads
        and not (cfg.qk_norm or cfg.qkv_bias or cfg.tied_embeddings or cfg.document_mask)
        and cfg.window_size is None
    )
    if not plain:
        raise ValueError(f"{cfg.variant}: this configuration has no plain decoder")


def separated(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """satlens' weights with a matrix for each projection, under the names used here."""
    found = {}
    for name, weight in weights.items():
        if name.endswith("attn.qkv.weight"):
            for part, rows in zip("qkv", weight.chunk(3), strict=True):
                found[name.replace("qkv", part)] = rows
        elif name.endswith("mlp.gate_up.weight"):
            for part, rows in zip(("gate", "up"), weight.chunk(2), strict=True):
                found[name.replace("gate_up", part)] = rows
        else:
            found[name.replace("attn.values.alpha", "attn.alpha")] = weight
    return found
