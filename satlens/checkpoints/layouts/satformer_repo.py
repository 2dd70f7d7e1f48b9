"""The SATFormer repository's ``final/`` and ``latest/`` folders (arXiv 2605.03953 and its code)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from satlens.checkpoints.layouts.backbone import (
    backbone_config,
    backbone_keys,
    backbone_rules,
    cannot_express,
    read_keys,
    tied_head,
)
from satlens.checkpoints.layouts.base import Layout, Rule, no_value_residual
from satlens.checkpoints.layouts.satformer_kinds import KINDS, LAYOUT, Kind, plain_values
from satlens.config import ModelConfig, ResidualStream

_BY_TYPE = {name: kind for kind in KINDS for name in (kind.model_type, *kind.aliases)}
_FUSED = "_hc.dynamic_fused_proj"


class SatformerRepo(Layout):
    """``model_type`` transformer, ResFormer, SATFormer, denseformer, muddformer or dhc.

    The MUDDFormer release shares ``muddformer``: there the width is ``dim``, here ``hidden_size``.
    """

    name = LAYOUT

    def matches(self, config: dict[str, Any], value_residual: str | None = None) -> bool:
        kind = config.get("model_type")
        fla = kind == "transformer" and "attnres_block_size" in config
        release = kind == "muddformer" and "dim" in config
        return kind in _BY_TYPE and not fla and not release

    def model_config(
        self, config: dict[str, Any], where: str, value_residual: str | None = None
    ) -> ModelConfig:
        no_value_residual(value_residual, self.name)
        kind = _BY_TYPE[config["model_type"]]
        keys = read_keys(kind.keys, config, where)
        return backbone_config(keys, where, **kind.parts(keys))

    def config_of(self, cfg: ModelConfig) -> dict[str, Any]:
        kind = _kind_of(cfg)
        keys = {**backbone_keys(cfg, self.name, kind.mlp_width(cfg)), **kind.keys_of(cfg)}
        return {**keys, "model_type": kind.model_type, "architectures": [kind.architecture]}

    def rules(self, cfg: ModelConfig) -> list[Rule]:
        kind = _kind_of(cfg)
        return [*backbone_rules(cfg, kind.attention_norms), *kind.rules(cfg)]

    def tied_copy(self, cfg: ModelConfig) -> tuple[str, str] | None:
        return tied_head(cfg, "model.embeddings.weight")

    def modernised(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Hyper-Connections were also published with one projection, columns beta | alpha."""
        renamed = {}
        for name, tensor in tensors.items():
            if name.endswith(_FUSED) and tensor.ndim == 2:
                stem = name.removesuffix("fused_proj")
                renamed[stem + "beta_proj"] = tensor[:, 0]
                renamed[stem + "alpha_proj"] = tensor[:, 1:]
            else:
                renamed[name] = tensor
        return renamed


def _kind_of(cfg: ModelConfig) -> Kind:
    """The kind to write a model as.

    Raises:
        ConfigError: none of the six.
    """
    if not isinstance(cfg.stream, ResidualStream) and not plain_values(cfg):
        raise cannot_express(LAYOUT, "value_residual", cfg.value_residual.kind)
    for kind in KINDS:
        if kind.fits(cfg):
            return kind
    raise cannot_express(LAYOUT, "stream", cfg.stream.kind)


def recipe_config(recipe: dict[str, Any]) -> dict[str, Any] | None:
    """The ``config.json`` of the model that one of the repository's recipes trains.

    Its ``configs/{model}/{size}.json`` name a class and the keys that differ from its defaults.
    None for anything else.
    """
    model = recipe.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("config_overrides"), dict):
        return None
    name = str(model.get("config_class_name")).removesuffix("Config")
    for model_type, kind in _BY_TYPE.items():
        named = (kind.architecture.removesuffix("ForCausalLM"), *kind.aliases)
        if name in named:
            return {**model["config_overrides"], "model_type": model_type}
    return None
