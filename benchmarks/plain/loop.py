"""A training loop as nanoGPT has it, for the recipe of a TrainConfig.

It takes the mean of the micro-batches' losses, so it optimises what satlens' trainer does wherever
all of them score the same number of tokens: everywhere but in the last, padded row of an epoch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from plain.decoder import PlainDecoder
from satlens.config import TrainConfig
from satlens.data.batches import TrainBatches
from satlens.models.decoder import Decoder


def decays(name: str, parameter: nn.Parameter) -> bool:
    """nanoGPT's rule, matrices decay and vectors do not; gates do not by our recipes' rule."""
    return parameter.ndim >= 2 and "alpha" not in name


def cosine(step: int, n_steps: int, cfg: TrainConfig) -> float:
    """Linear warm-up to the peak, then half a cosine to the floor; the first step is 0."""
    warmup = round(cfg.warmup * n_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    ratio = (step + 1 - warmup) / (n_steps - warmup)
    floor = cfg.min_lr_ratio * cfg.lr
    return floor + 0.5 * (1 + math.cos(math.pi * ratio)) * (cfg.lr - floor)


class PlainLoop:
    """The state of a run: one :meth:`step` after the other."""

    def __init__(
        self, source: Decoder, cfg: TrainConfig, batches: TrainBatches, n_steps: int
    ) -> None:
        self.model, self.cfg, self.batches = PlainDecoder(source), cfg, batches
        self.n_steps, self.done = n_steps, 0
        named = list(self.model.named_parameters())
        self.optimiser = torch.optim.AdamW(
            [
                {"params": [p for n, p in named if decays(n, p)], "weight_decay": cfg.weight_decay},
                {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
            ],
            lr=cfg.lr,
            betas=cfg.betas,
        )

    def step(self) -> Tensor:
        """One optimiser step; the loss before it, a scalar."""
        for group in self.optimiser.param_groups:
            group["lr"] = cosine(self.done, self.n_steps, self.cfg)
        total = torch.zeros(())
        for k in range(self.cfg.grad_accum):
            batch = self.batches.batch(self.done * self.cfg.grad_accum + k)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.cfg.precision == "bf16"):
                loss = self.model(batch.inputs, batch.targets) / self.cfg.grad_accum
            loss.backward()
            total += loss.detach()
        if self.cfg.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.done += 1
        return total
