"""The processes that torchrun started: who this one is, and what all of them agree on.

torchrun --nproc-per-node 4 --no-python satlens sparsity CHECKPOINT --data DATA --out OUT
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from satlens.errors import SatlensError

PATIENCE = datetime.timedelta(days=1)
"""How long a process waits for the others; one that fails ends all of them through torchrun."""


class World(NamedTuple):
    """This process among those that share some work."""

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
        SatlensError: WORLD_SIZE without what else torchrun says.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or world().size > 1:
        yield world()
        return
    absent = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise SatlensError(f"{absent[0]}: not set although WORLD_SIZE is; start with torchrun")
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
        SatlensError: ``value`` is not the same in all of them.
    """
    rank, size = world()
    values: list[Any] = [None] * size
    with exchange_group() as group:
        dist.all_gather_object(values, value, group=group)
    others = [other for other in range(size) if values[other] != values[0]]
    if others:
        raise SatlensError(
            f"{what}: process {others[0]} of {size} has another model, other data or other "
            f"settings than process 0 (this is process {rank})"
        )


def _wait() -> None:
    with exchange_group() as group:
        dist.barrier(group=group)


@contextmanager
def exchange_group() -> Iterator[Any]:
    """A group of all processes that can exchange what is on the CPU."""
    if "cpu:gloo" in dist.get_backend_config():
        yield None
        return
    group: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
    yield group
    dist.destroy_process_group(group)
