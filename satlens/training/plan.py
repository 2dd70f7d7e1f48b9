"""What a run will do, step by step: derived from the two configs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from satlens.config import ModelConfig, TrainConfig
from satlens.errors import ConfigError
from satlens.models.decoder import Decoder

# fp32 weight, gradient and AdamW's two moments.
BYTES_PER_PARAMETER = 16


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps of a run. ``done`` counts finished steps: 0 at the start, ``n_steps`` at the end."""

    n_steps: int
    tokens_per_step: int
    """Positions in a step; those in the padding of an epoch's last row are counted too."""
    milestones: dict[int, int]
    """Finished steps -> tokens asked for, where a checkpoint is kept."""
    cfg: TrainConfig

    def evaluates(self, done: int) -> bool:
        return done % self.cfg.eval_every == 0 or done == self.n_steps

    def logs(self, done: int) -> bool:
        return done > 0 and (done % self.cfg.log_every == 0 or done == self.n_steps)

    def saves(self, done: int) -> bool:
        """Whether a resumable checkpoint is due; the end writes the final checkpoint instead."""
        return 0 < done < self.n_steps and done % self.cfg.checkpoint_every == 0


def plan(model_cfg: ModelConfig, train_cfg: TrainConfig) -> Plan:
    """The steps of a run.

    Raises:
        ConfigError: a budget below one step.
    """
    per_step = train_cfg.batch_size * train_cfg.grad_accum * model_cfg.n_ctx
    n_steps = train_cfg.tokens // per_step
    if not n_steps:
        raise ConfigError(
            f"TrainConfig: tokens: {train_cfg.tokens} is less than one step of {per_step} "
            "(batch_size x grad_accum x n_ctx)"
        )
    milestones = {min(-(-m // per_step), n_steps): m for m in sorted(train_cfg.milestones)}
    return Plan(n_steps=n_steps, tokens_per_step=per_step, milestones=milestones, cfg=train_cfg)


def describe(model_cfg: ModelConfig, train_cfg: TrainConfig) -> dict[str, Any]:
    """What a dry run shows: steps, tokens, parameters, and the memory of the training state.

    ``state_bytes`` counts fp32 weights, gradients and AdamW's moments; activations come on top.

    Raises:
        ConfigError: a budget below one step.
    """
    made = plan(model_cfg, train_cfg)
    with torch.device("meta"):
        n_parameters = Decoder(model_cfg, seed=None).n_parameters()
    return {
        "variant": model_cfg.variant,
        "n_parameters": n_parameters,
        "n_steps": made.n_steps,
        "tokens_per_step": made.tokens_per_step,
        "tokens": made.n_steps * made.tokens_per_step,
        "state_bytes": n_parameters * BYTES_PER_PARAMETER,
    }
