"""Published checkpoint layouts, one file each, and our own."""

from __future__ import annotations

from typing import Any

from satlens.checkpoints.layouts.base import Layout
from satlens.checkpoints.layouts.fla import Fla
from satlens.checkpoints.layouts.hf_llama import HuggingFaceLlama
from satlens.checkpoints.layouts.native import Native
from satlens.checkpoints.layouts.satformer_repo import SatformerRepo
from satlens.errors import CheckpointError, ConfigError

LAYOUTS: tuple[Layout, ...] = (Native(), SatformerRepo(), Fla(), HuggingFaceLlama())


def layout_of(config: dict[str, Any], where: str) -> Layout:
    """The layout a ``config.json`` is in.

    Raises:
        CheckpointError: in none of them.
    """
    for layout in LAYOUTS:
        if layout.matches(config):
            return layout
    kind = config.get("model_type")
    if kind is None:
        raise CheckpointError(f"{where}: model_type: missing, and no satlens format either")
    raise CheckpointError(f"{where}: model_type: {kind!r} is in no layout that satlens reads")


def layout_named(name: str) -> Layout:
    """A layout to write, by name.

    Raises:
        ConfigError: unknown, or read-only.
    """
    writable = [layout.name for layout in LAYOUTS if layout.writable]
    for layout in LAYOUTS:
        if layout.name == name and layout.writable:
            return layout
    raise ConfigError(f"layout: {name!r} cannot be written; choose from {', '.join(writable)}")


__all__ = ["LAYOUTS", "Layout", "layout_named", "layout_of"]
