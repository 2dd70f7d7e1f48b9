"""Processes that train one model together: what they share, and what they agree on.

    torchrun --nproc-per-node 2 --no-python satlens train DATA OUT --set train.grad_accum=2

A recipe does not know how many there are: a step is always ``batch_size x grad_accum`` rows, and
micro-batch k of a step is computed by process k mod N. Everything here works in one process too,
where nothing is exchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from satlens.config import TrainConfig
from satlens.errors import ConfigError, SatlensError
from satlens.models.build import checked_device
from satlens.models.decoder import Decoder
from satlens.processes import check_equal, exchange_group, own_device, world

T = TypeVar("T")


def check_shares(cfg: TrainConfig, processes: int | None = None) -> None:
    """Refuse a step that the processes (by default those there are) cannot share out evenly.

    Raises:
        ConfigError: their number does not divide ``grad_accum``.
    """
    size = world().size if processes is None else processes
    if cfg.grad_accum % size:
        raise ConfigError(
            f"grad_accum: {size} processes do not share out {cfg.grad_accum} micro-batches; set a "
            f"multiple of {size} (batch_size x grad_accum rows are a step, however many processes)"
        )


def check_together(record: dict[str, Any]) -> None:
    """Refuse processes that were not given the same.

    Raises:
        SatlensError: their records of the run differ.
    """
    if world().size > 1:
        check_equal("train", json.dumps(record, sort_keys=True))


def own_place(device: str | torch.device | None) -> torch.device:
    """Where this process trains: by default on a GPU if there is one, each process on its own.

    Raises:
        ConfigError: a device that is not there.
    """
    name = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    where = checked_device(own_device(name))
    if where.type == "cuda" and world().size > 1:
        torch.cuda.set_device(where)  # NCCL exchanges what is on the current one
    return where


# -- the model ---------------------------------------------------------------------------------


def shared(model: Decoder, cfg: TrainConfig, device: torch.device) -> nn.Module:
    """Place a model on ``device`` as the recipe says, in place; call it before making optimisers.

    Under ``ddp`` every process holds all weights and averages gradients with the others. Under
    ``fsdp`` (FSDP2, a unit a block) each parameter becomes a DTensor of which a process holds its
    part; a block's weights are gathered while it runs, and gradients are averaged and cut up after
    every micro-batch, so that no process ever holds all of either.

    Returns:
        What to call in training: a wrapper under ``ddp``, else the model itself.
    """
    model.gradient_checkpointing = cfg.gradient_checkpointing
    size = world().size
    if cfg.compile:
        from satlens.training.compilation import compile_model  # imports torch's compiler

        compile_model(model, cfg.strategy if size > 1 else None)
    if size > 1 and cfg.strategy == "fsdp":
        mesh = init_device_mesh(device.type, (size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    model.to(device)
    if size == 1:
        return model
    return DistributedDataParallel(
        Exchanged(model).to(device),
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )


class Exchanged(nn.Module):
    """A model beside a parameter that nothing uses, for DDP.

    Some variants have dead parameters (the first read of a depth stream has one source), so DDP
    must look for those without a gradient. Looking also keeps it from regrouping gradients after
    its first step, which a resumed run would do at another one: with more than two processes, sums
    in another order are other bits. It warns where it finds none; this one it always finds.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def accumulating(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Around forward and backward pass of a micro-batch: DDP exchanges only after a step's last."""
    if last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def settle(model: nn.Module) -> None:
    """Let go of weights that a pass without a backward pass gathered (FSDP2 keeps the root's).

    Until then ``named_parameters`` gives whole copies instead of what the optimiser updates.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# -- agreement ---------------------------------------------------------------------------------


def together(work: Callable[[], T]) -> T:
    """Do something in the first process alone; all processes get its result or its error.

    Args:
        work: exchanges nothing; what it returns can be pickled.

    Raises:
        SatlensError: in all processes, the one that ``work`` raised. What else it raises ends the
            first process as it is and the others with a SatlensError.
    """
    rank, size = world()
    if size == 1:
        return work()
    outcome: list[Any] = [None, None]
    raised: Exception | None = None
    if rank == 0:
        try:
            outcome[0] = work()
        except SatlensError as error:
            raised = outcome[1] = error
        except Exception as error:
            raised = error
            outcome[1] = SatlensError(f"process 0: {type(error).__name__}: {error}")
    with exchange_group() as group:
        dist.broadcast_object_list(outcome, src=0, group=group)
    error = raised or outcome[1]
    if error is not None:
        raise error
    return outcome[0]


def largest(number: int) -> int:
    """The largest of the numbers that the processes give."""
    if world().size == 1:
        return number
    mine = torch.tensor(number)
    with exchange_group() as group:
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=group)
    return int(mine)


def any_rank(flag: bool) -> bool:
    """Whether it is true in any process."""
    return largest(int(flag)) > 0


def total(part: Tensor) -> Tensor:
    """The sum over all processes of a tensor on the device of training, in place."""
    if world().size > 1:
        dist.all_reduce(part)
    return part


def gathered(mine: Tensor) -> Tensor:
    """Tensors of one shape (...) from every process, on the CPU: (N, ...)."""
    mine, size = mine.cpu().contiguous(), world().size
    if size == 1:
        return mine[None]
    parts = [torch.empty_like(mine) for _ in range(size)]
    with exchange_group() as group:
        dist.all_gather(parts, mine, group=group)
    return torch.stack(parts)
