"""A key-value cache that transformers' ``generate`` and satlens models both understand."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from satlens.models.cache import KVCache


class SatlensKVCache(Cache):
    """A :class:`satlens.KVCache` as transformers' ``generate`` handles caches, beams included.

    ``generate`` makes one itself; give one (``cache=SatlensKVCache()``) to continue a text later.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.kv = KVCache()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kv.batch_size} rows of {len(self.kv)} positions)"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions held, padding included."""
        return len(self.kv)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: it grows as needed, up to the model's n_ctx."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, in this order: beam search's survivors."""
        self.kv.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self.kv.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        rows = torch.arange(self.kv.batch_size)
        self.kv.reorder(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` positions (transformers counts them negative)."""
        self.kv.truncate(len(self.kv) + tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        self.kv.truncate(0)

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first pass."""
        return self.kv.batch_size or -1

    @property
    def is_linear(self) -> list[bool]:
        """It holds a position's keys and values, not a running state."""
        return [False]

    @property
    def is_initialized(self) -> bool:
        return len(self.kv) > 0
