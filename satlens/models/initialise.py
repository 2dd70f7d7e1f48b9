"""Initial weights. Every parameter is drawn from (seed, its own name), so variants of one seed
share every weight they have in common."""

from __future__ import annotations

import hashlib
import re
from typing import Literal

import torch
from torch import nn

from satlens.config import HyperStream, ModelConfig

Family = Literal["matrices", "embeddings", "norms", "gates", "scalars", "routes", "biases"]

# First match wins; together the patterns cover every parameter of every variant.
FAMILIES: tuple[tuple[str, Family], ...] = (
    (r"\.values\.alpha\.", "gates"),
    (r"\.values\.lambda\d$|^shared_lambda\.", "scalars"),
    (r"_read\.|\.(attn|mlp)_hc\.|\.depth_weights$", "routes"),
    (r"(ln\d(_[qkv])?|ln_final|[qk]_norm)\.weight$", "norms"),
    (r"\.bias$", "biases"),
    (r"^(un)?embed\.weight$", "embeddings"),
    (r"\.(qkv|o|gate_up|down)\.weight$", "matrices"),
)
# Those of registered streams, tried after ours: a wide pattern cannot change other architectures.
REGISTERED: dict[str, Family] = {}


def family(name: str) -> Family:
    """Family of a parameter, by its name: what it starts from and whether it decays.

    Raises:
        KeyError: a parameter that no pattern covers (a new variant forgot to declare it).
    """
    for pattern, kind in (*FAMILIES, *REGISTERED.items()):
        if re.search(pattern, name):
            return kind
    raise KeyError(f"parameter {name!r} belongs to no family of satlens.models.initialise")


def standard_deviation(name: str, parameter: nn.Parameter, cfg: ModelConfig) -> float | None:
    """Std of a parameter's normal start, or None where its module's own start stands."""
    kind = family(name)
    if kind == "gates":
        return None if name.endswith("bias") else 0.02
    if name.endswith("_read.w1.weight"):  # MUDD's hidden layer; the paper's 1/D is a variance
        return cfg.d_model**-0.5
    if kind == "embeddings":
        wide = name == "embed.weight" and not cfg.tied_embeddings and cfg.init == "fan_in"
        return 0.02 * cfg.d_model**0.5 if wide else 0.02
    if kind != "matrices":
        return None
    output = name.endswith((".o.weight", ".down.weight"))
    std = 0.02
    if cfg.init == "fan_in":
        std = 0.8 / parameter.shape[1] ** 0.5
        std /= (2 * cfg.n_layers) ** 0.5 if output else 1.0
    if output and isinstance(cfg.stream, HyperStream) and cfg.stream.scaled_outputs:
        std /= cfg.stream.n_streams**0.5
    return std


@torch.no_grad()
def initialise(model: nn.Module, cfg: ModelConfig, seed: int) -> None:
    """Draw every parameter's start in place, on the CPU, whatever the device."""
    for name, parameter in model.named_parameters():
        std = standard_deviation(name, parameter, cfg)
        if std is not None:
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            # Whatever torch's default dtype and device are at the moment.
            draw = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            draw.normal_(0.0, std, generator=generator)
            parameter.copy_(draw)
        elif name.endswith(".bias") and family(name) in ("biases", "gates"):
            parameter.zero_()
