"""Folders that ``satlens.interop.huggingface`` models write with ``save_pretrained``.

Their ``config.json`` holds our configuration among transformers' own keys, and their tensors sit
below ``model.``. There is no manifest: transformers' tools rewrite single files of a folder.
"""

from __future__ import annotations

from typing import Any, NoReturn

from satlens.checkpoints.layouts.base import Rule
from satlens.checkpoints.layouts.native import Native
from satlens.config import ModelConfig
from satlens.errors import ConfigError

PREFIX = "model."


class HuggingFace(Native):
    """Our configuration with ``transformers_version`` beside it; read only."""

    name = "huggingface"
    writable = False
    has_manifest = False

    def matches(self, config: dict[str, Any], value_residual: str | None = None) -> bool:
        return super().matches(config) and "transformers_version" in config

    def config_of(self, cfg: ModelConfig) -> NoReturn:
        raise ConfigError(f"layout: {self.name} is read only")

    def rules(self, cfg: ModelConfig) -> list[Rule]:
        return [
            rule._replace(parts=tuple((PREFIX + name, shape) for name, shape in rule.parts))
            for rule in super().rules(cfg)
        ]
