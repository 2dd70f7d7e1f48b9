"""MUDDFormer's depth reads, which two published layouts store under names of their own.

Their read of layer l stands in the block (or at the index) whose output it follows, l - 1; ours in
the block that reads. The last one is the output read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from satlens.config import ModelConfig, MuddStream

WAYS = 4
"""Queries, keys, values and the residual, in this order."""


class MuddRead(NamedTuple):
    """One depth read and the sizes of its tensors."""

    ours: str
    """Prefix of our names."""
    follows: int
    """Layer whose output it follows."""
    ways: int
    sources: int
    hidden: int


def mudd_reads(cfg: ModelConfig) -> Iterator[MuddRead]:
    """Every depth read of a model, in order of execution."""
    stream = cfg.stream
    assert isinstance(stream, MuddStream)
    for layer in range(cfg.n_layers):
        last = layer == cfg.n_layers - 1
        ways, sources = 1 if last else WAYS, layer + 2
        hidden = stream.hidden_width(ways, sources, last=last)
        ours = "out_read." if last else f"blocks.{layer + 1}.depth_read."
        yield MuddRead(ours, layer, ways, sources, hidden)
