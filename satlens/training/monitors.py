"""What a run reports: metrics and timing as JSON lines, counters kept on the device."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from satlens.errors import CheckpointError, SatlensError
from satlens.training.run_folder import writing


class NonFiniteError(SatlensError):
    """A loss or gradient was infinite or not a number; the weights are those before that step."""


class JsonLines:
    """A file of JSON objects, one a line, that can be cut back to where a saved state was.

    Args:
        path: the file; what follows its first ``keep`` bytes is dropped.
        sha256: what these bytes have to be (hex SHA-256); None does not look.

    Raises:
        CheckpointError: the file is shorter than that, has other bytes, or cannot be written.
    """

    def __init__(self, path: Path, keep: int = 0, sha256: str | None = None) -> None:
        self.path = path
        with writing(path):
            # Unbuffered: what a full disk refused must not be tried again on closing.
            self._stream = path.open("a+b", buffering=0)
            size = self._stream.tell()
            if size < keep:
                self._stream.close()
                raise CheckpointError(
                    f"{path}: {size} bytes, the saved state says {keep}: it was cut or replaced"
                )
            self._stream.truncate(keep)
            self._stream.seek(0)
            self._digest = hashlib.sha256(self._stream.read())
        if sha256 not in (None, self.sha256):
            self._stream.close()
            raise CheckpointError(
                f"{path}: sha256: the first {keep} bytes are not those of the saved state"
            )

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of all that the file holds."""
        return self._digest.hexdigest()

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; a reader never waits for it."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode("ascii")
        self._digest.update(line)
        with writing(self.path):
            while line:
                line = line[self._stream.write(line) :]

    def sync(self) -> int:
        """Bytes written, all of them safe on the disk.

        Raises:
            CheckpointError: the file was moved, removed or replaced since it was opened.
        """
        with writing(self.path):
            os.fsync(self._stream.fileno())
            here = self.path.stat() if self.path.exists() else None
            if here is None or not os.path.samestat(here, os.fstat(self._stream.fileno())):
                raise CheckpointError(f"{self.path}: was moved or removed while it was written")
        return self._stream.tell()

    def close(self) -> None:
        self._stream.close()


class Counters:
    """Loss, gradient norm and non-finite steps, on the device so that no step waits for a number.

    Under ``stop`` the first bad step blocks its own update and all later ones through
    :attr:`blocked`; :meth:`check` reports it when the host next looks.
    """

    def __init__(self, device: torch.device, on_nonfinite: str) -> None:
        def zero(value: int = 0) -> Tensor:
            return torch.full((), value, dtype=torch.float64, device=device)

        self._sticky = on_nonfinite == "stop"
        self.tensors = {
            "loss_sum": zero(),
            "n_losses": zero(),
            "grad_norm": zero(),
            "skipped": zero(),
            "bad_step": zero(-1),
        }
        self.blocked = torch.zeros((), device=device)
        """1.0 where the optimiser must not update, in the form that fused AdamW reads."""

    def add(self, step: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Take in the loss and the gradient norm of a step that is not applied yet."""
        t = self.tensors
        bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        if self._sticky:
            t["bad_step"].masked_fill_(bad & (t["bad_step"] < 0), step)
            bad = t["bad_step"] >= 0
        else:
            t["skipped"].add_(bad)
        t["loss_sum"].add_(torch.where(bad, 0.0, loss))
        t["n_losses"].add_(~bad)
        t["grad_norm"].copy_(grad_norm)
        self.blocked.copy_(bad)

    def check(self, grad_accum: int) -> None:
        """Wait for the device and look for a step that must end the run.

        Raises:
            NonFiniteError: names the step and its micro-batches.
        """
        step = int(self.tensors["bad_step"].item())
        if step >= 0:
            first, last = step * grad_accum, (step + 1) * grad_accum - 1
            batches = f"batch {first}" if first == last else f"batches {first}..{last}"
            raise NonFiniteError(
                f"step {step} ({batches}): loss or gradient is not finite; stopped before the "
                "update (lower lr, or set on_nonfinite to skip)"
            )

    def drain(self) -> dict[str, float | int | None]:
        """Mean loss since the last call, the last gradient norm, and steps skipped so far."""
        values = {name: tensor.item() for name, tensor in self.tensors.items()}
        self.tensors["loss_sum"].zero_()
        self.tensors["n_losses"].zero_()
        n = values["n_losses"]
        norm = values["grad_norm"]
        return {
            "loss": values["loss_sum"] / n if n else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "skipped_steps": int(values["skipped"]),
        }


class Stopwatch:
    """Seconds spent in named parts of a run since the last :meth:`drain`; the rest is training.

    Args:
        utilisation: share of the devices' peak at a number of tokens a second, None where that is
            unknown (see :func:`satlens.training.flops.model_flops_utilisation`).
    """

    def __init__(self, utilisation: Callable[[float], float | None] = lambda _: None) -> None:
        self._start = time.perf_counter()
        self._parts: dict[str, float] = {}
        self._utilisation = utilisation

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside under ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._parts[name] = self._parts.get(name, 0.0) + elapsed

    def drain(self, tokens: int) -> dict[str, Any]:
        """Where the interval's seconds went, and how fast what is not evaluating or saving was.

        Returns:
            ``seconds`` in all, ``data_seconds``, ``evaluation_seconds`` and ``saving_seconds`` of
            them; ``tokens_per_second`` of training, the share ``data_wait`` of training's seconds
            that waited for data, and ``mfu`` (None: unknown device or not bf16).
        """
        now = time.perf_counter()
        parts, seconds = self._parts, now - self._start
        self._start, self._parts = now, {}
        spent = {name: parts.get(name, 0.0) for name in ("data", "evaluation", "saving")}
        training = max(seconds - spent["evaluation"] - spent["saving"], 1e-9)
        speed = tokens / training
        mfu = self._utilisation(speed)
        return {
            "seconds": round(seconds, 6),
            **{f"{name}_seconds": round(value, 6) for name, value in spent.items()},
            "tokens_per_second": round(speed, 1),
            "data_wait": round(spent["data"] / training, 6),
            "mfu": None if mfu is None else round(mfu, 4),
        }
