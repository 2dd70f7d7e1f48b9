"""flash-linear-attention ``transformer`` checkpoints, with Attention Residuals, and our RD form.

RD-AttnRes has no published layout; ours is theirs plus ``attn_res_v_proj`` (the query of the
values' route, present under every control) and the key ``route_control``.
"""

from __future__ import annotations

from typing import Any

from pydantic.dataclasses import dataclass

from satlens.checkpoints.layouts.backbone import (
    BackboneKeys,
    backbone_config,
    backbone_keys,
    backbone_rules,
    cannot_express,
    one,
    read_keys,
    refuse,
    tied_head,
)
from satlens.checkpoints.layouts.base import Layout, Rule, no_value_residual, only
from satlens.config import (
    STRICT,
    AttnResStream,
    ModelConfig,
    NoValueResidual,
    ResidualStream,
    RoleDecoupledStream,
    RouteControl,
    Stream,
)
from satlens.errors import ConfigError

_RD = "rd_attnres"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AttnResKeys(BackboneKeys):
    """Their keys of Attention Residuals, on top of the backbone's."""

    attnres_block_size: int | None = None
    route_control: RouteControl = "none"


class Fla(Layout):
    """``model_type`` transformer with ``attnres_block_size`` (in sublayers), or rd_attnres."""

    name = "fla"

    def matches(self, config: dict[str, Any], value_residual: str | None = None) -> bool:
        kind = config.get("model_type")
        return kind == _RD or (kind == "transformer" and "attnres_block_size" in config)

    def model_config(
        self, config: dict[str, Any], where: str, value_residual: str | None = None
    ) -> ModelConfig:
        no_value_residual(value_residual, self.name)
        keys = read_keys(AttnResKeys, config, where)
        size = keys.attnres_block_size
        stream: Stream = ResidualStream() if size is None else AttnResStream(block_size=size)
        if config["model_type"] != _RD:
            only(config, "route_control", ("none",), where)
        else:
            if size is None:
                raise ConfigError(f"{where}: attnres_block_size: missing")
            stream = RoleDecoupledStream(block_size=size, control=keys.route_control)
        return backbone_config(keys, where, stream=stream)

    def config_of(self, cfg: ModelConfig) -> dict[str, Any]:
        if not isinstance(cfg.value_residual, NoValueResidual):
            raise cannot_express(self.name, "value_residual", cfg.value_residual.kind)
        keys = {**backbone_keys(cfg, self.name), "attnres_block_size": None}
        stream = cfg.stream
        plain = {"model_type": "transformer", "architectures": ["TransformerForCausalLM"]}
        if isinstance(stream, ResidualStream):
            return {**keys, **plain}
        if not isinstance(stream, AttnResStream | RoleDecoupledStream):
            raise cannot_express(self.name, "stream", stream.kind)
        own_gamma = isinstance(stream, RoleDecoupledStream) and stream.own_value_gamma
        refusals = {
            "stream.output_read": not stream.output_read,
            "stream.route_bias": stream.route_bias,
            "stream.own_value_gamma": own_gamma,
        }
        refuse(cfg, self.name, refusals)
        keys["attnres_block_size"] = stream.block_size
        if isinstance(stream, AttnResStream):
            return {**keys, **plain}
        rd = {"model_type": _RD, "architectures": ["RDAttnResForCausalLM"]}
        return {**keys, "route_control": stream.control, **rd}

    def rules(self, cfg: ModelConfig) -> list[Rule]:
        rules = list(backbone_rules(cfg))
        if isinstance(cfg.stream, ResidualStream):
            return rules
        row, width = (1, cfg.d_model), (cfg.d_model,)
        for layer in range(cfg.n_layers):
            for read in ("attn", "mlp"):
                ours, theirs = f"blocks.{layer}.{read}_read.", f"model.layers.{layer}.{read}_res_"
                rules.append(one(ours + "query", theirs + "proj.weight", row, width))
                rules.append(one(ours + "gamma", theirs + "norm.weight", width))
                if read == "attn" and isinstance(cfg.stream, RoleDecoupledStream):
                    rules.append(one(ours + "query_v", theirs + "v_proj.weight", row, width))
        rules.append(one("out_read.query", "model.res_proj.weight", row, width))
        rules.append(one("out_read.gamma", "model.res_norm.weight", width))
        return rules

    def tied_copy(self, cfg: ModelConfig) -> tuple[str, str] | None:
        return tied_head(cfg, "model.embeddings.weight")
