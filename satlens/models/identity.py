"""What tells two models apart."""

from __future__ import annotations

import hashlib
import json

import torch

from satlens.config import to_dict
from satlens.models.decoder import Decoder


def weights_sha256(model: Decoder) -> str:
    """SHA-256 over the configuration and every parameter's name, dtype and bits."""
    config = json.dumps(to_dict(model.cfg), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(config.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        bits = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(bits.numpy().data)
    return digest.hexdigest()
