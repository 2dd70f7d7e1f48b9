"""One optimiser step's data and gradients.

Shapes: B rows of a micro-batch, T = n_ctx positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from satlens.data.batches import TrainBatches
from satlens.data.windows import IGNORE
from satlens.models.decoder import Decoder
from satlens.training.evaluation import autocast


class MicroBatch(NamedTuple):
    """A micro-batch on the device of the model."""

    inputs: Tensor
    """(B, T) ids."""
    targets: Tensor
    """(B, T) ids, -100 where not scored."""
    documents: Tensor | None
    """(B, T) ids for the document mask; None where no row crosses a document."""
    share: float
    """Its share of the step's scored tokens."""


def load_step(
    batches: TrainBatches, step: int, grad_accum: int, device: torch.device
) -> list[MicroBatch]:
    """The micro-batches of a step, weighted by what they score."""
    drawn = [batches.batch(step * grad_accum + k) for k in range(grad_accum)]
    scored = [int((batch.targets != IGNORE).sum()) for batch in drawn]

    def move(tensor: Tensor) -> Tensor:
        return (
            tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
        )

    return [
        MicroBatch(
            move(batch.inputs),
            move(batch.targets),
            move(batch.documents) if _crosses(batch.documents) else None,
            n / sum(scored),
        )
        for batch, n in zip(drawn, scored, strict=True)
    ]


def _crosses(documents: Tensor) -> bool:
    """Whether any row holds two documents. Padding does not count: nothing scored sees it."""
    before, after = documents[:, :-1], documents[:, 1:]
    return bool(((before != after) & (after >= 0)).any())


def forward_backward(model: Decoder, micro_batches: list[MicroBatch], precision: str) -> Tensor:
    """Gradients of the mean loss over all scored tokens of a step, added to ``.grad``.

    Returns:
        That loss in nats, a scalar on the device, the same however the rows are cut into
        micro-batches (up to rounding).
    """
    total = torch.zeros((), device=model.device)
    for batch in micro_batches:
        with autocast(model.device, precision):
            loss = model(
                batch.inputs,
                return_type="loss",
                targets=batch.targets,
                documents=batch.documents if model.cfg.document_mask else None,
            )
        loss = loss * batch.share
        loss.backward()
        total = total + loss.detach()
    return total


def unchanged_parameters(model: Decoder, seed: int) -> list[str]:
    """Parameters whose every bit is still that of the start: dead, or too coarse to move."""
    start = dict(Decoder(model.cfg, seed).named_parameters())
    return [n for n, p in model.named_parameters() if torch.equal(p.detach().cpu(), start[n])]
