"""Hugging Face Llama folders: plain transformers, or ResFormers under a Llama's name.

The ResFormer release (arXiv 2410.17897) stores identity-mode models under exactly a Llama's
configuration and tensor names: nothing in the files tells them apart, so nothing is guessed.
Reading takes the mode as an argument, writing takes the layout's own name.
"""

from __future__ import annotations

from typing import Any, ClassVar

from satlens.checkpoints.layouts.backbone import cannot_express, refuse, require_plain, tied_head
from satlens.checkpoints.layouts.base import Layout, Rule
from satlens.checkpoints.layouts.hf_backbone import (
    LlamaKeys,
    hf_config,
    hf_keys,
    hf_rules,
    output_biases,
    read_hf_keys,
)
from satlens.config import ModelConfig, NoValueResidual, ResidualStream, StaticValueResidual
from satlens.errors import ConfigError

_IDENTITY = StaticValueResidual(mode="identity")


class LlamaLike(Layout):
    """What Llama and its kin share: names, tied heads, output biases that must be zero."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    qk_norm: ClassVar[bool] = False
    ignored = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"

    def matches(self, config: dict[str, Any], value_residual: str | None = None) -> bool:
        return config.get("model_type") == self.model_type

    def config_of(self, cfg: ModelConfig) -> dict[str, Any]:
        if cfg.value_residual == _IDENTITY and isinstance(cfg.stream, ResidualStream):
            raise ConfigError(
                f"value_residual: the {self.name} layout cannot express 'identity'; "
                "resformer_release writes it, to be read with value_residual='identity'"
            )
        require_plain(cfg, self.name)
        return self._keys_of(cfg)

    def _keys_of(self, cfg: ModelConfig) -> dict[str, Any]:
        keys = hf_keys(cfg, self.name, self.qk_norm)
        return {**keys, "model_type": self.model_type, "architectures": [self.architecture]}

    def rules(self, cfg: ModelConfig) -> list[Rule]:
        return list(hf_rules(cfg))

    def zeros(self, cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
        return output_biases(cfg)

    def tied_copy(self, cfg: ModelConfig) -> tuple[str, str] | None:
        return tied_head(cfg, "model.embed_tokens.weight")


class HuggingFaceLlama(LlamaLike):
    """``model_type`` llama, as a plain transformer."""

    name = "hf_llama"
    model_type = "llama"
    architecture = "LlamaForCausalLM"

    def matches(self, config: dict[str, Any], value_residual: str | None = None) -> bool:
        return value_residual is None and super().matches(config)

    def model_config(
        self, config: dict[str, Any], where: str, value_residual: str | None = None
    ) -> ModelConfig:
        return hf_config(read_hf_keys(LlamaKeys, config, where), where)


class ResformerRelease(LlamaLike):
    """The same files, said by the caller to hold a ResFormer in identity mode."""

    name = "resformer_release"
    model_type = "llama"
    architecture = "LlamaForCausalLM"

    def matches(self, config: dict[str, Any], value_residual: str | None = None) -> bool:
        return value_residual is not None and super().matches(config)

    def model_config(
        self, config: dict[str, Any], where: str, value_residual: str | None = None
    ) -> ModelConfig:
        if value_residual != "identity":
            raise ConfigError(f"value_residual: expected 'identity', got {value_residual!r}")
        keys = read_hf_keys(LlamaKeys, config, where)
        return hf_config(keys, where, value_residual=_IDENTITY)

    def config_of(self, cfg: ModelConfig) -> dict[str, Any]:
        refuse(cfg, self.name, {"stream": not isinstance(cfg.stream, ResidualStream)})
        residual = cfg.value_residual
        if isinstance(residual, NoValueResidual):
            raise cannot_express(self.name, "value_residual", residual.kind)
        if residual != _IDENTITY:
            mode = getattr(residual, "mode", residual.kind)
            mode = "last_k" if mode == "identity" else mode
            raise cannot_express(self.name, "value_residual", mode)
        return self._keys_of(cfg)
