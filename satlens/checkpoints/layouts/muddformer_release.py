"""The MUDDFormer release (Caiyun-AI, arXiv 2502.12170): its 2.8B checkpoint and smaller kin.

FFN widths are always re-allocated over depth, to multiples of 128 that may be zero. Layer 0, which
reads the embedding in every way, has one attention norm. Rotary tables are exact here; the release
rounds its own to bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from satlens.checkpoints.layouts.backbone import (
    head_sizes,
    mlp_rules,
    one,
    qk_norm_rules,
    qkv_rules,
    refuse,
)
from satlens.checkpoints.layouts.base import Layout, Rule, no_value_residual, only
from satlens.checkpoints.layouts.mudd import mudd_reads
from satlens.checkpoints.layouts.widths import allocated, width_before_reallocation
from satlens.config import STRICT, ModelConfig, MuddStream, NoValueResidual, make

_MLP = ("w1", "w3", "w2")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MuddReleaseKeys:
    """Keys of ``config.json`` that shape the computation, with their defaults there."""

    dim: int
    n_layer: int
    n_head: int
    vocab_size: int
    intermediate_size: int
    head_dim: int
    block_size: int = 2048
    n_local_heads: int = -1
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    use_qk_norm: bool = True
    dense: Literal[True] = True
    dynamic_dense: Literal[True] = True
    sepln: Literal[True] = True
    dense_type: Literal["qkvr"] = "qkvr"
    expand_last: bool = False
    round64: bool = False
    tie_word_embeddings: Literal[False] = False

    def __post_init__(self) -> None:
        if self.n_head * self.head_dim != self.dim:
            raise ValueError(
                f"dim={self.dim} is not n_head={self.n_head} x head_dim={self.head_dim}"
            )
        if self.intermediate_size <= 0:
            raise ValueError(f"intermediate_size: must be positive, got {self.intermediate_size}")


class MuddformerRelease(Layout):
    """``model_type`` muddformer with ``dim``; the SATFormer repository's has ``hidden_size``."""

    name = "muddformer_release"

    def matches(self, config: dict[str, Any], value_residual: str | None = None) -> bool:
        return config.get("model_type") == "muddformer" and "dim" in config

    def model_config(
        self, config: dict[str, Any], where: str, value_residual: str | None = None
    ) -> ModelConfig:
        no_value_residual(value_residual, self.name)
        only(config, "quantization_config", (None,), where)
        only(config, "hidden_size", (None, config["dim"]), where)
        known = {field.name for field in fields(MuddReleaseKeys)}  # type: ignore[arg-type]
        keys = make(MuddReleaseKeys, {k: v for k, v in config.items() if k in known}, where)
        stream = MuddStream(
            shared_first_norm=True, expand_last=keys.expand_last, round64=keys.round64
        )
        values = {
            "d_vocab": keys.vocab_size,
            "n_ctx": keys.block_size,
            "n_layers": keys.n_layer,
            "d_model": keys.dim,
            "n_heads": keys.n_head,
            "n_key_value_heads": None if keys.n_local_heads == -1 else keys.n_local_heads,
            "d_head": keys.head_dim,
            "d_mlp": allocated(keys.intermediate_size, keys.n_layer, "release"),
            **({"qk_norm": True, "qk_norm_eps": keys.norm_eps} if keys.use_qk_norm else {}),
            "rope_theta": keys.rope_base,
            "norm_eps": keys.norm_eps,
            "document_mask": False,
            "init": "normal_0.02",
            "stream": stream,
        }
        return make(ModelConfig, values, where)

    def config_of(self, cfg: ModelConfig) -> dict[str, Any]:
        _, kv_heads, d_head = head_sizes(cfg)
        stream = cfg.stream
        refuse(cfg, self.name, {"stream": not isinstance(stream, MuddStream)})
        assert isinstance(stream, MuddStream)
        width = width_before_reallocation(cfg, "release")
        refusals = {
            "value_residual": not isinstance(cfg.value_residual, NoValueResidual),
            "stream.pre_post_norm": stream.pre_post_norm,
            "stream.shared_first_norm": not stream.shared_first_norm,
            "d_head": cfg.n_heads * d_head != cfg.d_model,
            "d_mlp": width is None,
            "qkv_bias": cfg.qkv_bias,
            "window_size": cfg.window_size is not None,
            "qk_norm_eps": cfg.qk_norm and cfg.qk_norm_eps != cfg.norm_eps,
            "tied_embeddings": cfg.tied_embeddings,
        }
        refuse(cfg, self.name, refusals)
        return {
            "model_type": "muddformer",
            "architectures": ["MUDDFormer"],
            "dim": cfg.d_model,
            "n_layer": cfg.n_layers,
            "n_head": cfg.n_heads,
            "n_local_heads": kv_heads,
            "head_dim": d_head,
            "vocab_size": cfg.d_vocab,
            "block_size": cfg.n_ctx,
            "intermediate_size": width,
            "rope_base": cfg.rope_theta,
            "norm_eps": cfg.norm_eps,
            "use_qk_norm": cfg.qk_norm,
            "dense": True,
            "dynamic_dense": True,
            "sepln": True,
            "dense_type": "qkvr",
            "expand_last": stream.expand_last,
            "round64": stream.round64,
            "tie_word_embeddings": False,
            "use_layer_cache": True,
            "use_gradient_checkpointing": False,
            "is_training": False,
        }

    def rules(self, cfg: ModelConfig) -> list[Rule]:
        return [*_backbone(cfg), *_reads(cfg)]

    def zeros(self, cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Zero-width MLPs have tensors there, without elements."""
        d = cfg.d_model
        empty = [layer for layer in range(cfg.n_layers) if not cfg.d_mlp_of(layer)]
        return {
            f"layers.{layer}.feed_forward.{name}.weight": shape
            for layer in empty
            for name, shape in zip(_MLP, ((0, d), (0, d), (d, 0)), strict=True)
        }


def _backbone(cfg: ModelConfig) -> Iterator[Rule]:
    d, vocab = cfg.d_model, cfg.d_vocab
    yield one("embed.weight", "tok_embeddings.weight", (vocab, d))
    for layer in range(cfg.n_layers):
        ours, theirs = f"blocks.{layer}.", f"layers.{layer}."
        if layer == 0:
            yield one(ours + "ln1.weight", theirs + "attention_norm.weight", (d,))
        else:
            for i, way in enumerate("qkv"):
                norm = f"{theirs}attention_norms.{i}.weight"
                yield one(f"{ours}ln1_{way}.weight", norm, (d,))
        projections = ("wq", "wk", "wv")
        yield from qkv_rules(cfg, ours + "attn.qkv.", theirs + "attention.", projections)
        yield from qk_norm_rules(cfg, ours + "attn.", theirs + "attention.")
        yield one(ours + "attn.o.weight", theirs + "attention.wo.weight", (d, d))
        yield one(ours + "ln2.weight", theirs + "ffn_norm.weight", (d,))
        yield from mlp_rules(cfg, layer, theirs + "feed_forward.", _MLP)
    yield one("ln_final.weight", "norm.weight", (d,))
    yield one("unembed.weight", "output.weight", (vocab, d))


def _reads(cfg: ModelConfig) -> Iterator[Rule]:
    for read in mudd_reads(cfg):
        theirs, weights = f"dynamic_dense.{read.follows}.", read.ways * read.sources
        static = f"dense_bs.{read.follows}"
        yield one(read.ours + "static", static, (read.ways, read.sources))
        yield one(read.ours + "w1.weight", theirs + "w1.weight", (read.hidden, cfg.d_model))
        yield one(read.ours + "w2.weight", theirs + "w2.weight", (weights, read.hidden))
