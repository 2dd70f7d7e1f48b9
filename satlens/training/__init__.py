"""Training: one model by one recipe, resumable to the bit, and runs that are paired."""

from __future__ import annotations

from satlens.training.flops import flops_per_token
from satlens.training.hardware import peak_flops
from satlens.training.interrupts import TrainingStopped
from satlens.training.loop import check_run, train
from satlens.training.monitors import NonFiniteError
from satlens.training.pairing import check_paired, check_paired_runs
from satlens.training.plan import describe
from satlens.training.progress import Progress
from satlens.training.trackers import TensorBoardTracker, Tracker, WandbTracker

__all__ = [
    "NonFiniteError",
    "Progress",
    "TensorBoardTracker",
    "Tracker",
    "TrainingStopped",
    "WandbTracker",
    "check_paired",
    "check_paired_runs",
    "check_run",
    "describe",
    "flops_per_token",
    "peak_flops",
    "train",
]
