"""Several processes on one pass: each takes its share of the batches, all end with the same sums.

Under torchrun a pass gives batches r, r + N, ... to process r of N; afterwards the sums of all are
merged in the order of the ranks, in every process. What an accumulator adds up does not depend on
how batches are shared out, so tables are the same to the bit for any N.

    torchrun --nproc-per-node 4 --no-python satlens sparsity CHECKPOINT --data DATA --out OUT
"""

from __future__ import annotations

import copy
import datetime
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from satlens.analysis.engine.accumulators import Accumulator, Arrays
from satlens.errors import AnalysisError

PATIENCE = datetime.timedelta(days=1)
"""How long a process waits for the others; one that fails ends all of them through torchrun."""


class World(NamedTuple):
    """This process among those that share a pass."""

    rank: int
    size: int


def world() -> World:
    """Rank and number of processes of torch.distributed; (0, 1) where it is not initialised."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World(0, 1)


@contextmanager
def joined() -> Iterator[World]:
    """This process in the group that torchrun started, alone without torchrun.

    Sums are exchanged over gloo, on the CPU, whatever device the model is on.

    Raises:
        AnalysisError: WORLD_SIZE without what else torchrun says.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or world().size > 1:
        yield world()
        return
    absent = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise AnalysisError(f"{absent[0]}: not set although WORLD_SIZE is; start with torchrun")
    dist.init_process_group("gloo", timeout=PATIENCE)
    # Not left after an error: the others may be in an exchange that leaving would wait for.
    try:
        yield world()
    except SystemExit as end:
        if not end.code:
            _leave()
        raise
    _leave()


def _leave() -> None:
    _wait()  # nobody closes its connections while another still reads from them
    dist.destroy_process_group()


def finish() -> NoReturn:
    """End this process, whose work is done and whose group is left, without taking it apart.

    An interpreter that ends itself after gloo ran can be aborted by a thread (seen once in some
    hundred runs), and torchrun would call what was written in full a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def own_device(device: str) -> str:
    """``cuda`` as the GPU of this process under torchrun; other devices as they are."""
    if device == "cuda" and world().size > 1:
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    return device


@contextmanager
def first_alone() -> Iterator[None]:
    """The body in the first process, then in the others, which find what it left in a cache.

    The body may not exchange anything between processes.
    """
    rank, size = world()
    if size > 1 and rank > 0:
        _wait()
    try:
        yield
    finally:
        if size > 1 and rank == 0:
            _wait()


def check_equal(what: str, value: str) -> None:
    """Refuse processes that do not do the same.

    Raises:
        AnalysisError: ``value`` is not the same in all of them.
    """
    rank, size = world()
    values: list[Any] = [None] * size
    with _group() as group:
        dist.all_gather_object(values, value, group=group)
    others = [other for other in range(size) if values[other] != values[0]]
    if others:
        raise AnalysisError(
            f"{what}: process {others[0]} of {size} has another model, other data or other "
            f"settings than process 0 (this is process {rank})"
        )


def merge(accumulators: Mapping[str, Accumulator]) -> None:
    """Every accumulator, in every process, as the sum over all of them in the order of ranks."""
    if world().size == 1:
        return
    with _group() as group:
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


def _wait() -> None:
    with _group() as group:
        dist.barrier(group=group)


@contextmanager
def _group() -> Iterator[Any]:
    """A group of all processes that can exchange what is on the CPU."""
    if "cpu:gloo" in dist.get_backend_config():
        yield None
        return
    group: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
    yield group
    dist.destroy_process_group(group)
