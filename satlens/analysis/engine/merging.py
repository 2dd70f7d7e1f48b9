"""Sums of several processes on one pass: each takes a share of the batches, all end with the same.

Under torchrun a pass gives batches r, r + N, ... to process r of N; afterwards the sums of all are
merged in the order of the ranks, in every process. What an accumulator adds up does not depend on
how batches are shared out, so tables are the same to the bit for any N.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from satlens.analysis.engine.accumulators import Accumulator, Arrays
from satlens.processes import exchange_group, world


def merge(accumulators: Mapping[str, Accumulator]) -> None:
    """Every accumulator, in every process, as the sum over all of them in the order of ranks."""
    if world().size == 1:
        return
    with exchange_group() as group:
        for accumulator in accumulators.values():
            _merge(accumulator, group)


def _merge(accumulator: Accumulator, group: Any) -> None:
    rank, size = world()
    # In C order, so that the flat view of an array is its own memory.
    own = {name: np.array(array, order="C") for name, array in accumulator.arrays().items()}
    for source in range(size):
        arrays = own if source == rank else {k: np.zeros_like(a) for k, a in own.items()}
        _broadcast(arrays, source, group)
        if source == 0:
            accumulator.restore(arrays)
        else:
            other = copy.deepcopy(accumulator)
            other.restore(arrays)
            accumulator.merge(other)


def _broadcast(arrays: Arrays, source: int, group: Any) -> None:
    """Contents of the source's arrays into everybody's."""
    for array in arrays.values():
        if array.size:
            content = torch.from_numpy(array.reshape(-1).view(np.uint8))
            dist.broadcast(content, source, group=group)
