"""AdamW with the recipe's decay groups, and the learning-rate schedule in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from satlens.config import TrainConfig
from satlens.models.initialise import family

ADAM_EPS = 1e-8
CLIP_EPS = 1e-6
"""Added to the norm that is clipped, as torch.nn.utils does."""
WSD_DECAY = 0.2
"""Share of the steps in the decay of schedule ``wsd``."""


def decay_groups(model: nn.Module, cfg: TrainConfig) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Named parameters with and without weight decay, under ``decay`` and ``no_decay``.

    Raises:
        KeyError: a parameter of no family (see :mod:`satlens.models.initialise`).
    """
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {"decay": [], "no_decay": []}
    for name, parameter in model.named_parameters():
        excluded = family(name) in cfg.no_decay
        groups["no_decay" if excluded else "decay"].append((name, parameter))
    return groups


def make_optimiser(model: nn.Module, cfg: TrainConfig) -> torch.optim.AdamW:
    """AdamW in its fused form, which torch has for CPUs and for GPUs."""
    groups = decay_groups(model, cfg)
    settings = {"decay": cfg.weight_decay, "no_decay": 0.0}
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in groups[key]], "weight_decay": decay}
            for key, decay in settings.items()
            if groups[key]
        ],
        lr=cfg.lr,
        betas=cfg.betas,
        eps=ADAM_EPS,
        fused=True,
    )


def warmup_steps(n_steps: int, cfg: TrainConfig) -> int:
    """Steps of warm-up among N: the nearest whole number to their share."""
    return round(cfg.warmup * n_steps)


def learning_rate(step: int, n_steps: int, cfg: TrainConfig) -> float:
    """Learning rate of one step, counted from 0.

    Warm-up rises linearly and ends at the peak; cosine or wsd then falls from there and reaches
    ``min_lr_ratio`` at the last step. With ``t = step + 1``, N steps, W of warm-up and a floor m::

        t <= W          lr t / W
        cosine          lr (m + (1 - m) (1 + cos(pi (t - W) / (N - W))) / 2)
        wsd, last D     lr (1 - (1 - m) (t - (N - D)) / D),  D = min(N - W, round(N / 5)); lr before
    """
    t, warmup = step + 1, warmup_steps(n_steps, cfg)
    if t <= warmup:
        return cfg.lr * t / warmup
    floor, left = cfg.min_lr_ratio, n_steps - warmup
    if cfg.schedule == "cosine":
        share = (1 + math.cos(math.pi * (t - warmup) / left)) / 2
        return cfg.lr * (floor + (1 - floor) * share)
    decay = min(left, round(WSD_DECAY * n_steps))
    into = t - (n_steps - decay)
    return cfg.lr * (1 - (1 - floor) * into / decay) if into > 0 else cfg.lr


def set_learning_rate(optimiser: torch.optim.Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = lr


def clip_gradients(
    optimiser: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], limit: float | None
) -> Tensor:
    """Have the optimiser's next step take gradients scaled to a norm of at most ``limit``.

    Fused AdamW divides gradients by its ``grad_scale`` as it reads them: a pass over all of them
    less than scaling them first.

    Args:
        optimiser: of :func:`make_optimiser`.
        parameters: of the whole model; a list, where this is done at every step: a model with hook
            points everywhere takes long to walk through.
        limit: None leaves them as they are.

    Returns:
        The L2 norm over all gradients before clipping, a scalar on their device; of whole
        gradients where processes hold parts of them.
    """
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    scale = None if limit is None else ((norm.float() + CLIP_EPS) / limit).clamp_min(1.0)
    optimiser.grad_scale = scale  # type: ignore[attr-defined]
    return norm
