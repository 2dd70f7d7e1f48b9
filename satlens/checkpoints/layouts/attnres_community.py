"""The community's Attention-Residuals checkpoints: Qwen3 with reads over depth.

A Qwen3 (``model_type`` qwen3_attnres, with its qk-norm) whose layers add
``{attn_res,mlp_res}_{proj,norm}``, whose model adds ``final_res_{proj,norm}`` for the output read,
and whose value route, where there is one, is ``v_res_{proj,norm}`` with a gamma of its own.
llama_attnres, the same on a Llama without qk-norm, is our extension for models that have none.

What its public code leaves open, and is taken here from the equations (arXiv 2603.15031):

* ``attnres_mode`` block and full are Block and Full AttnRes; block_v adds the value route. There,
  the public block_v code computes that route's mixture without handing it to the value projection;
  here the values receive it.
* ``attnres_num_blocks`` n makes blocks of ceil(L / n) layers. Kimi K3's key ``attn_res_block_size``
  counts layers too and flash-linear-attention's ``attnres_block_size`` sublayers; each is read in
  its own unit, and a size whose unit nothing tells is refused.
* Modes over cumulative states or additive ones, gates and null sources are other models: refused.
  So is the code's earlier form (``attnres_recency_bias_init``), whose first block holds the
  embedding twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from satlens.checkpoints.layouts.backbone import one, refuse, tied_head
from satlens.checkpoints.layouts.base import Layout, Rule, no_value_residual
from satlens.checkpoints.layouts.hf_backbone import (
    LlamaKeys,
    hf_config,
    hf_keys,
    hf_rules,
    output_biases,
    read_hf_keys,
)
from satlens.checkpoints.layouts.hf_qwen3 import Qwen3Keys, qk_normed
from satlens.config import (
    STRICT,
    AttnResStream,
    ModelConfig,
    NoValueResidual,
    RoleDecoupledStream,
    Stream,
    make,
)
from satlens.errors import ConfigError

_QWEN3, _LLAMA = "qwen3_attnres", "llama_attnres"
_SIZES = ("attnres_num_blocks", "attn_res_block_size", "attnres_block_size")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RouteKeys:
    """Keys of the reads over depth."""

    attnres_mode: Literal["block", "full", "block_v"] = "block"
    attnres_num_blocks: int | None = None
    attn_res_block_size: int | None = None
    attnres_block_size: int | None = None
    attnres_gate_type: Literal["bias"] = "bias"
    attnres_use_null_source: Literal[False] = False
    attnres_recency_bias_init: Literal[None] = None

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"{name}: must be positive, got {size}")
        if len(self.sizes) > 1:
            raise ValueError(f"{' and '.join(self.sizes)}: state one of them, their units differ")
        if not self.sizes and self.attnres_mode != "full":
            raise ValueError("attnres_num_blocks: missing")

    @property
    def sizes(self) -> dict[str, int]:
        """The block sizes that are stated, each in its own unit."""
        return {key: getattr(self, key) for key in _SIZES if getattr(self, key) is not None}

    def sublayers(self, n_layers: int) -> int:
        """Block size in sublayers."""
        if self.attnres_mode == "full":
            return 1
        ((key, size),) = self.sizes.items()
        if key == "attnres_num_blocks":
            return 2 * -(-n_layers // size)
        return 2 * size if key == "attn_res_block_size" else size


class AttnResCommunity(Layout):
    """``model_type`` qwen3_attnres or llama_attnres."""

    name = "attnres_community"

    def matches(self, config: dict[str, Any], value_residual: str | None = None) -> bool:
        return config.get("model_type") in (_QWEN3, _LLAMA)

    def model_config(
        self, config: dict[str, Any], where: str, value_residual: str | None = None
    ) -> ModelConfig:
        no_value_residual(value_residual, self.name)
        for key, value in config.items():
            if "block" in key and key not in _SIZES and value is not None:
                raise ConfigError(
                    f"{where}: {key}: may count layers or sublayers; state attnres_num_blocks, "
                    "attn_res_block_size (layers) or attnres_block_size (sublayers)"
                )
        known = {field.name for field in fields(RouteKeys)}  # type: ignore[arg-type]
        routes = make(RouteKeys, {k: v for k, v in config.items() if k in known}, where)
        qwen3 = config["model_type"] == _QWEN3
        keys = read_hf_keys(Qwen3Keys if qwen3 else LlamaKeys, config, where)
        size = routes.sublayers(keys.num_hidden_layers)
        stream: Stream = AttnResStream(block_size=size)
        if routes.attnres_mode == "block_v":
            stream = RoleDecoupledStream(block_size=size, own_value_gamma=True)
        return hf_config(keys, where, stream=stream, **(qk_normed(keys) if qwen3 else {}))

    def config_of(self, cfg: ModelConfig) -> dict[str, Any]:
        stream = cfg.stream
        two_routes = isinstance(stream, RoleDecoupledStream)
        refusals = {
            "value_residual": not isinstance(cfg.value_residual, NoValueResidual),
            "stream": not isinstance(stream, AttnResStream | RoleDecoupledStream),
        }
        refuse(cfg, self.name, refusals)
        assert isinstance(stream, AttnResStream | RoleDecoupledStream)
        blocks = _n_blocks(cfg.n_layers, stream.block_size)
        full = not two_routes and stream.block_size == 1
        refusals = {
            "stream.control": two_routes and stream.control != "none",
            "stream.own_value_gamma": two_routes and not stream.own_value_gamma,
            "stream.output_read": not stream.output_read,
            "stream.route_bias": stream.route_bias,
            "stream.block_size": blocks is None and not full,
        }
        refuse(cfg, self.name, refusals)
        kind = _QWEN3 if cfg.qk_norm else _LLAMA
        architecture = f"{'Qwen3' if cfg.qk_norm else 'Llama'}AttnResForCausalLM"
        return {
            **hf_keys(cfg, self.name, cfg.qk_norm),
            "model_type": kind,
            "architectures": [architecture],
            "attnres_mode": "full" if full else "block_v" if two_routes else "block",
            "attnres_num_blocks": cfg.n_layers if full else blocks,
            "attnres_gate_type": "bias",
            "attnres_use_null_source": False,
        }

    def rules(self, cfg: ModelConfig) -> list[Rule]:
        return [*hf_rules(cfg), *_reads(cfg)]

    def zeros(self, cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
        return output_biases(cfg)

    def tied_copy(self, cfg: ModelConfig) -> tuple[str, str] | None:
        return tied_head(cfg, "model.embed_tokens.weight")


def _n_blocks(n_layers: int, block_size: int) -> int | None:
    """Number of blocks that gives a block size in sublayers; None if none does."""
    layers, rest = divmod(block_size, 2)
    blocks = -(-n_layers // layers) if layers else 0
    exact = blocks and not rest and -(-n_layers // blocks) == layers
    return blocks if exact else None


def _reads(cfg: ModelConfig) -> Iterator[Rule]:
    row, width = (1, cfg.d_model), (cfg.d_model,)

    def read(ours: str, theirs: str, role: str = "") -> Iterator[Rule]:
        yield one(f"{ours}query{role}", f"{theirs}_proj.weight", row, width)
        yield one(f"{ours}gamma{role}", f"{theirs}_norm.weight", width)

    for layer in range(cfg.n_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        yield from read(ours + "attn_read.", theirs + "attn_res")
        if isinstance(cfg.stream, RoleDecoupledStream):
            yield from read(ours + "attn_read.", theirs + "v_res", "_v")
        yield from read(ours + "mlp_read.", theirs + "mlp_res")
    yield from read("out_read.", "model.final_res")
