"""Configs of small runs, and ways to break them off and to read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from satlens.config import ModelConfig, TrainConfig
from satlens.models.presets import config_for

SMALL = {"n_layers": 3, "d_model": 32, "n_heads": 4, "n_key_value_heads": 2, "n_ctx": 32}


def model_config(name: str = "satformer", **changes: Any) -> ModelConfig:
    return config_for(name, **{**SMALL, "d_vocab": 320, **changes})


def train_config(steps: int = 20, **changes: Any) -> TrainConfig:
    """``steps`` steps of two micro-batches of three rows."""
    fields = {
        "batch_size": 3,
        "grad_accum": 2,
        "precision": "fp32",
        "eval_every": 8,
        "eval_tokens": 300,
        "log_every": 3,
        "checkpoint_every": 5,
        "n_threads": 1,
        **changes,
    }
    per_step = fields["batch_size"] * fields["grad_accum"] * SMALL["n_ctx"]
    return TrainConfig(**{"tokens": steps * per_step, **fields})


class BrokenOffError(Exception):
    """What a run is interrupted with."""


class BreakAt:
    """A follower that ends the run, without any notice, when a step is finished."""

    def __init__(self, step: int | None = None) -> None:
        self.step = step
        self.first: int | None = None
        self.notes: list[str] = []

    def begin(self, title: str, total: int, done: int) -> None:
        self.first = done

    def update(self, done: int, fields: dict[str, float] | None = None) -> None:
        if done == self.step:
            raise BrokenOffError

    def note(self, text: str) -> None:
        self.notes.append(text)

    def end(self) -> None:
        return


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of one kind from a run's metrics."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def outputs(out: Path) -> dict[str, bytes]:
    """Every file of a finished run that must not depend on its history."""
    files = (path for path in out.rglob("*") if path.is_file())
    skipped = {".lock", "timing.jsonl"}
    return {str(f.relative_to(out)): f.read_bytes() for f in files if f.name not in skipped}
