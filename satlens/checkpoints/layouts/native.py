"""Our own layout: the configuration and the weights under satlens' own names."""

from __future__ import annotations

from typing import Any

import torch

from satlens.checkpoints.layouts.base import Layout, Rule, no_value_residual
from satlens.config import ModelConfig, make, to_dict
from satlens.errors import CheckpointError
from satlens.models.decoder import Decoder

FORMAT, VERSION = "satlens", 1
# What transformers' Auto classes look a class up by; satlens.interop.huggingface defines it.
HUGGING_FACE = {"model_type": "satlens", "architectures": ["SatlensForCausalLM"]}


class Native(Layout):
    """``{"format": "satlens", "version": 1, "model": {...}}``."""

    name = FORMAT
    has_manifest = True

    def matches(self, config: dict[str, Any], value_residual: str | None = None) -> bool:
        return config.get("format") == FORMAT

    def model_config(
        self, config: dict[str, Any], where: str, value_residual: str | None = None
    ) -> ModelConfig:
        no_value_residual(value_residual, self.name)
        version = config.get("version")
        if not isinstance(version, int) or version < 1:
            raise CheckpointError(f"{where}: version: expected a number, found {version!r}")
        if version > VERSION:
            raise CheckpointError(
                f"{where}: version: {version} is newer than {VERSION}, which this satlens reads"
            )
        model = config.get("model")
        if not isinstance(model, dict):
            raise CheckpointError(f"{where}: model: missing")
        return make(ModelConfig, model, f"{where}: model")

    def config_of(self, cfg: ModelConfig) -> dict[str, Any]:
        return {**HUGGING_FACE, "format": FORMAT, "version": VERSION, "model": to_dict(cfg)}

    def rules(self, cfg: ModelConfig) -> list[Rule]:
        with torch.device("meta"):
            state = Decoder(cfg, seed=None).state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        return [Rule(name, shape, ((name, shape),)) for name, shape in shapes.items()]
