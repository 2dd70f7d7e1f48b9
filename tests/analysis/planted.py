"""Models of known numbers, which the package has, and a random one for tests alone."""

from __future__ import annotations

import torch

import satlens
from satlens.analysis.controls.planted import (
    GATE,
    PULL,
    bigram,
    blank,
    counted,
    documents,
    gated,
    routed,
    tags_of,
    token_class,
)
from satlens.models.initialise import family

__all__ = [
    "GATE",
    "PULL",
    "bigram",
    "blank",
    "counted",
    "documents",
    "gated",
    "routed",
    "tags_of",
    "tiny",
    "token_class",
]


def tiny(name, seed=0, **fields):
    """A small random GQA model with gates and routes that do something."""
    shape = {
        "n_layers": 3,
        "d_model": 16,
        "n_heads": 4,
        "n_key_value_heads": 2,
        "d_vocab": 32,
        "n_ctx": 16,
    }
    model = satlens.build(name, **{**shape, **fields})
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "query" in key or "values.alpha" in key:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(noise * (0.5 if "query" in key else 0.3))
        elif family(key) == "routes" and not key.endswith(("gamma", "bias")):
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        elif parameter.ndim > 1:
            parameter.data.mul_(1.5)
    return model
