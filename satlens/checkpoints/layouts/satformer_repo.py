"""The SATFormer repository's ``final/`` and ``latest/`` folders: its residual-stream models."""

from __future__ import annotations

from typing import Any

from pydantic.dataclasses import dataclass

from satlens.checkpoints.layouts.backbone import (
    BackboneKeys,
    backbone_config,
    backbone_keys,
    backbone_rules,
    cannot_express,
    head_sizes,
    one,
    read_keys,
    require_residual,
    tied_head,
)
from satlens.checkpoints.layouts.base import Layout, Rule, no_value_residual
from satlens.config import (
    STRICT,
    GatedValueResidual,
    GateFunction,
    ModelConfig,
    NoValueResidual,
    StaticValueResidual,
    ValueResidual,
)
from satlens.errors import ConfigError

_LATER = ("denseformer", "muddformer", "dhc")
_MIXING = "attn.value_residual_mixing."


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValueKeys(BackboneKeys):
    """Their keys of a value residual, on top of the backbone's."""

    use_value_residual: bool = True
    value_residual_gate: GateFunction = "relu"
    value_residual_proj_bias: bool = False
    value_residual_lambda2_init: float = 0.5
    value_residual_last_k: int | None = None


class SatformerRepo(Layout):
    """``model_type`` transformer, ResFormer or SATFormer (arXiv 2605.03953 and its code)."""

    name = "satformer_repo"

    def matches(self, config: dict[str, Any]) -> bool:
        kind = config.get("model_type")
        plain = kind == "transformer" and "attnres_block_size" not in config
        return plain or kind in ("ResFormer", "SATFormer", *_LATER)

    def model_config(
        self, config: dict[str, Any], where: str, value_residual: str | None = None
    ) -> ModelConfig:
        no_value_residual(value_residual, self.name)
        kind = config["model_type"]
        if kind in _LATER:
            raise ConfigError(f"{where}: model_type: {kind!r} models are not supported yet")
        keys = read_keys(ValueKeys, config, where)
        return backbone_config(keys, where, value_residual=_value_residual(kind, keys))

    def config_of(self, cfg: ModelConfig) -> dict[str, Any]:
        require_residual(cfg, self.name)
        keys = backbone_keys(cfg, self.name)
        residual = cfg.value_residual
        if isinstance(residual, NoValueResidual):
            return {
                **keys,
                "model_type": "transformer",
                "architectures": ["TransformerForCausalLM"],
            }
        keys |= {"use_value_residual": True, "value_residual_last_k": residual.last_k}
        if isinstance(residual, GatedValueResidual):
            return {
                **keys,
                "value_residual_gate": residual.gate,
                "value_residual_proj_bias": residual.bias,
                "model_type": "SATFormer",
                "architectures": ["SATFormerForCausalLM"],
            }
        if residual.mode != "learnable_plus":
            raise cannot_express(self.name, "value_residual.mode", residual.mode)
        if cfg.n_layers == 1:
            raise cannot_express(self.name, "n_layers", 1)
        return {
            **keys,
            "value_residual_lambda2_init": residual.lambda2_init,
            "model_type": "ResFormer",
            "architectures": ["ResFormerForCausalLM"],
        }

    def rules(self, cfg: ModelConfig) -> list[Rule]:
        rules = list(backbone_rules(cfg))
        residual = cfg.value_residual
        for layer in cfg.value_layers:
            ours, theirs = f"blocks.{layer}.attn.values.", f"model.layers.{layer}.{_MIXING}"
            if isinstance(residual, StaticValueResidual):
                rules.append(one(ours + "lambda2", theirs + "lambda2", ()))
                continue
            assert isinstance(residual, GatedValueResidual)
            shape = (head_sizes(cfg)[1], cfg.d_model)
            rules.append(one(ours + "alpha.weight", theirs + "alpha_proj.weight", shape))
            if residual.bias:
                rules.append(one(ours + "alpha.bias", theirs + "alpha_proj.bias", shape[:1]))
        if isinstance(residual, StaticValueResidual) and cfg.n_layers > 1:
            manager = "model.lambda_manager.lambda_"
            rules.append(one("shared_lambda.scale", manager + "scale", ()))
            rules.append(one("shared_lambda.logits", manager + "logits", (cfg.n_layers - 1,)))
        return rules

    def tied_copy(self, cfg: ModelConfig) -> tuple[str, str] | None:
        return tied_head(cfg, "model.embeddings.weight")


def _value_residual(kind: str, keys: ValueKeys) -> ValueResidual:
    if kind == "transformer" or not keys.use_value_residual:
        return NoValueResidual()
    last_k = keys.value_residual_last_k
    if kind == "SATFormer":
        bias = keys.value_residual_proj_bias
        return GatedValueResidual(gate=keys.value_residual_gate, bias=bias, last_k=last_k)
    return StaticValueResidual(lambda2_init=keys.value_residual_lambda2_init, last_k=last_k)
