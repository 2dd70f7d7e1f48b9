"""Fresh models by name."""

from __future__ import annotations

from typing import Any

import torch

from satlens.models.decoder import Decoder
from satlens.models.presets import config_for


def build(
    name: str,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Decoder:
    """A model with fresh weights.

    Args:
        name: a variant (``satformer``: the tiny scale, resized by keywords) or a preset
            (``satformer-small``).
        seed: of the initial weights; shared weights of two variants are equal for one seed.
        device: ``meta`` builds shapes only.
        dtype: of the weights.
        fields: fields of :class:`satlens.ModelConfig`, of its value residual or of its stream.

    Raises:
        ConfigError: unknown name or field, impossible value.
    """
    cfg = config_for(name, **fields)
    if torch.device(device).type == "meta":
        with torch.device("meta"):
            return Decoder(cfg, seed=None).to(dtype)
    return Decoder(cfg, seed=seed).to(device=device, dtype=dtype)
