"""Hugging Face Qwen3 folders: a Llama with norms over query and key heads, and sliding windows."""

from __future__ import annotations

from typing import Any

from pydantic.dataclasses import dataclass

from satlens.checkpoints.layouts.base import no_value_residual
from satlens.checkpoints.layouts.hf_backbone import LlamaKeys, hf_config, read_hf_keys
from satlens.checkpoints.layouts.hf_llama import LlamaLike
from satlens.config import STRICT, ModelConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Qwen3Keys(LlamaKeys):
    """The same with Qwen3's defaults, and its sliding windows."""

    head_dim: int | None = 128
    max_position_embeddings: int = 32_768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        known = {"full_attention", "sliding_attention"}
        if not set(self.types) <= known or len(set(self.types)) > 1:
            field = "max_window_layers" if self.layer_types is None else "layer_types"
            raise ValueError(f"{field}: layers of several kinds of attention are not supported")
        if self.sliding and (self.sliding_window is None or not self.use_sliding_window):
            raise ValueError("layer_types: sliding_attention, but use_sliding_window is off")

    @property
    def types(self) -> tuple[str, ...]:
        """Kind of attention of each layer; by default the last ones slide."""
        if self.layer_types is not None:
            return self.layer_types
        slides = self.use_sliding_window and self.sliding_window is not None
        return tuple(
            "sliding_attention" if slides and layer >= self.max_window_layers else "full_attention"
            for layer in range(self.num_hidden_layers)
        )

    @property
    def sliding(self) -> bool:
        return "sliding_attention" in self.types

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.sliding else None


def qk_normed(keys: LlamaKeys) -> dict[str, Any]:
    """Qwen3's norms over query and key heads: always there, with every other norm's eps."""
    return {"qk_norm": True, "qk_norm_eps": keys.rms_norm_eps}


class HuggingFaceQwen3(LlamaLike):
    """``model_type`` qwen3, as a plain transformer."""

    name = "hf_qwen3"
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = True

    def model_config(
        self, config: dict[str, Any], where: str, value_residual: str | None = None
    ) -> ModelConfig:
        no_value_residual(value_residual, self.name)
        keys = read_hf_keys(Qwen3Keys, config, where)
        return hf_config(keys, where, **qk_normed(keys))
