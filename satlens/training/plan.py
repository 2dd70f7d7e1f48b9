"""What a run will do, step by step: derived from the two configs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from satlens.config import ModelConfig, TrainConfig
from satlens.errors import ConfigError
from satlens.models.decoder import Decoder
from satlens.training.distributed import check_shares
from satlens.training.flops import flops_per_token
from satlens.training.hardware import CHIPS
from satlens.training.memory import activation_bytes, state_bytes
from satlens.training.optimiser import warmup_steps

GPU = "H100 SXM"
MFU = 0.4
"""Share of the GPU's peak that estimates of time assume: what dense models of some 10^8 to 10^9
parameters reach under a good trainer."""


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


def describe(
    model_cfg: ModelConfig,
    train_cfg: TrainConfig,
    *,
    processes: int = 1,
    gpu: str = GPU,
    mfu: float = MFU,
    activations: bool = False,
) -> dict[str, Any]:
    """What a dry run shows: steps, tokens, parameters, operations, time and memory.

    Bytes are those of one process of ``processes``: ``state_bytes`` fp32 weights, gradients and
    AdamW's moments, ``gathered_bytes`` what is there beside them for a while, and, where asked for,
    ``activation_bytes`` the peak of the rest, ``total_bytes`` all three and
    ``other_activation_bytes`` that peak were ``gradient_checkpointing`` the other way round; see
    :mod:`satlens.training.memory`. ``gpu_hours`` is ``flops`` over the GPU's peak times ``mfu``,
    ``hours`` a share of that; recomputation under checkpointing is not in ``flops``.

    Args:
        gpu: a name in :data:`satlens.training.hardware.CHIPS`.
        mfu: share of its peak in (0, 1].
        activations: measure them, which takes seconds.

    Raises:
        ConfigError: a budget below one step, a step that the processes cannot share out, an
            unknown GPU, an impossible share.
    """
    if gpu not in CHIPS:
        raise ConfigError(f"gpu: {gpu!r} is none of {', '.join(CHIPS)}")
    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu: must lie in (0, 1], got {mfu:g}")
    made = plan(model_cfg, train_cfg)
    check_shares(train_cfg, processes)
    with torch.device("meta"):
        model = Decoder(model_cfg, seed=None)
    tokens = made.n_steps * made.tokens_per_step
    per_token = flops_per_token(model_cfg)
    gpu_hours = per_token * tokens / (CHIPS[gpu].teraflops * 1e12 * mfu) / 3600
    state, gathered = state_bytes(model, train_cfg, processes)
    facts: dict[str, Any] = {
        "variant": model_cfg.variant,
        "n_parameters": model.n_parameters(),
        "n_steps": made.n_steps,
        "warmup_steps": warmup_steps(made.n_steps, train_cfg),
        "tokens_per_step": made.tokens_per_step,
        "tokens": tokens,
        "milestones": made.milestones,
        "flops_per_token": per_token,
        "flops": per_token * tokens,
        "gpu": gpu,
        "mfu": mfu,
        "gpu_hours": gpu_hours,
        "processes": processes,
        "hours": gpu_hours / processes,
        "state_bytes": state,
        "gathered_bytes": gathered,
    }
    if activations:
        chosen, other = (
            activation_bytes(
                model_cfg,
                train_cfg.batch_size,
                precision=train_cfg.precision,
                checkpointing=train_cfg.gradient_checkpointing != flipped,
            )
            for flipped in (False, True)
        )
        facts |= {"activation_bytes": chosen, "other_activation_bytes": other}
        facts["total_bytes"] = state + gathered + chosen
    return facts
