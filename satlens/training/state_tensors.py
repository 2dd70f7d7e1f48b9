"""The tensors of a run's state, whole or in shards, to and from safetensors files.

A model whose parameters are sharded (FSDP2) is written through torch.distributed.checkpoint, each
process its own shards; its reader takes both forms, so a state goes into any number of processes
and either strategy, and every value keeps its bits. Nothing is pickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule

from satlens.errors import CheckpointError
from satlens.models.decoder import Decoder
from satlens.processes import exchange_group, world
from satlens.training.distributed import settle, together

WHOLE = "state.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")
READ, WRITTEN = "cannot be read", "cannot be written"

T = TypeVar("T")


class Holders(NamedTuple):
    """What a state is taken from and put back into."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    counters: dict[str, Tensor]

    @property
    def sharded(self) -> bool:
        """Whether each process holds a part of each parameter only."""
        return any(isinstance(module, FSDPModule) for module in self.model.modules())

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Named parameters, as shards where they are sharded: what the optimiser knows."""
        settle(self.model)
        return list(self.model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in the file; a parameter without a gradient has no moments."""
        named = {}
        for name, parameter in self.parameters():
            named[f"model.{name}"] = parameter.detach()
            for key, value in self.optimiser.state.get(parameter, {}).items():
                named[f"optimiser.{key}.{name}"] = value.detach()
        return named | {f"counters.{name}": tensor for name, tensor in self.counters.items()}


def consolidated(model: Decoder) -> Decoder | None:
    """A model with whole weights for a checkpoint; every process must call this.

    Returns:
        In process 0 the model, on the CPU where it had been sharded; None in the others.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return model if world().rank == 0 else None
    settle(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if world().rank > 0:
        return None
    with torch.device("meta"):
        whole = Decoder(model.cfg, seed=None, tokenizer=model.tokenizer)
    whole.load_state_dict(state, strict=True, assign=True)
    return whole


# -- writing -------------------------------------------------------------------------------------


def write_tensors(folder: Path, place: Path, holders: Holders) -> list[Path]:
    """Write every tensor into a folder: process 0 all of it, or each process its shards.

    Every process must call this.

    Args:
        place: what the folder will be called, for messages.

    Returns:
        The files that this process wrote.

    Raises:
        CheckpointError: (in every process) one of them could not write.
    """
    tensors = holders.tensors()
    if not holders.sharded:
        whole = {name: t.contiguous().cpu() for name, t in tensors.items()}

        def write() -> None:
            with one_line(place, WRITTEN):
                save_file(whole, folder / WHOLE)

        together(write)
        return [] if world().rank else [folder / WHOLE]
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with one_line(place, WRITTEN), exchange_group() as group:
        save(tensors, storage_writer=writer, process_group=group)
    return sorted(folder.glob(f"shard-{world().rank + 1:05d}-*.safetensors"))


# -- reading -------------------------------------------------------------------------------------


def read_tensors(folder: Path, holders: Holders) -> None:
    """Put a state's tensors into a model, an optimiser and counters, leaving nothing over.

    Every process reads what it holds, from files of any number of processes.

    Raises:
        CheckpointError: names the file (or the folder of shards) and the tensor that is missing,
            unexpected or of another shape or type.
    """
    reader = HuggingFaceStorageReader(str(folder))
    file = folder / WHOLE if (folder / WHOLE).exists() else folder
    with one_line(file, READ):
        stored = reader.read_metadata().state_dict_metadata
    wanted = _wanted(holders, stored)
    for name, tensor in wanted.items():
        _check(file, name, stored.get(name), tensor)
    for name in stored:
        if name not in wanted:
            raise CheckpointError(f"{file}: {name}: unexpected")
    with one_line(file, READ), warnings.catch_warnings():
        # As it should: each process reads for itself.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(dict(wanted), storage_reader=reader, no_dist=True)


def _wanted(holders: Holders, stored: dict[str, Any]) -> dict[str, Tensor]:
    """Where each tensor goes; the optimiser gets moments for the parameters that had some."""
    for name, parameter in holders.parameters():
        if f"optimiser.step.{name}" in stored:
            step = torch.zeros((), device=parameter.device)
            moments = {key: torch.zeros_like(parameter) for key in _MOMENTS}
            holders.optimiser.state[parameter] = {"step": step, **moments}
    return holders.tensors()


def _check(file: Path, name: str, stored: Any, wanted: Tensor) -> None:
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(f"{file}: {name}: missing")
    dtype, shape = stored.properties.dtype, [*stored.size]
    if shape != [*wanted.shape] or dtype != wanted.dtype:
        raise CheckpointError(
            f"{file}: {name}: {dtype} {shape}, {wanted.dtype} {[*wanted.shape]} expected"
        )


# -- processes -----------------------------------------------------------------------------------


def everywhere(body: Callable[[], T], path: Path, fault: str = WRITTEN) -> list[T]:
    """Run a body in every process; all get everybody's result, or the same error.

    Args:
        path: what it works on, and
        fault: what it means if the disk refuses, for the message.

    Raises:
        CheckpointError: the body failed in some process; the first one's.
    """
    result: T | None = None
    text: str | None = None
    try:
        with one_line(path, fault):
            result = body()
    except CheckpointError as error:
        text = str(error)
    outcomes: list[Any] = [(result, text)]
    if world().size > 1:
        outcomes = [None] * world().size
        with exchange_group() as group:
            dist.all_gather_object(outcomes, (result, text), group=group)
    for _, text in outcomes:
        if text is not None:
            raise CheckpointError(text)
    return [result for result, _ in outcomes]


@contextmanager
def one_line(path: Path, fault: str) -> Iterator[None]:
    """Faults of the disk and of files as one line that names the place."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _named_fault(path, fault, error) from None
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if not isinstance(first, OSError | SafetensorError):
            raise
        raise _named_fault(path, fault, first) from None


def _named_fault(path: Path, fault: str, error: BaseException) -> CheckpointError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CheckpointError(f"{path}: {fault} ({' '.join(reason.split()) or type(error).__name__})")
