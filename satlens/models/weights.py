"""Weights under TransformerLens' names and in its shapes: what its tools multiply caches with.

Shapes: L layers, H query heads, K KV heads, E head width, D model width, M MLP width, V vocabulary.
All are views of the fused matrices, or stacks of such views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from satlens.errors import ConfigError


class AttentionWeights(nn.Module):
    """What one attention sublayer offers."""

    if TYPE_CHECKING:
        n_heads: int
        n_kv: int
        d_head: int
        qkv: nn.Linear
        o: nn.Linear

    @property
    def W_Q(self) -> Tensor:
        """Query projection, (H, D, E); with qk-norm, queries are normalised after it."""
        return self._rows(self.qkv.weight, 0, self.n_heads).transpose(1, 2)

    @property
    def W_K(self) -> Tensor:
        """Key projection, (K, D, E)."""
        return self._rows(self.qkv.weight, self.n_heads, self.n_kv).transpose(1, 2)

    @property
    def W_V(self) -> Tensor:
        """Value projection, (K, D, E)."""
        return self._rows(self.qkv.weight, self.n_heads + self.n_kv, self.n_kv).transpose(1, 2)

    @property
    def W_O(self) -> Tensor:
        """Output projection, (H, E, D)."""
        return self.o.weight.t().unflatten(0, (self.n_heads, self.d_head))

    @property
    def b_Q(self) -> Tensor:
        """Query biases, (H, E); zeros without."""
        return self._rows(self._bias(), 0, self.n_heads)

    @property
    def b_K(self) -> Tensor:
        """Key biases, (K, E); zeros without."""
        return self._rows(self._bias(), self.n_heads, self.n_kv)

    @property
    def b_V(self) -> Tensor:
        """Value biases, (K, E); zeros without."""
        return self._rows(self._bias(), self.n_heads + self.n_kv, self.n_kv)

    @property
    def b_O(self) -> Tensor:
        """There is no output bias: zeros (D,)."""
        return self.o.weight.new_zeros(self.o.out_features)

    def _bias(self) -> Tensor:
        bias: Tensor | None = self.qkv.bias
        return self.qkv.weight.new_zeros(self.qkv.out_features) if bias is None else bias

    def _rows(self, fused: Tensor, first_head: int, n_heads: int) -> Tensor:
        """The rows of some heads, (n_heads, E, ...)."""
        rows = fused.narrow(0, first_head * self.d_head, n_heads * self.d_head)
        return rows.unflatten(0, (n_heads, self.d_head))


class MLPWeights(nn.Module):
    """What one MLP sublayer offers; one of width zero has none."""

    if TYPE_CHECKING:
        d_mlp: int
        gate_up: nn.Linear
        down: nn.Linear

    @property
    def W_gate(self) -> Tensor:
        """Gate projection, inside silu, (D, M)."""
        return self.gate_up.weight[: self.d_mlp].t()

    @property
    def W_in(self) -> Tensor:
        """Up projection, (D, M)."""
        return self.gate_up.weight[self.d_mlp :].t()

    @property
    def W_out(self) -> Tensor:
        """Down projection, (M, D)."""
        return self.down.weight.t()

    @property
    def b_in(self) -> Tensor:
        """There is no input bias: zeros (M,)."""
        return self.down.weight.new_zeros(self.d_mlp)

    @property
    def b_out(self) -> Tensor:
        """There is no output bias: zeros (D,)."""
        return self.down.weight.new_zeros(self.down.out_features)


class DecoderWeights:
    """What the whole model offers."""

    if TYPE_CHECKING:
        cfg: Any
        embed: nn.Embedding
        unembed: Any
        blocks: Any
        ln_final: Any
        to_single_token: Any

    @property
    def W_E(self) -> Tensor:
        """Embedding, (V, D)."""
        return self.embed.weight

    @property
    def W_U(self) -> Tensor:
        """Unembedding, (D, V)."""
        return getattr(self.unembed, "weight", self.embed.weight).t()

    @property
    def b_U(self) -> Tensor:
        """There is no output bias: zeros (V,)."""
        return self.embed.weight.new_zeros(self.cfg.d_vocab)

    @property
    def W_Q(self) -> Tensor:
        """Query projections, (L, H, D, E)."""
        return self._stack("attn", "W_Q")

    @property
    def W_K(self) -> Tensor:
        """Key projections, (L, K, D, E)."""
        return self._stack("attn", "W_K")

    @property
    def W_V(self) -> Tensor:
        """Value projections, (L, K, D, E)."""
        return self._stack("attn", "W_V")

    @property
    def W_O(self) -> Tensor:
        """Output projections, (L, H, E, D)."""
        return self._stack("attn", "W_O")

    @property
    def W_gate(self) -> Tensor:
        """Gate projections of the MLPs, inside silu, (L, D, M); all of one width."""
        return self._stack("mlp", "W_gate")

    @property
    def W_in(self) -> Tensor:
        """Up projections of the MLPs, (L, D, M); all of one width."""
        return self._stack("mlp", "W_in")

    @property
    def W_out(self) -> Tensor:
        """Down projections of the MLPs, (L, M, D); all of one width."""
        return self._stack("mlp", "W_out")

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """What a normalised read is multiplied with to give the logits of tokens, (..., D).

        That is their columns of W_U times the final norm's weight. One token gives (D,).
        """
        token = self.to_single_token(tokens) if isinstance(tokens, str) else tokens
        ids = torch.as_tensor(token, device=self.embed.weight.device)
        directions = self.W_U.t()[ids] * self.ln_final.weight
        return directions.flatten() if ids.numel() == 1 else directions

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Tensor:
        """Sum of the output biases below a layer. There are none: zeros (D,)."""
        return self.embed.weight.new_zeros(self.cfg.d_model)

    def _stack(self, sublayer: str, name: str) -> Tensor:
        widths = {self.cfg.d_mlp_of(layer) for layer in range(self.cfg.n_layers)}
        if sublayer == "mlp" and (len(widths) > 1 or 0 in widths):
            raise ConfigError(
                f"{name}: MLPs of widths {sorted(widths)} do not stack; "
                f"use model.blocks[layer].mlp.{name}"
            )
        return torch.stack([getattr(getattr(block, sublayer), name) for block in self.blocks])
