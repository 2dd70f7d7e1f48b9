"""Training: one model by one recipe, resumable to the bit, and runs that are paired."""

from __future__ import annotations

from satlens.training.interrupts import TrainingStopped
from satlens.training.loop import train
from satlens.training.monitors import NonFiniteError
from satlens.training.pairing import check_paired, check_paired_runs
from satlens.training.plan import describe
from satlens.training.progress import Progress

__all__ = [
    "NonFiniteError",
    "Progress",
    "TrainingStopped",
    "check_paired",
    "check_paired_runs",
    "describe",
    "train",
]
