"""The shared backbone as Hugging Face's Llama and Qwen3 lay it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, TypeVar

from pydantic.dataclasses import dataclass

from satlens.checkpoints.layouts.backbone import (
    check_head_split,
    head_sizes,
    mlp_rules,
    one,
    qk_norm_rules,
    qkv_rules,
    refuse,
    uniform_width,
)
from satlens.checkpoints.layouts.base import Rule, only
from satlens.config import STRICT, ModelConfig, make
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
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.head_dim is None:
            heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
            check_head_split(
                self.hidden_size, heads, kv_heads, "num_attention_heads", "num_key_value_heads"
            )

    @property
    def window(self) -> int | None:
        """Sliding window of every layer; None for full attention."""
        return None


K = TypeVar("K", bound=LlamaKeys)


def read_hf_keys(cls: type[K], config: dict[str, Any], where: str) -> K:
    """The keys that matter, checked; those that change nothing computed are ignored.

    Raises:
        ConfigError: missing, mistyped or impossible values; features satlens does not have.
    """
    only(config, "mlp_bias", (False, None), where)
    only(config, "pretraining_tp", (1, None), where)
    only(config, "quantization_config", (None,), where)
    only(config, "partial_rotary_factor", (1, None), where)
    only(config, "is_causal", (True, None), where)
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    values = {k: v for k, v in config.items() if k in known}
    if values.get("attention_bias", False) is None:
        values["attention_bias"] = False
    # Older files scale RoPE through rope_scaling; newer ones keep theta in rope_parameters.
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        kind = rope
        if isinstance(rope, dict):
            unnamed = None if "factor" in rope else "default"
            kind = rope.get("rope_type", rope.get("type", unnamed))
        if kind != "default" or not isinstance(rope, dict):
            raise ConfigError(f"{where}: {key}: {kind!r} is not supported, only plain RoPE")
        if any(isinstance(value, dict) for value in rope.values()):
            raise ConfigError(f"{where}: {key}: one RoPE for every layer is all there is")
        only(rope, "partial_rotary_factor", (1, None), f"{where}: {key}")
        values["rope_theta"] = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    return make(cls, values, where)


def hf_config(keys: LlamaKeys, where: str, **parts: Any) -> ModelConfig:
    """Our configuration from their keys, a value residual and a stream."""
    values = {
        "d_vocab": keys.vocab_size,
        "n_ctx": keys.max_position_embeddings,
        "n_layers": keys.num_hidden_layers,
        "d_model": keys.hidden_size,
        "n_heads": keys.num_attention_heads,
        "n_key_value_heads": keys.num_key_value_heads,
        "d_head": keys.head_dim,
        "d_mlp": keys.intermediate_size,
        "qkv_bias": keys.attention_bias,
        "window_size": keys.window,
        "rope_theta": keys.rope_theta,
        "norm_eps": keys.rms_norm_eps,
        "tied_embeddings": keys.tie_word_embeddings,
        "document_mask": False,
        "init": "normal_0.02",
        **parts,
    }
    return make(ModelConfig, values, where)


def hf_keys(cfg: ModelConfig, layout: str, qk_norm: bool) -> dict[str, Any]:
    """Their keys from our configuration; Qwen3's where there is a qk-norm.

    Raises:
        ConfigError: a field their backbone cannot express.
    """
    _, kv_heads, d_head = head_sizes(cfg)
    refusals = {
        "qk_norm": cfg.qk_norm != qk_norm,
        "qk_norm_eps": cfg.qk_norm and cfg.qk_norm_eps != cfg.norm_eps,
        "window_size": cfg.window_size is not None and not qk_norm,
        "d_mlp": not uniform_width(cfg),
        # Llama's configuration class refuses it, whatever head_dim says.
        "n_heads": not qk_norm and cfg.d_model % cfg.n_heads != 0,
    }
    refuse(cfg, layout, refusals)
    keys = {
        "hidden_size": cfg.d_model,
        "intermediate_size": uniform_width(cfg),
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": d_head,
        "vocab_size": cfg.d_vocab,
        "max_position_embeddings": cfg.n_ctx,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": cfg.norm_eps,
        # Read by older and by newer versions of transformers.
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "attention_bias": cfg.qkv_bias,
        "tie_word_embeddings": cfg.tied_embeddings,
        # Their defaults name tokens that need not mean that here.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if not qk_norm:
        return {**keys, "mlp_bias": False, "pretraining_tp": 1}
    slides = cfg.window_size is not None
    kind = "sliding_attention" if slides else "full_attention"
    return {
        **keys,
        "use_sliding_window": slides,
        "sliding_window": cfg.window_size,
        "max_window_layers": 0 if slides else cfg.n_layers,
        "layer_types": [kind] * cfg.n_layers,
    }


def hf_rules(cfg: ModelConfig) -> Iterator[Rule]:
    """Every tensor of the backbone."""
    d, vocab = cfg.d_model, cfg.d_vocab
    heads, _, d_head = head_sizes(cfg)
    yield one("embed.weight", "model.embed_tokens.weight", (vocab, d))
    for layer in range(cfg.n_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        yield one(ours + "ln1.weight", theirs + "input_layernorm.weight", (d,))
        yield from qkv_rules(cfg, ours + "attn.qkv.", theirs + "self_attn.")
        yield one(ours + "attn.o.weight", theirs + "self_attn.o_proj.weight", (d, heads * d_head))
        yield from qk_norm_rules(cfg, ours + "attn.", theirs + "self_attn.")
        yield one(ours + "ln2.weight", theirs + "post_attention_layernorm.weight", (d,))
        yield from mlp_rules(cfg, layer, theirs + "mlp.")
    yield one("ln_final.weight", "model.norm.weight", (d,))
    if not cfg.tied_embeddings:
        yield one("unembed.weight", "lm_head.weight", (vocab, d))


def output_biases(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """``attention_bias`` puts one on the output projection too, which we do not have."""
    layers = range(cfg.n_layers) if cfg.qkv_bias else ()
    return {f"model.layers.{layer}.self_attn.o_proj.bias": (cfg.d_model,) for layer in layers}
