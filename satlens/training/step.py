"""One optimiser step's gradients.

Shapes: B rows of a micro-batch, T = n_ctx positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from satlens.processes import world
from satlens.training.distributed import accumulating, total
from satlens.training.evaluation import autocast


class MicroBatch(NamedTuple):
    """A micro-batch on the device of the model."""

    inputs: Tensor
    """(B, T) ids."""
    targets: Tensor
    """(B, T) ids, -100 where not scored."""
    documents: Tensor | None
    """(B, T) ids for the document mask; None where nothing is to be masked."""
    share: float
    """Its share of the scored tokens of the step, over all processes."""


def forward_backward(model: nn.Module, micro_batches: list[MicroBatch], precision: str) -> Tensor:
    """Gradients of the mean loss over all scored tokens of a step, added to ``.grad``.

    Args:
        model: a Decoder, or the wrapper that :func:`satlens.training.distributed.shared` made.
        micro_batches: those of the step that are this process's.
        precision: bf16 (autocast) or fp32.

    Returns:
        That loss in nats, a scalar on the device, the same however the rows are cut into
        micro-batches and however many processes share them (up to rounding).
    """
    device, n_processes = micro_batches[0].inputs.device, world().size
    loss_sum, last = torch.zeros((), device=device), len(micro_batches) - 1
    for k, batch in enumerate(micro_batches):
        with accumulating(model, last=k == last):
            with autocast(device, precision, model):
                loss = model(
                    batch.inputs,
                    return_type="loss",
                    targets=batch.targets,
                    documents=batch.documents,
                )
            # Gradients are averaged over processes: their sum is the mean of N times each.
            loss = loss * (batch.share * n_processes)
            loss.backward()
        loss_sum = loss_sum + loss.detach()
    return total(loss_sum) / n_processes
