"""Steps whose loss stands far above that of the steps before them."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

WINDOW = 128
"""Steps that a loss is compared with."""
NEEDED = 32
"""Steps below which nothing is called a spike."""
LIMIT = 6.0
"""Scales above the median at which a loss is a spike."""
_NORMAL = 1.4826  # the median absolute deviation of a normal distribution is 1 / 1.4826
_FLOOR = 1e-3


class SpikeLog:
    """Losses and gradient norms of single steps, kept on the device until the log is written.

    A loss is a spike when it exceeds the median of the last 128 finite losses by more than six
    scales, a scale being their median absolute deviation times 1.4826, which is the standard
    deviation where they are normal. Median and deviation because up to half of the window may be
    spikes themselves without moving them far, so that a second spike is still seen beside a first.
    Six, because the deviation of 128 losses is itself known to about a tenth: even five true
    deviations are one normal loss in three million, less than one false line in a run of a million
    steps, while the spikes of large models are many times larger than the noise of their batches.
    128 steps are few enough for the median to follow the falling loss; where it falls fast, the
    fall itself widens the scale. A scale is at least a thousandth of the median, or a loss that
    stands still would make every flutter a spike.

    Everything that decides is in :attr:`tensors`, to be saved and restored with a run: an
    interrupted run writes the same lines.

    Args:
        device: of the losses; adding a step does not wait for it.
        log_every: steps between calls of :meth:`drain`.

    Attributes:
        tensors: ``step_losses`` and ``step_norms`` of the steps since the last line of the log, and
            ``loss_window``, the losses before them, oldest first, after NaN where there are fewer.
    """

    def __init__(self, device: torch.device, log_every: int) -> None:
        def empty(length: int, place: torch.device) -> Tensor:
            return torch.full((length,), float("nan"), dtype=torch.float64, device=place)

        self.tensors = {
            "step_losses": empty(log_every, device),
            "step_norms": empty(log_every, device),
            "loss_window": empty(WINDOW, torch.device("cpu")),
        }

    def add(self, step: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Keep what a step (counted from 0) had; both are scalars on the device."""
        place = step % len(self.tensors["step_losses"])
        self.tensors["step_losses"][place].copy_(loss)
        self.tensors["step_norms"][place].copy_(grad_norm)

    def drain(self, done: int, grad_accum: int) -> list[dict[str, Any]]:
        """Lines about the spikes among the steps since the last line of the log.

        Every process must call this, for the window moves on.

        Args:
            done: finished steps; lines are due when it is a multiple of ``log_every``, and at the
                end of the run.

        Returns:
            Records of kind ``spike``: ``step``, finished steps with this one; ``micro_batches``,
            its first and last, numbered from 0 over the run; ``loss``, ``grad_norm`` before
            clipping (null where not finite), and the ``median`` and ``scale`` it was held against.
        """
        losses, norms = self.tensors["step_losses"], self.tensors["step_norms"]
        first = (done - 1) // len(losses) * len(losses)
        window = [loss for loss in self.tensors["loss_window"].tolist() if math.isfinite(loss)]
        lines = []
        for step, loss, norm in zip(
            range(first, done), losses.tolist(), norms.tolist(), strict=False
        ):
            if not math.isfinite(loss):  # an affair of on_nonfinite
                continue
            if len(window) >= NEEDED:
                median, scale = median_and_scale(window)
                if loss > median + LIMIT * scale:
                    lines.append(
                        {
                            "kind": "spike",
                            "step": step + 1,
                            "micro_batches": [step * grad_accum, (step + 1) * grad_accum - 1],
                            "loss": loss,
                            "grad_norm": norm if math.isfinite(norm) else None,
                            "median": median,
                            "scale": scale,
                        }
                    )
            window = [*window[1 - WINDOW :], loss]
        empty = [float("nan")] * (WINDOW - len(window))
        self.tensors["loss_window"].copy_(torch.tensor(empty + window, dtype=torch.float64))
        return lines


def median_and_scale(losses: list[float]) -> tuple[float, float]:
    """Median, and the robust standard deviation with its floor."""
    median = statistics.median(losses)
    deviation = statistics.median(abs(loss - median) for loss in losses)
    return median, max(_NORMAL * deviation, _FLOOR * abs(median))
