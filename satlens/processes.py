"""The processes that torchrun started: who this one is, and what all of them agree on.

torchrun --nproc-per-node 4 --no-python satlens sparsity CHECKPOINT --data DATA --out OUT
"""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from satlens.errors import SatlensError

PATIENCE = datetime.timedelta(days=1)
"""How long a process waits for the others; one that fails ends all of them through torchrun."""


_made: dict[str, Any] = {}
"""The store through which torchrun's processes met, and the group of :func:`exchange_group`."""


_SECONDS_TO_ASK = 3.0


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

    What is on the CPU is exchanged over gloo, what is on GPUs over NCCL.

    Raises:
        SatlensError: WORLD_SIZE without what else torchrun says, or another process ended early.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or world().size > 1:
        yield world()
        return
    absent = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise SatlensError(f"{absent[0]}: not set although WORLD_SIZE is; start with torchrun")
    on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    _made["store"], rank, size = next(rendezvous("env://", timeout=PATIENCE))
    dist.init_process_group(
        backend, store=_made["store"], rank=rank, world_size=size, timeout=PATIENCE
    )
    # Not left after an error: the others may be in an exchange that leaving would wait for.
    try:
        yield world()
    except SystemExit as end:
        if not end.code:
            _leave()
        raise
    except RuntimeError as error:
        if "by peer" not in str(error):  # gloo's word for a connection that was closed or reset
            raise
        text = "another process of torchrun ended early; its own message says why"
        raise SatlensError(text) from error
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


def first_to_say(text: str) -> bool:
    """Whether no other process of torchrun has said this; what all run into is said once."""
    if "store" not in _made:
        return True
    store, key = _made["store"], f"said/{hashlib.sha256(text.encode()).hexdigest()}"
    rank, size = world()
    try:
        first = store.add(key, 1) == 1
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # Without torchrun the store ends with this process: the others have to ask it first.
            until = time.monotonic() + _SECONDS_TO_ASK
            while store.add(key, 0) < size and time.monotonic() < until:
                time.sleep(0.05)
        return first
    except RuntimeError:  # the process that keeps the store has ended
        return True


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
    size = world().size
    values: list[Any] = [None] * size
    with exchange_group() as group:
        dist.all_gather_object(values, value, group=group)
    others = [other for other in range(size) if values[other] != values[0]]
    if others:
        raise SatlensError(
            f"{what}: process {others[0]} of {size} has another model, other data or other "
            "settings than process 0"
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
    everybody = dist.group.WORLD
    if _made.get("world") is not everybody:
        _made["world"] = everybody
        _made["group"] = dist.new_group(backend="gloo", timeout=PATIENCE)
    yield _made["group"]
