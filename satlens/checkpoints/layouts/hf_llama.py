"""Hugging Face Llama folders, read as plain transformers or, when told so, as ResFormers.

The ResFormer release (arXiv 2410.17897) stores identity-mode models under exactly a Llama's
configuration and tensor names: nothing in the files tells them apart, so nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, NoReturn

from pydantic.dataclasses import dataclass

from satlens.checkpoints.layouts.backbone import (
    check_head_split,
    head_sizes,
    mlp_rules,
    one,
    qkv_rules,
    tied_head,
)
from satlens.checkpoints.layouts.base import Layout, Rule, only
from satlens.config import (
    STRICT,
    ModelConfig,
    NoValueResidual,
    StaticValueResidual,
    make,
)
from satlens.errors import ConfigError


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LlamaKeys:
    """Keys of ``config.json`` that shape the computation, with Llama's defaults."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: Literal["silu", "swish"] = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.head_dim is None:
            heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
            check_head_split(self.hidden_size, heads, kv_heads, "num_attention_heads")


class HuggingFaceLlama(Layout):
    """``model_type`` llama; read only."""

    name = "hf_llama"
    writable = False
    ignored = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "llama"

    def model_config(
        self, config: dict[str, Any], where: str, value_residual: str | None = None
    ) -> ModelConfig:
        if value_residual not in (None, "identity"):
            raise ConfigError(f"value_residual: expected 'identity', got {value_residual!r}")
        keys = _read_keys(config, where)
        plain = value_residual is None
        residual = NoValueResidual() if plain else StaticValueResidual(mode="identity")
        values = {
            "d_vocab": keys.vocab_size,
            "n_ctx": keys.max_position_embeddings,
            "n_layers": keys.num_hidden_layers,
            "d_model": keys.hidden_size,
            "n_heads": keys.num_attention_heads,
            "n_key_value_heads": keys.num_key_value_heads,
            "d_head": keys.head_dim,
            "d_mlp": keys.intermediate_size,
            "rope_theta": keys.rope_theta,
            "norm_eps": keys.rms_norm_eps,
            "tied_embeddings": keys.tie_word_embeddings,
            "document_mask": False,
            "init": "normal_0.02",
            "value_residual": residual,
        }
        return make(ModelConfig, values, where)

    def config_of(self, cfg: ModelConfig) -> NoReturn:
        raise ConfigError(f"layout: {self.name} is read only")

    def rules(self, cfg: ModelConfig) -> list[Rule]:
        return list(_rules(cfg))

    def tied_copy(self, cfg: ModelConfig) -> tuple[str, str] | None:
        return tied_head(cfg, "model.embed_tokens.weight")


def _read_keys(config: dict[str, Any], where: str) -> LlamaKeys:
    only(config, "attention_bias", (False, None), where)
    only(config, "mlp_bias", (False, None), where)
    only(config, "pretraining_tp", (1, None), where)
    only(config, "quantization_config", (None,), where)
    known = {field.name for field in fields(LlamaKeys)}  # type: ignore[arg-type]
    values = {k: v for k, v in config.items() if k in known}
    # Older files scale RoPE through rope_scaling; newer ones keep theta in rope_parameters.
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else rope
        if kind != "default":
            raise ConfigError(f"{where}: {key}: {kind!r} is not supported, only plain RoPE")
        only(rope, "partial_rotary_factor", (1, None), f"{where}: {key}")
        values["rope_theta"] = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    return make(LlamaKeys, values, where)


def _rules(cfg: ModelConfig) -> Iterator[Rule]:
    d, vocab = cfg.d_model, cfg.d_vocab
    heads, _, d_head = head_sizes(cfg)
    yield one("embed.weight", "model.embed_tokens.weight", (vocab, d))
    for layer in range(cfg.n_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        yield one(ours + "ln1.weight", theirs + "input_layernorm.weight", (d,))
        yield from qkv_rules(cfg, ours + "attn.qkv.", theirs + "self_attn.")
        yield one(ours + "attn.o.weight", theirs + "self_attn.o_proj.weight", (d, heads * d_head))
        yield one(ours + "ln2.weight", theirs + "post_attention_layernorm.weight", (d,))
        yield from mlp_rules(cfg, layer, theirs)
    yield one("ln_final.weight", "model.norm.weight", (d,))
    if not cfg.tied_embeddings:
        yield one("unembed.weight", "lm_head.weight", (vocab, d))
