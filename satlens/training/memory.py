"""Memory that training will take on a GPU, before there is one: weights in closed form, the rest
measured on tensors without data.

Bytes are those that one process has allocated at the worst moment of a step. CUDA's own context and
libraries (half a GB to two), and what its allocator loses to fragments, come on top.

Shapes: B rows of a micro-batch, T positions, V vocabulary, P parameters, N processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from satlens.config import ModelConfig, TrainConfig
from satlens.models.attention import attention
from satlens.models.decoder import Decoder
from satlens.models.layers import at_least_fp32, rope_table
from satlens.training.evaluation import autocast

BYTES_PER_PARAMETER = 16
"""fp32 weight, gradient and AdamW's two moments."""
_FP32 = 4


def state_bytes(model: Decoder, cfg: TrainConfig, processes: int = 1) -> tuple[int, int]:
    """Bytes of the training state of one of N processes, and of what is gathered beside it.

    One process and ddp hold 16 P bytes. ddp keeps a step's gradients in buckets, and until the last
    of several micro-batches they are summed outside of them: 4 P more. fsdp holds 16 P / N, beside
    it the weights and gradients of the root (embeddings, final norm and read), which stay from a
    pass's forward to the end of its backward, and of the two blocks at work and on their way.
    """
    n = model.n_parameters()
    if processes == 1:
        return n * BYTES_PER_PARAMETER, 0
    if cfg.strategy == "ddp":
        several = cfg.grad_accum > processes
        return n * BYTES_PER_PARAMETER, n * _FP32 * several
    blocks = sorted((_size(block) for block in model.blocks), reverse=True)
    at_work = n - sum(blocks) + sum(blocks[:2])
    return -(-n * BYTES_PER_PARAMETER // processes), 2 * at_work * _FP32


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# -- activations -------------------------------------------------------------------------------


def activation_bytes(
    cfg: ModelConfig, rows: int, *, precision: str = "bf16", checkpointing: bool = False
) -> int:
    """Peak of everything but weights and gradients while B rows of T tokens are trained on.

    The pass of a GPU runs at its real size on tensors without data (``FakeTensorMode``), and all
    that is alive is added up after every operation: saved activations, autocast's copies of the
    weights, the logits, gradients of activations. Attention is the fused kernel, without a document
    mask; the loss is ``F.cross_entropy`` of fp32 logits. Nothing is compiled.
    """
    with _without_tables(), FakeTensorMode():
        model = _Unchecked(cfg, seed=None)
        model.gradient_checkpointing = checkpointing
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)  # there from the second micro-batch on
        ids = torch.zeros(rows, cfg.n_ctx, dtype=torch.int64)
        alive = _Alive(t for p in model.parameters() for t in (p, p.grad))
        with alive:
            train_on(model, ids, precision)
    return alive.peak


def train_on(model: Decoder, ids: Tensor, precision: str) -> None:
    """One forward and backward pass as a GPU runs it, wherever the ids (B, T) are."""
    with attention("fused"), autocast(ids.device, precision):
        state = model(ids, None, stop_at_layer=model.cfg.n_layers).state
        x = model.stream.finish(model, state, False)
        logits = model.unembed(x, model.embed.weight).flatten(0, 1)
        del state, x
        loss = F.cross_entropy(at_least_fp32(logits), ids.flatten())
        del logits
    loss.backward()


class _Unchecked(Decoder):
    """A decoder for ids that have no values to look at."""

    def _check(self, tokens: Any, past: Any = None) -> Tensor:
        return tokens


class _Alive(TorchDispatchMode):
    """Bytes of tensors that are alive, apart from given ones, and the most there have been."""

    def __init__(self, apart: Iterator[Tensor | None]) -> None:
        super().__init__()
        self._bytes, self.peak = 0, 0
        self._seen: dict[int, Any] = {t.untyped_storage()._cdata: t for t in apart if t is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self._bytes)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def gone(_: Any) -> None:
            self._bytes -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)
        self._bytes += size


@contextmanager
def _without_tables() -> Iterator[None]:
    """Rotary tables are kept from pass to pass: none without data may get among the real ones."""
    rope_table.cache_clear()
    try:
        yield
    finally:
        rope_table.cache_clear()
