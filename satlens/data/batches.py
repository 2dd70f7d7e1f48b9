"""Training batches: a packed stream of documents whose order is a function of (seed, step) only.

Each epoch shuffles the documents, lays them out as ``<end> doc <end> doc <end> ...``, cuts that
stream into chunks of ``n_ctx`` targets (inputs and targets overlap by one) and shuffles the chunks.
So each token of the split, and one end token a document, is a target exactly once an epoch. The
last chunk of the stream is short and padded. Rows run on over epochs, without a short batch
between. Shapes: B rows, T = n_ctx positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from satlens.data.dataset import Split
from satlens.data.windows import IGNORE
from satlens.errors import DataError

_DOCUMENTS, _CHUNKS = 0, 1  # purposes of the generators of one epoch


class TrainBatch(NamedTuple):
    """One micro-batch; int64 tensors (B, T) on the CPU."""

    inputs: torch.Tensor
    targets: torch.Tensor
    """Next tokens; -100 in the padding of an epoch's last chunk."""
    documents: torch.Tensor
    """Which document each input belongs to (an end token belongs to the document it ends);
    -1 is padding. Equal ids within a row: the same document."""


class _Chunks(NamedTuple):
    """The chunks of an epoch in the order of its rows."""

    order: np.ndarray
    short: int
    """Row of the stream's last chunk, the one that is padded."""


class TrainBatches:
    """Random access to the training batches of a split.

    Args:
        split: documents to train on.
        n_ctx: T, targets in a row.
        batch_size: B, rows in a batch.
        seed: of the order; nothing else enters it.

    Raises:
        DataError: a non-positive size.
    """

    def __init__(self, split: Split, n_ctx: int, batch_size: int, seed: int) -> None:
        for name, value in (("n_ctx", n_ctx), ("batch_size", batch_size)):
            if value <= 0:
                raise DataError(f"{name}: must be positive, got {value}")
        self.split = split
        self.n_ctx = n_ctx
        self.batch_size = batch_size
        self.seed = seed
        self._starts = np.concatenate([[0], split.ends[:-1]])
        self._lengths = split.ends - self._starts
        self._epoch = -1
        self._permuted: dict[int, _Chunks] = {}

    @property
    def targets_per_epoch(self) -> int:
        """Tokens of the split and one end token a document."""
        return self.split.n_tokens + self.split.n_documents

    @property
    def chunks_per_epoch(self) -> int:
        """Rows in an epoch."""
        return -(-self.targets_per_epoch // self.n_ctx)

    def batch(self, number: int) -> TrainBatch:
        """Micro-batch number ``number``, counted from 0 over all epochs."""
        rows = [self._row(number * self.batch_size + k) for k in range(self.batch_size)]
        return TrainBatch(*(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True)))

    def scored(self, number: int) -> int:
        """Targets of micro-batch ``number`` that are scored, without reading its rows."""
        first, size = number * self.batch_size, self.chunks_per_epoch
        rows = range(first, first + self.batch_size)
        padding = size * self.n_ctx - self.targets_per_epoch
        short = (
            epoch * size + self._chunks_of(epoch).short
            for epoch in range(rows[0] // size, rows[-1] // size + 1)
        )
        return self.batch_size * self.n_ctx - padding * sum(row in rows for row in short)

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        epoch, position = divmod(number, self.chunks_per_epoch)
        self._enter(epoch)
        start = int(self._chunks_of(epoch).order[position]) * self.n_ctx
        tokens, documents = self._stream(start, start + self.n_ctx + 1)
        n = len(tokens) - 1
        inputs = np.full(self.n_ctx, self.split.end_id, dtype=np.int64)
        targets = np.full(self.n_ctx, IGNORE, dtype=np.int64)
        owners = np.full(self.n_ctx, -1, dtype=np.int64)
        inputs[:n], targets[:n], owners[:n] = tokens[:-1], tokens[1:], documents[:-1]
        return inputs, targets, owners

    def _enter(self, epoch: int) -> None:
        """Draw the documents' permutation of an epoch (kept until another epoch is asked for)."""
        if epoch == self._epoch:
            return
        order = np.random.default_rng([self.seed, epoch, _DOCUMENTS])
        self._order = order.permutation(self.split.n_documents)
        # Ends in the stream, where each document carries its end token and one stands in front.
        self._ends = np.cumsum(self._lengths[self._order] + 1) + 1
        self._epoch = epoch

    def _chunks_of(self, epoch: int) -> _Chunks:
        """The chunks' permutation of an epoch; two are kept, since a step may touch two epochs."""
        if epoch not in self._permuted:
            generator = np.random.default_rng([self.seed, epoch, _CHUNKS])
            order = generator.permutation(self.chunks_per_epoch)
            newest = dict(list(self._permuted.items())[-1:])
            self._permuted = newest | {epoch: _Chunks(order, int(order.argmax()))}
        return self._permuted[epoch]

    def _stream(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, stop) of the epoch's stream and the document of each."""
        stop = min(stop, self.targets_per_epoch + 1)
        tokens = np.full(stop - start, self.split.end_id, dtype=np.int64)
        documents = np.full(stop - start, self.split.n_documents, dtype=np.int64)
        place = int(np.searchsorted(self._ends, start, side="right"))
        while place < len(self._ends):
            index = int(self._order[place])
            length = int(self._lengths[index])
            begin = int(self._ends[place]) - length - 1
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, begin + length)
            offset = int(self._starts[index]) - begin
            if low < high:
                tokens[low - start : high - start] = self.split.tokens[low + offset : high + offset]
            documents[low - start : min(stop, begin + length + 1) - start] = index
            place += 1
        return tokens, documents
