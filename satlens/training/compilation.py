"""How a model in training is compiled: whole, or a block at a time where FSDP gathers weights."""

from __future__ import annotations

from typing import Any, Literal

import torch._dynamo

from satlens.models.decoder import Decoder

GRAPHS_A_MODULE = 8
"""Graphs of one module before torch would run it uncompiled: passes with and without document
masks are two, and training has no others."""


def compile_model(model: Decoder, strategy: Literal["ddp", "fsdp"] | None) -> None:
    """Compile a model in place, for passes of one shape; call it before wrapping the model.

    One process and DDP compile the whole pass, which is one graph. Under FSDP a block is a graph,
    so that its weights are gathered before it and let go after it; blocks that compute the same
    share their code. Evaluation runs uncompiled: its hooks would be ignored.

    Args:
        model: with ``gradient_checkpointing`` set already.
        strategy: ``ddp`` or ``fsdp``; None in one process.
    """
    how: dict[str, Any] = {"dynamic": False}
    if strategy == "fsdp":
        for block in model.blocks:
            block.compile(recompile_limit=GRAPHS_A_MODULE * len(model.blocks), **how)
        return
    if strategy == "ddp":
        # Cutting a graph where DDP's buckets end is not possible with checkpointed blocks or
        # FlexAttention in it. Uncut, gradients are exchanged when the backward pass is done.
        torch._dynamo.config.optimize_ddp = False
    model.compile(recompile_limit=GRAPHS_A_MODULE, isolate_recompiles=True, **how)
