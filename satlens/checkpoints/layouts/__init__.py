"""Published checkpoint layouts, one file each, and our own."""

from __future__ import annotations

from typing import Any

from satlens.checkpoints.layouts.attnres_community import AttnResCommunity
from satlens.checkpoints.layouts.base import Layout
from satlens.checkpoints.layouts.fla import Fla
from satlens.checkpoints.layouts.hf_llama import HuggingFaceLlama, ResformerRelease
from satlens.checkpoints.layouts.hf_qwen3 import HuggingFaceQwen3
from satlens.checkpoints.layouts.huggingface import HuggingFace
from satlens.checkpoints.layouts.muddformer_release import MuddformerRelease
from satlens.checkpoints.layouts.native import Native
from satlens.checkpoints.layouts.satformer_repo import SatformerRepo
from satlens.errors import CheckpointError, ConfigError

# HuggingFace narrows Native and is asked before it.
LAYOUTS: tuple[Layout, ...] = (
    HuggingFace(),
    Native(),
    SatformerRepo(),
    Fla(),
    HuggingFaceLlama(),
    HuggingFaceQwen3(),
    ResformerRelease(),
    MuddformerRelease(),
    AttnResCommunity(),
)


def layout_of(config: dict[str, Any], where: str, value_residual: str | None = None) -> Layout:
    """The layout a ``config.json`` is in, given what the caller said of its value residual.

    Raises:
        CheckpointError: in none of them.
    """
    for layout in LAYOUTS:
        if layout.matches(config, value_residual):
            return layout
    kind = config.get("model_type")
    if kind is None:
        raise CheckpointError(f"{where}: model_type: missing, and no satlens format either")
    raise CheckpointError(f"{where}: model_type: {kind!r} is in no layout that satlens reads")


def layout_named(name: str) -> Layout:
    """A layout to write, by name, with hyphens or underscores.

    Raises:
        ConfigError: unknown, or read-only.
    """
    writable = [layout.name for layout in LAYOUTS if layout.writable]
    if name.replace("-", "_") in writable:
        return next(layout for layout in LAYOUTS if layout.name == name.replace("-", "_"))
    raise ConfigError(f"layout: {name!r} cannot be written; choose from {', '.join(writable)}")


__all__ = ["LAYOUTS", "Layout", "layout_named", "layout_of"]
