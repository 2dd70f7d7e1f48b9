"""Keys and values of the tokens a model has read, so that later passes read new tokens only.

Shapes: B rows, K KV heads, S positions held, C positions there is room for, T new positions, E head
width.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from satlens.errors import DataError, HookError

SMALLEST_ROOM = 64


class KVCache:
    """What ``model(tokens, past=cache)`` reads and appends to.

    It holds each layer's keys after RoPE and values after mixing, so V_1 and the state of the
    depth stream, which belong to a position alone, need no cache. Positions continue, and padding
    and documents of earlier passes stay masked. During a pass ``len(cache)`` is the position of
    its first token; a pass that raises leaves the cache as it was.

    A pass with a cache carries no gradients. One cache goes with one model and with one set of
    hooks: what edited hooks made of earlier positions is in their keys and values, and cannot be
    undone. Only hooks that just look (:class:`satlens.hooks.ReadOnly`, ``run_with_cache``) may
    come and go.

    Args:
        reserve: positions to make room for at once. Without it room doubles when it runs out.
    """

    def __init__(self, reserve: int = 0) -> None:
        self._reserve = reserve
        self._length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._documents: Tensor | None = None
        self._ends_real = False
        self._hooks: tuple[Any, ...] = ()
        self._model: weakref.ref[Any] | None = None

    # -- what it holds ------------------------------------------------------------------------

    def __len__(self) -> int:
        """Positions held of each row, padding included."""
        return self._length

    @property
    def batch_size(self) -> int:
        """Rows; 0 before the first pass."""
        return len(self._keys[0]) if self._length else 0

    @property
    def room(self) -> int:
        """Positions there is memory for."""
        return self._values[-1].shape[2] if self._values else 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated, room for later positions included."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))

    @property
    def documents(self) -> Tensor | None:
        """(B, S) document ids, -1 where padding; None while every position is of one document."""
        return self._documents

    def keys(self, layer: int) -> Tensor:
        """Rotated keys of a layer, a view (B, S, K, E)."""
        return self._keys[layer][:, :, : self._length].transpose(1, 2)

    def values(self, layer: int) -> Tensor:
        """Mixed values of a layer, a view (B, S, K, E)."""
        return self._values[layer][:, :, : self._length].transpose(1, 2)

    # -- what a caller may do with it -----------------------------------------------------------

    def truncate(self, length: int) -> None:
        """Forget the positions from ``length`` on; at 0 the cache is as new.

        Raises:
            DataError: more positions than it holds, or fewer than none.
        """
        if not 0 <= length <= self._length:
            raise DataError(f"length: the cache holds {self._length} positions, got {length}")
        self._length = length
        if length == 0:
            self._keys, self._values, self._documents = [], [], None
        elif self._documents is not None:
            self._documents, self._ends_real = self._documents[:, :length], False

    def reorder(self, rows: Tensor) -> None:
        """Keep rows ``rows`` (N,), in this order; a row may be kept several times or not at all.

        Raises:
            DataError: a row that is not there.
        """
        if rows.ndim != 1 or not len(rows):
            raise DataError(f"rows: expected (rows,), not empty, got {[*rows.shape]}")
        low, high = (int(row) for row in torch.aminmax(rows))
        if low < 0 or high >= self.batch_size:
            worst = low if low < 0 else high
            raise DataError(f"rows: the cache holds {self.batch_size} rows, got row {worst}")
        rows = rows.to(self._keys[0].device)
        with torch.inference_mode(False), torch.no_grad():
            for store in (self._keys, self._values):
                for layer, held in enumerate(store):
                    store[layer] = held.index_select(0, rows)
        if self._documents is not None:
            self._documents = self._documents.index_select(0, rows)

    def clone(self) -> KVCache:
        """A copy that continues on its own."""
        other = KVCache(self._reserve)
        other.__dict__.update(self.__dict__)
        with torch.inference_mode(False), torch.no_grad():
            other._keys = [t.clone() for t in self._keys]
            other._values = [t.clone() for t in self._values]
        return other

    # -- what a model does with it --------------------------------------------------------------

    @contextmanager
    def reading(
        self,
        model: Any,
        tokens: Tensor,
        documents: Tensor | None,
        padding: Tensor | None,
        dtype: torch.dtype,
    ) -> Iterator[Tensor | None]:
        """Around a forward pass over ``tokens`` (B, T): its positions are held once it succeeds.

        Args:
            model: a decoder, whose layers call :meth:`append` once each.
            documents: (B, T) ids of the new tokens; None continues each row's last document.
            padding: (B, T) bool, which of the new tokens are padding.
            dtype: of keys and values.

        Yields:
            (B, S) ids of all positions, the new ones included, or None.

        Raises:
            DataError: the cache is of another model, batch size, dtype or device; padding inside
                a document.
            HookError: other hooks than earlier positions were read under.
        """
        hooks = model.editing_hooks()
        if self._length:
            self._check_continues(model, tokens, dtype, hooks)
        told = documents is not None or padding is not None
        documents = self.all_documents(tokens, documents, padding)
        self._make_room(model.cfg, tokens, dtype)
        yield documents
        self._documents = documents
        self._ends_real = not told or (documents is not None and _end_real(documents))
        self._length += tokens.shape[1]
        self._model, self._hooks = weakref.ref(model), hooks

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values (B, T, K, E); returns all of them, (B, S, K, E)."""
        keys, values = self._keys[layer], self._values[layer]
        stop = self._length + k.shape[1]
        keys[:, :, self._length : stop] = k.transpose(1, 2)
        values[:, :, self._length : stop] = v.transpose(1, 2)
        if self._length == 0:  # laid out as without a cache
            return k, v
        return keys[:, :, :stop].transpose(1, 2), values[:, :, :stop].transpose(1, 2)

    def _check_continues(
        self, model: Any, tokens: Tensor, dtype: torch.dtype, hooks: tuple[Any, ...]
    ) -> None:
        held = self._keys[0]
        if self._model is None or self._model() is not model:
            raise DataError("past: this cache was begun by another model")
        if len(tokens) != len(held):
            raise DataError(f"past: the cache holds {len(held)} rows, tokens has {len(tokens)}")
        if (held.dtype, held.device) != (dtype, tokens.device):
            raise DataError(
                f"past: the cache is {held.dtype} on {held.device}, this pass {dtype} on "
                f"{tokens.device}"
            )
        if hooks != self._hooks:
            raise HookError(
                f"past: {_differing(hooks, self._hooks)} has other hooks than when this cache was "
                "begun; begin a new one, or mark hooks that only look with satlens.hooks.ReadOnly"
            )

    def all_documents(
        self, tokens: Tensor, new: Tensor | None, padding: Tensor | None
    ) -> Tensor | None:
        """(B, S) ids of the positions held and of new ones; None if all are of one document.

        Arguments and errors are those of :meth:`reading`.
        """
        held = self._documents
        if self._length and held is None and new is not None:
            raise DataError("documents: this cache was begun without, so earlier tokens have none")
        if held is None and new is None and padding is None:
            return None
        if held is None:
            held = tokens.new_zeros(len(tokens), self._length)
        # More of the documents that rows end in separates nothing; every decoded token is that.
        continues = new is None and padding is None and self._ends_real
        if new is None and self._length:
            new = held[:, -1:] if self._ends_real else _last_real(held)
        new = (held.new_zeros(len(tokens), 1) if new is None else new).expand_as(tokens)
        if padding is not None:
            new = new.masked_fill(padding, -1)
        documents = torch.cat((held, new), 1)
        if not continues and _padded_inside(documents):
            raise DataError(
                "attention_mask: padding between two tokens of a row would shift their positions; "
                "pad on the left"
            )
        return documents

    def _make_room(self, cfg: Any, tokens: Tensor, dtype: torch.dtype) -> None:
        """Memory for the new positions; room doubles, so that writing stays linear in all."""
        needed = self._length + tokens.shape[1]
        if self._length and needed <= self.room:
            return
        room = max(needed, min(cfg.n_ctx, max(self._reserve, 2 * self._length, SMALLEST_ROOM)))
        shape = (len(tokens), cfg.n_key_value_heads, room, cfg.d_head)

        def empty() -> Tensor:
            return torch.empty(shape, dtype=dtype, device=tokens.device)

        # Ordinary tensors also in inference mode, so that a cache can be continued outside it.
        with torch.inference_mode(False), torch.no_grad():
            if not self._length:
                self._keys = [empty() for _ in range(cfg.n_layers)]
                self._values = [empty() for _ in range(cfg.n_layers)]
                return
            for store in (self._keys, self._values):
                for layer, held in enumerate(store):
                    grown = empty()
                    grown[:, :, : self._length] = held[:, :, : self._length]
                    store[layer] = grown


