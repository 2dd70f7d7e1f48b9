"""What training on a token costs, as a function of the architecture, and the share of a peak it is.

Shapes: L layers, H heads of width E, T positions of a context, W positions that a window shows.
"""

from __future__ import annotations

import torch
from torch import nn

from satlens.config import HyperStream, ModelConfig
from satlens.models.decoder import Decoder
from satlens.models.initialise import family


def flops_per_token(cfg: ModelConfig, n_ctx: int | None = None) -> float:
    """Floating-point operations of training on one token: 6 N_matmul + 12 L H E K.

    N_matmul counts what a matrix product multiplies with: the weights of attention, MLP, gates and
    unembedding, the two layers of MUDDFormer's depth weights, and hyper-connections' dynamic
    weights once a stream; 2 operations a weight forward and 4 backward. Attention has two products
    with the K keys that a position sees on average: 2 * 2 * H E * K forward, three times that in
    all. K is the causal half, T / 2; under a window it is W - W^2 / (2 T).

    Left out is what is no matrix product: the embedding's look-up, norms, softmax, activations, and
    all mixing over depth (weighted sums of sources, the route queries' dot products). Streams that
    mix much work more than this says. Not taken off is what a document mask hides, which depends on
    the data; not added is what gradient checkpointing computes a second time.

    Args:
        cfg: the architecture; its weights are never made.
        n_ctx: T, by default the architecture's own.
    """
    n_ctx = cfg.n_ctx if n_ctx is None else n_ctx
    with torch.device("meta"):
        parameters = dict(Decoder(cfg, seed=None).named_parameters())
    matrices = sum(_multiplied(name, p, cfg) for name, p in parameters.items())
    window = n_ctx if cfg.window_size is None else min(cfg.window_size, n_ctx)
    keys = window - window**2 / (2 * n_ctx) if n_ctx else 0.0
    return 6.0 * matrices + 12.0 * cfg.n_layers * cfg.n_heads * cfg.d_head * keys


def _multiplied(name: str, parameter: nn.Parameter, cfg: ModelConfig) -> int:
    """Multiplications that a parameter takes part in for a token, in matrix products."""
    if isinstance(cfg.stream, HyperStream) and name.endswith(("dynamic_alpha", "dynamic_beta")):
        return cfg.stream.n_streams * parameter.numel()
    unembeds = name == ("embed.weight" if cfg.tied_embeddings else "unembed.weight")
    weight = parameter.ndim == 2 and family(name) in ("matrices", "gates")
    of_routes = name.endswith(("_read.w1.weight", "_read.w2.weight"))
    return parameter.numel() if unembeds or weight or of_routes else 0


def model_flops_utilisation(
    tokens_per_second: float, flops: float, n_devices: int, peak: float | None
) -> float | None:
    """MFU (PaLM, arXiv 2204.02311): tokens/s x FLOPs/token / (devices x peak FLOPs/s of one).

    Args:
        tokens_per_second: of all devices together.
        flops: of one token, see :func:`flops_per_token`.
        peak: see :func:`satlens.training.hardware.peak_flops`; None gives None.
    """
    return None if peak is None else tokens_per_second * flops / (n_devices * peak)
