"""One layer: read, attend, write, read, MLP, write. Depth streams subclass it.

A stream is functional: its state is a NamedTuple of tensors that each block receives and returns
a new version of, so that activation checkpointing, FSDP and compilation see plain inputs and
outputs. ``(state, v_first)`` at a block border is all that later layers need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from satlens.config import ModelConfig
from satlens.models.attention import Attention, ForwardContext, Reads
from satlens.models.compiled import CompiledInside
from satlens.models.layers import MLP, RMSNorm, heads_first
from satlens.models.sites import AccessSite
from satlens.models.sources import norms_of, source_points

State = Any  # a NamedTuple of tensors, one class a stream


class Snapshot(NamedTuple):
    """Everything above a block border depends on: resume with ``model(..., start_at=snapshot)``."""

    layer: int
    """The next block to run."""
    state: State
    """The stream's state."""
    v_first: Tensor | None
    """V_1, (B, T, K, E); None without a value residual or before layer 0."""


class ReadPoints(NamedTuple):
    """Hook points of one read of a sublayer, or of one role of it."""

    route: HookPoint
    """Its weights over the sources."""
    read: HookPoint
    """The mixture, before the norm."""


class Block(CompiledInside):
    """A layer of the decoder; subclasses say how the stream is read and written.

    Args:
        cfg: the model.
        layer: number of the layer, from 0.
        attention_norms: names of the norms of its attention read.

    Attributes:
        swapped_roles: where queries and keys have a route and values another over the same
            sources, each reads by that of the other. The routes' hook points have to be hooked.
    """

    ln1: RMSNorm
    swapped_roles: bool = False

    def __init__(
        self, cfg: ModelConfig, layer: int, attention_norms: Sequence[str] = ("ln1",)
    ) -> None:
        super().__init__()
        self.layer = layer
        self.keeps_v_first = layer == 0 and bool(cfg.value_layers)
        for name in attention_norms:
            setattr(self, name, RMSNorm(cfg.d_model, cfg.norm_eps))
        self.attn = Attention(cfg, layer)
        self.ln2 = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.mlp = MLP(cfg.d_model, cfg.d_mlp_of(layer))
        self.hook_attn_out, self.hook_mlp_out = HookPoint(), HookPoint()

    def forward(
        self, state: State, v_first: Tensor | None, context: ForwardContext
    ) -> tuple[State, Tensor | None]:
        """State and V_1 before the layer -> after it."""
        return self.computed(state, v_first, context)

    def compute(
        self, state: State, v_first: Tensor | None, context: ForwardContext
    ) -> tuple[State, Tensor | None]:
        state, reads = self.read_attn(state, context)
        projected = self.attn.project(reads, few=context.past is not None)
        if self.keeps_v_first:
            # Every later layer reads V_1: compact, not as a slice of the wide projection.
            projected = projected._replace(v=heads_first(projected.v))
        attn_out = self.attn(projected, v_first, context)
        state = self.write_attn(state, self.hook_attn_out(attn_out))
        state, x = self.read_mlp(state, context)
        state = self.write_mlp(state, self.hook_mlp_out(self.mlp(x)))
        return state, (projected.v if self.keeps_v_first else v_first)

    # What a stream defines. Norms belong to the read: what these return is normalised.
    def read_attn(self, state: State, context: ForwardContext) -> tuple[State, Reads]:
        raise NotImplementedError

    def write_attn(self, state: State, y: Tensor) -> State:
        raise NotImplementedError

    def read_mlp(self, state: State, context: ForwardContext) -> tuple[State, Tensor]:
        raise NotImplementedError

    def write_mlp(self, state: State, y: Tensor) -> State:
        raise NotImplementedError


class DepthStream:
    """A stream as the decoder sees it: its blocks, its beginning, its end and its sites."""

    block: ClassVar[type[Block]]
    unfold_tolerance: ClassVar[float] = 1e-5
    """How far, relative to a read, its unfolded sum may be from it in fp32."""

    @staticmethod
    def begin(x0: Tensor) -> State:
        """The state before layer 0, from the embedding (B, T, D)."""
        raise NotImplementedError

    @staticmethod
    def output_read(cfg: ModelConfig) -> nn.Module | None:
        """Weights of the final norm's own read, where the stream has one."""
        return None

    @staticmethod
    def finish(model: Any, state: State, eager: bool) -> Tensor:
        """What the unembedding receives: the final norm's output (B, T, D)."""
        raise NotImplementedError

    @staticmethod
    def standing_still(cfg: ModelConfig, state: State) -> State:
        """The state at the end, for :meth:`finish`, if nothing changed above this block border.

        By default the state as it is: its sum is final, and an output read reads the sources there
        are. Streams whose end expects more than a border has say what stands for it.
        """
        return state

    @staticmethod
    def sites(cfg: ModelConfig) -> list[AccessSite]:
        """The stream's access sites in order of execution."""
        return []

    @classmethod
    def unfolded_from(cls, cfg: ModelConfig) -> list[str]:
        """Hook points whose activations :meth:`unfold` needs: by default those of the sites."""
        return [site.hook for site in cls.sites(cfg)]

    @staticmethod
    def unfolds_by_channel(cfg: ModelConfig) -> bool:
        """Whether coefficients of :meth:`unfold` differ between channels: (B, T, M, D)."""
        return False

    @staticmethod
    def unfold(model: Any, recorded: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Effective routes: what of each sublayer's own output a read receives, in float64.

        Every stream is linear in the sublayer outputs once its weights are fixed, so the read is
        sum_m c_m delta_m with delta_0 the embedding and delta_m the output of sublayer m - 1.

        Args:
            model: a decoder of this stream.
            recorded: activations of :meth:`unfolded_from`, (B, T, ...) each.

        Yields:
            In order of execution, the hook point of a read (``blocks.0.hook_attn_read``) and its
            coefficients (B, T, M), M = 1 + 2 L, zero above the read; (B, T, M, D) where norms with
            weights act between, and B = T = 1 where they are the same for every token.
        """
        raise NotImplementedError

    @classmethod
    def measured_from(cls, cfg: ModelConfig) -> list[str]:
        """Hook points whose activations :meth:`source_norms` needs."""
        sources = {source for site in cls.sites(cfg) for source in site.sources}
        points = (point for source in sources for point in source_points(source, cfg.n_layers))
        return sorted(set(points))

    @classmethod
    def source_norms(
        cls, model: Any, recorded: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """How large the sources of each route are, as its weights meet them, in float64.

        Args:
            model: a decoder of this stream.
            recorded: activations of :meth:`measured_from`, (B, T, ...) each.

        Yields:
            In order of the sites, the hook point of a route and (B, T, n).
        """
        return norms_of(cls.sites(model.cfg), recorded, model.cfg.n_layers)


def final_norm(model: Any, x: Tensor, eager: bool) -> Tensor:
    """The final norm of a read that needs no mixing."""
    return model.ln_final(model.hook_out_read(x), eager)


__all__ = ["Block", "DepthStream", "ReadPoints", "Reads", "Snapshot", "State", "final_norm"]