def _differing(now: tuple[Any, ...], before: tuple[Any, ...]) -> str:
    """The first module that two lists of (module, hook) say different things of."""
    return next(
        name
        for name, _ in (*now, *before)
        if [hook for at, hook in now if at == name] != [hook for at, hook in before if at == name]
    )


def _last_real(documents: Tensor) -> Tensor:
    """(B, 1) id of each row's last position that is no padding; 0 where there is none."""
    place = torch.arange(1, documents.shape[1] + 1, device=documents.device)
    last = ((documents >= 0) * place).argmax(1, keepdim=True)
    return documents.gather(1, last).clamp(min=0)


def _end_real(documents: Tensor) -> bool:
    """Whether no row ends in padding."""
    return bool((documents[:, -1] >= 0).all())


def _padded_inside(documents: Tensor) -> bool:
    """Whether padding separates two tokens of one document in any row."""
    place = torch.arange(documents.shape[1], device=documents.device)
    real = documents >= 0
    # The last real place up to each, and so the one before each.
    last = torch.where(real, place, -1).cummax(1).values[:, :-1]
    before = documents.gather(1, last.clamp(min=0))
    gap = (last >= 0) & (last < place[:-1]) & real[:, 1:] & (before == documents[:, 1:])
    return bool(gap.any())
