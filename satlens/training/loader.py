"""Reading ahead: this process's micro-batches of the steps to come, moved to its device.

Which rows a step has is a function of the seed and the step (:mod:`satlens.data.batches`), so any
number of processes and of readers sees the same.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from satlens.config import TrainConfig
from satlens.data.batches import TrainBatches
from satlens.errors import SatlensError
from satlens.processes import world
from satlens.training.interrupts import SIGNALS
from satlens.training.step import MicroBatch

GRACE = 5.0
"""Seconds in which the end of a reader is noticed."""


class Rows(NamedTuple):
    """What a reader hands over; int64 tensors (B, T) on the CPU."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None
    """None where no row holds two documents, or where the model does not ask."""


class RowsByNumber(Dataset[Rows]):
    """Micro-batches by number.

    Args:
        batches: where they come from.
        masked: whether the model masks attention across documents.
    """

    def __init__(self, batches: TrainBatches, masked: bool) -> None:
        self.batches = batches
        self._masked = masked

    def __getitem__(self, number: int) -> Rows:
        inputs, targets, documents = self.batches.batch(number)
        return Rows(inputs, targets, documents if self._masked and _crosses(documents) else None)


def _crosses(documents: Tensor) -> bool:
    """Whether any row holds two documents. Padding does not count: nothing scored sees it."""
    before, after = documents[:, :-1], documents[:, 1:]
    return bool(((before != after) & (after >= 0)).any())


class Loader:
    """This process's micro-batches of each step, in order: numbers k with k = rank (mod N).

    Args:
        rows: of the whole run.
        cfg: ``grad_accum`` micro-batches are a step, ``data_workers`` processes read ahead.
        steps: the steps that will be asked for, one after another.
        device: where the model is.
    """

    def __init__(
        self, rows: RowsByNumber, cfg: TrainConfig, steps: range, device: torch.device
    ) -> None:
        self._batches, self._n, self._device = rows.batches, cfg.grad_accum, device
        rank, size = world()
        self._mine = range(rank, self._n, size)
        with warnings.catch_warnings(), _deaf():
            # How many readers suit a machine is for its user to say.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            loader = DataLoader(
                rows,
                batch_size=None,
                sampler=range(steps.start * self._n + rank, steps.stop * self._n, size),
                collate_fn=_as_it_is,
                num_workers=cfg.data_workers,
                worker_init_fn=partial(_end_with, os.getpid()) if cfg.data_workers else None,
                multiprocessing_context="fork" if cfg.data_workers else None,
                pin_memory=device.type == "cuda",
                generator=torch.Generator(),  # else it would draw from the global one
            )
            self._read: Iterator[Rows] = iter(loader)

    def step(self, number: int) -> list[MicroBatch]:
        """The micro-batches of the next step, weighted by what they score.

        Args:
            number: that step's, which decides the weights.
        """
        scored = [self._batches.scored(number * self._n + k) for k in range(self._n)]
        return [self._move(self._next(), scored[k] / sum(scored)) for k in self._mine]

    def _next(self) -> Rows:
        try:
            return next(self._read)
        except (OSError, EOFError):
            # A reader's connection broke; torch speaks up as soon as the system has buried it.
            time.sleep(GRACE)
            raise

    def _move(self, rows: Rows, share: float) -> MicroBatch:
        moved = (t if t is None else t.to(self._device, non_blocking=True) for t in rows)
        return MicroBatch(*moved, share)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the readers."""
        self._read = iter(())


@contextmanager
def readers_watched() -> Iterator[None]:
    """Around what uses a loader: torch says that a reader was killed wherever the program is.

    Raises:
        SatlensError: a reader ended early, for instance for want of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = " ".join(str(error).split()).rstrip(" .")
        raise SatlensError(
            f"data_workers: a process that reads ahead ended early ({reason}); fewer of them "
            "need less memory, 0 reads in the training process"
        ) from None


def _end_with(parent: int, reader: int) -> None:
    """End a reader whose run was killed while it started: torch's own watch begins after this."""
    if os.getppid() != parent:
        os._exit(1)


def _as_it_is(rows: Any) -> Any:
    return rows


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started here never see the signals that stop a run, only its end of theirs."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
