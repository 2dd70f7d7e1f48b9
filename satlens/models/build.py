"""Fresh models by name."""

from __future__ import annotations

from typing import Any

import torch

from satlens.errors import ConfigError
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
        ConfigError: unknown name or field, impossible value, a device that is not there.
    """
    cfg, where = config_for(name, **fields), checked_device(device)
    if where.type == "meta":
        with where:
            return Decoder(cfg, seed=None).to(dtype)
    return Decoder(cfg, seed=seed).to(device=where, dtype=dtype)


def checked_device(name: str | torch.device) -> torch.device:
    """A device that tensors can be put on.

    Raises:
        ConfigError: no name of a device, or none that this machine and this torch have.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device: {name!r} is no device; use cpu, cuda or cuda:N") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and not 0 <= (device.index or 0) < count:
        raise ConfigError(f"device: {str(name)!r} is not there, torch finds {count} CUDA devices")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError):  # by backend
        raise ConfigError(f"device: {str(name)!r} cannot be used with this torch") from None
    return device
