"""The shared backbone as flash-linear-attention and the SATFormer repository lay it out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, TypeVar

from pydantic.dataclasses import dataclass

from satlens.checkpoints.layouts.base import Rule, only
from satlens.config import STRICT, ModelConfig, NoValueResidual, ResidualStream, make
from satlens.errors import ConfigError

QK_NORM_EPS = 1e-5
"""Their qk-norm keeps its own default, whatever ``norm_eps`` is."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BackboneKeys:
    """Keys of ``config.json`` that shape the computation, with their defaults there."""

    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    vocab_size: int
    num_kv_heads: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window_size: int | None = None
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    hidden_ratio: float | None = None
    intermediate_size: int | None = None
    hidden_act: Literal["swish", "silu"] = "swish"
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        check_head_split(self.hidden_size, self.num_heads, self.num_kv_heads, "num_heads")
        if self.intermediate_size is not None and self.intermediate_size <= 0:
            raise ValueError(f"intermediate_size: must be positive, got {self.intermediate_size}")

    @property
    def mlp_width(self) -> int:
        """Null means 2/3 of ``hidden_ratio`` widths, rounded up to a multiple of 256."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        width = int(2 * self.hidden_size * (self.hidden_ratio or 4) / 3)
        return 256 * math.ceil(width / 256)


def check_head_split(
    width: int, heads: int, kv_heads: int | None, key: str, kv_key: str = "num_kv_heads"
) -> None:
    """Raise ValueError for heads that do not divide the width, naming both fields."""
    if width <= 0 or heads <= 0 or width % heads:
        raise ValueError(f"hidden_size={width} does not split into {key}={heads} heads")
    if kv_heads is not None and (kv_heads <= 0 or heads % kv_heads):
        raise ValueError(f"{key}={heads} is not a multiple of {kv_key}={kv_heads}")


K = TypeVar("K", bound=BackboneKeys)


def read_keys(cls: type[K], config: dict[str, Any], where: str) -> K:
    """The keys that matter, checked; those that change nothing computed are ignored.

    Raises:
        ConfigError: missing, mistyped or impossible values; features satlens does not have.
    """
    only(config, "elementwise_affine", (True,), where)
    only(config, "rope_scaling", (None,), where)
    only(config, "quantization_config", (None,), where)
    only(config, "attn", (None,), where)
    if config.get("attn_res_block_size") is not None:
        raise ConfigError(
            f"{where}: attn_res_block_size: counts layers (as in Kimi K3's configurations); this "
            "layout states attnres_block_size, in sublayers"
        )
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return make(cls, {k: v for k, v in config.items() if k in known}, where)


def backbone_config(keys: BackboneKeys, where: str, **parts: Any) -> ModelConfig:
    """Our configuration from their keys, a value residual and a stream."""
    values = {
        "d_vocab": keys.vocab_size,
        "n_ctx": keys.max_position_embeddings,
        "n_layers": keys.num_hidden_layers,
        "d_model": keys.hidden_size,
        "n_heads": keys.num_heads,
        "n_key_value_heads": keys.num_kv_heads,
        "d_mlp": keys.mlp_width,
        "qk_norm": keys.qk_norm,
        "qkv_bias": keys.qkv_bias,
        "window_size": keys.window_size,
        "rope_theta": keys.rope_theta,
        "norm_eps": keys.norm_eps,
        "qk_norm_eps": QK_NORM_EPS,
        "tied_embeddings": keys.tie_word_embeddings,
        "document_mask": False,
        "init": "normal_0.02",
        **parts,
    }
    return make(ModelConfig, values, where)


def backbone_keys(cfg: ModelConfig, layout: str, mlp_width: int | None = None) -> dict[str, Any]:
    """Their keys from our configuration.

    Args:
        cfg: ours.
        layout: name of theirs, for errors.
        mlp_width: what ``intermediate_size`` states, where it is not every layer's width.

    Raises:
        ConfigError: a field their backbone cannot express.
    """
    _, _, d_head = head_sizes(cfg)
    width = mlp_width or uniform_width(cfg)
    refusals = {
        "d_head": cfg.n_heads * d_head != cfg.d_model,
        "d_mlp": not width,
        "qk_norm_eps": cfg.qk_norm and cfg.qk_norm_eps != QK_NORM_EPS,
    }
    refuse(cfg, layout, refusals)
    return {
        "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.n_layers,
        "num_heads": cfg.n_heads,
        "num_kv_heads": cfg.n_key_value_heads,
        "qkv_bias": cfg.qkv_bias,
        "qk_norm": cfg.qk_norm,
        "window_size": cfg.window_size,
        "rope_theta": cfg.rope_theta,
        "max_position_embeddings": cfg.n_ctx,
        "hidden_ratio": 4,
        "intermediate_size": width,
        "hidden_act": "swish",
        "initializer_range": 0.02,
        "elementwise_affine": True,
        "norm_eps": cfg.norm_eps,
        "vocab_size": cfg.d_vocab,
        "tie_word_embeddings": cfg.tied_embeddings,
    }


def cannot_express(layout: str, field: str, value: object) -> ConfigError:
    """The error for a field a layout has no place for."""
    return ConfigError(f"{field}: the {layout} layout cannot express {value!r}")


def refuse(cfg: ModelConfig, layout: str, refusals: dict[str, bool]) -> None:
    """Raise for the first field that is refused; the parts' fields as ``stream.block_size``.

    Raises:
        ConfigError: naming the field and its value.
    """
    for field, refused in refusals.items():
        if refused:
            value = cfg
            for name in field.split("."):
                value = getattr(value, name)
            raise cannot_express(layout, field, getattr(value, "kind", value))


def require_plain(cfg: ModelConfig, layout: str) -> None:
    """Raise unless the model is an ordinary transformer."""
    refusals = {
        "stream": not isinstance(cfg.stream, ResidualStream),
        "value_residual": not isinstance(cfg.value_residual, NoValueResidual),
    }
    refuse(cfg, layout, refusals)


def uniform_width(cfg: ModelConfig) -> int | None:
    """The MLP width that all layers have; None where they differ."""
    widths = {cfg.d_mlp_of(layer) for layer in range(cfg.n_layers)}
    return widths.pop() if len(widths) == 1 else None


# Our attention norms and theirs.
Norms = tuple[tuple[str, str], ...]


def backbone_rules(
    cfg: ModelConfig, attention_norms: Norms = (("ln1", "attn_norm"),)
) -> Iterator[Rule]:
    """Every tensor of the backbone."""
    d, vocab = cfg.d_model, cfg.d_vocab
    yield one("embed.weight", "model.embeddings.weight", (vocab, d))
    heads, _, d_head = head_sizes(cfg)
    for layer in range(cfg.n_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        for norm, their_norm in attention_norms:
            yield one(f"{ours}{norm}.weight", f"{theirs}{their_norm}.weight", (d,))
        yield from qkv_rules(cfg, ours + "attn.qkv.", theirs + "attn.")
        yield one(ours + "attn.o.weight", theirs + "attn.o_proj.weight", (d, heads * d_head))
        yield from qk_norm_rules(cfg, ours + "attn.", theirs + "attn.")
        yield one(ours + "ln2.weight", theirs + "mlp_norm.weight", (d,))
        yield from mlp_rules(cfg, layer, theirs + "mlp.")
    yield one("ln_final.weight", "model.norm.weight", (d,))
    if not cfg.tied_embeddings:
        yield one("unembed.weight", "lm_head.weight", (vocab, d))


def head_sizes(cfg: ModelConfig) -> tuple[int, int, int]:
    """(query heads, KV heads, head width), which a built configuration always states."""
    assert cfg.n_key_value_heads is not None
    assert cfg.d_head is not None
    return cfg.n_heads, cfg.n_key_value_heads, cfg.d_head


def one(ours: str, theirs: str, shape: tuple[int, ...], own: tuple[int, ...] | None = None) -> Rule:
    """A tensor that is one tensor in both, of another shape in theirs where ``own`` differs."""
    return Rule(ours, shape if own is None else own, ((theirs, shape),))


def qkv_rules(
    cfg: ModelConfig,
    ours: str,
    theirs: str,
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
) -> Iterator[Rule]:
    """The fused projection, rows q | k | v."""
    heads, kv_heads, d_head = head_sizes(cfg)
    q, kv = heads * d_head, kv_heads * d_head
    projections = dict(zip(names, (q, kv, kv), strict=True))
    for kind, tail in (("weight", (cfg.d_model,)), ("bias", ())):
        if kind == "weight" or cfg.qkv_bias:
            parts = tuple((f"{theirs}{n}.{kind}", (rows, *tail)) for n, rows in projections.items())
            yield Rule(ours + kind, (q + 2 * kv, *tail), parts)


def qk_norm_rules(cfg: ModelConfig, ours: str, theirs: str) -> Iterator[Rule]:
    """The norms over query and key heads, where there are any."""
    for norm in ("q_norm", "k_norm") if cfg.qk_norm else ():
        yield one(f"{ours}{norm}.weight", f"{theirs}{norm}.weight", (head_sizes(cfg)[2],))


def mlp_rules(
    cfg: ModelConfig,
    layer: int,
    theirs: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Rule]:
    """The fused MLP input, rows gate | up, and its output; an MLP of width 0 has no tensors."""
    d, m = cfg.d_model, cfg.d_mlp_of(layer)
    if m:
        gate, up, down = (f"{theirs}{name}.weight" for name in names)
        yield Rule(f"blocks.{layer}.mlp.gate_up.weight", (2 * m, d), ((gate, (m, d)), (up, (m, d))))
        yield one(f"blocks.{layer}.mlp.down.weight", down, (d, m))


def tied_head(cfg: ModelConfig, embeddings: str) -> tuple[str, str] | None:
    """A tied checkpoint may repeat its table as ``lm_head``."""
    return ("lm_head.weight", embeddings) if cfg.tied_embeddings else None
