"""Parameters that training never changes: dead ones, or ones too coarse to move.

A parameter without a gradient stays as it was drawn. So does one whose every update is less than
half of the spacing of its numbers: a scalar at 0.5 kept in bf16 ignores steps below 0.001. The loss
shows neither.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from satlens.processes import exchange_group, world

_CHUNK = 2**20
_WEIGHTS_SEED = 0
_FOLD = 0x9E3779B97F4A7C15 - 2**64  # odd, so that multiplying by it loses nothing
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenParameters:
    """Compares the bits of every parameter with those at construction.

    Create it from the initial weights, before a saved state is restored and before the first pass:
    then shards of FSDP2 are seen as the optimiser sees them. What is kept is a 64-bit checksum a
    parameter, of this process's shard.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        device = next(iter(self._parameters.values())).device
        largest = max(_local(p).numel() for p in self._parameters.values())
        self._weights = _random_weights(min(largest, _CHUNK), device)
        self._start = self._sums()

    def names(self) -> list[str]:
        """Parameters whose every bit is that of the start; all processes must call this."""
        changed = (self._sums() != self._start).int().cpu()
        if world().size > 1:
            with exchange_group() as group:
                dist.all_reduce(changed, dist.ReduceOp.MAX, group=group)
        return [name for name, moved in zip(self._parameters, changed, strict=True) if not moved]

    def _sums(self) -> Tensor:
        return torch.stack([checksum(p, self._weights) for p in self._parameters.values()])


def checksum(tensor: Tensor, weights: Tensor) -> Tensor:
    """A 64-bit sum of the bits of a tensor, or of this process's shard of it; scalar, int64.

    Each number's bits, as an integer, times a random odd number of its own, modulo 2^64. A plain
    sum or xor would not do: a norm's weights all start at 1 and all move by the same step at first,
    some up and some down, which may cancel.

    Args:
        weights: (C,) odd int64; longer tensors are summed C numbers at a time.
    """
    numbers = _local(tensor).detach().reshape(-1)
    bits = numbers.view(_INTEGERS[numbers.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(len(weights)):
        total = total * _FOLD + (chunk.long() * weights[: len(chunk)]).sum()
    return total


def _random_weights(length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_WEIGHTS_SEED)
    limit = 2**63 - 1
    return (torch.randint(-limit, limit, (length,), generator=generator) | 1).to(device)


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, or the tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast(Tensor, to_local())
