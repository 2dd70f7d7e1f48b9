"""Speed of the trainer against a plain nanoGPT-style loop of the same model, and both losses.

    python benchmarks/training.py --d-model 128 --d-model 256

One run of ``satlens.training.train`` does everything a run does at every step, its line of metrics
included; after each of its steps the plain loop (``plain/loop.py``) does the same step on the same
rows, from the same initial weights, on the same number of threads. Speed is the ratio of the median
times of a step, plain over ours, with the quartiles of the ratios of neighbouring steps; data wait
is the share of our steps that went into fetching rows. Nothing is compiled, nothing is read ahead.

Both loops run in one process, so the plain one has the benefit of satlens' setting of the C
library's allocator too. Times are processor time on one thread and wall time on several: there the
machine must have nothing else to do.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from plain.loop import PlainLoop

from satlens.config import ModelConfig, TrainConfig
from satlens.data.batches import TrainBatches
from satlens.data.dataset import PreparedDataset
from satlens.data.prepare import prepare
from satlens.models.decoder import Decoder
from satlens.models.presets import config_for
from satlens.training import train
from satlens.training.plan import plan
from satlens.training.progress import NoProgress

VARIANTS = ("transformer", "satformer")
COMPARED = 20
"""Steps whose losses are compared."""
UNTIMED = 5
"""First steps, which are not timed."""
WARM_UP = 30
"""Steps of rising learning rate: as many as a run of TrainConfig's own budget has."""
PEAK = 1e-3
"""nanoGPT's learning rate of small models. Above it bf16's rounding alone sets two runs apart."""
D_HEAD = 64


class Turns(NoProgress):
    """Follows a run and lets the plain loop take its step after each of the run's."""

    def __init__(self, plain: PlainLoop, clock: Callable[[], float]) -> None:
        self.plain, self.clock = plain, clock
        self.losses: list[float] = []
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.wall: list[float] = []

    def begin(self, title: str, total: int, done: int) -> None:
        super().begin(title, total, done)
        self.resumed, self.since = self.clock(), time.perf_counter()

    def update(self, done: int, fields: dict[str, float] | None = None) -> None:
        self.wall.append(time.perf_counter() - self.since)
        start = self.clock()
        self.ours.append(start - self.resumed)
        self.losses.append(self.plain.step().item())
        self.resumed, self.since = self.clock(), time.perf_counter()
        self.theirs.append(self.resumed - start)


def model_config(variant: str, d_model: int, n_layers: int, n_ctx: int, d_vocab: int) -> Any:
    """Heads as wide as the papers' where they fit; documents not masked, as in nanoGPT."""
    heads = {"n_heads": d_model // D_HEAD} if d_model % D_HEAD == 0 else {}
    sizes = {"d_model": d_model, "n_layers": n_layers, "n_ctx": n_ctx, "d_vocab": d_vocab, **heads}
    return config_for(variant, document_mask=False, **sizes)


def compared(
    model_cfg: ModelConfig, train_cfg: TrainConfig, dataset: PreparedDataset, folder: Path
) -> tuple[dict[str, Any], pd.DataFrame]:
    """A row of the table of speeds, and the losses of the first steps side by side."""
    sizes = model_cfg.n_ctx, train_cfg.batch_size, train_cfg.seed
    batches = TrainBatches(dataset.split("train"), *sizes)
    source = Decoder(model_cfg, train_cfg.seed)
    clock = time.process_time if train_cfg.n_threads == 1 else time.perf_counter
    n_steps = plan(model_cfg, train_cfg).n_steps
    turns = Turns(PlainLoop(source, train_cfg, batches, n_steps), clock)
    train(model_cfg, train_cfg, dataset, folder, progress=turns, device="cpu")
    metrics, timing = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "timing.jsonl")
    )
    losses = pd.DataFrame(
        {
            "satlens": [line["loss"] for line in metrics if line["kind"] == "train"],
            "plain": turns.losses,
        },
        index=pd.RangeIndex(1, len(turns.losses) + 1, name="step"),
    )[:COMPARED]
    # The last step is followed by an evaluation.
    timed = slice(UNTIMED, -1)
    ours, theirs = np.array(turns.ours)[timed], np.array(turns.theirs)[timed]
    waited = sum(line["data_seconds"] for line in timing[timed])
    low, high = np.quantile(theirs / ours, (0.25, 0.75))
    row = {
        "variant": model_cfg.variant,
        "d_model": model_cfg.d_model,
        "parameters": source.n_parameters(),
        "satlens ms": f"{1e3 * np.median(ours):.1f}",
        "plain ms": f"{1e3 * np.median(theirs):.1f}",
        "speed": f"{np.median(theirs) / np.median(ours):.3f} ({low:.3f} to {high:.3f})",
        "data wait": f"{waited / sum(turns.wall[timed]):.2%}",
        "max loss difference": f"{(losses['satlens'] - losses['plain']).abs().max():.1e}",
    }
    return row, losses


def main(
    variants: Annotated[list[str] | None, typer.Argument(help="transformer, satformer.")] = None,
    data: Annotated[str, typer.Option(help="Prepared folder, or a corpus to prepare.")] = "sotu",
    d_model: Annotated[list[int] | None, typer.Option(help="Widths.")] = None,
    n_layers: int = 8,
    n_ctx: int = 256,
    batch_size: int = 4,
    grad_accum: int = 1,
    precision: str = "bf16",
    lr: float = PEAK,
    steps: Annotated[int, typer.Option(min=WARM_UP + 1)] = 100,
    threads: int = 2,
) -> None:
    """Print a table of speeds, then the losses of the first 20 steps."""
    with tempfile.TemporaryDirectory() as temporary:
        if (Path(data) / "manifest.json").exists():
            dataset = PreparedDataset.open(data)
        else:
            dataset = prepare(data, Path(temporary) / "data", vocab_size=2048)
        train_cfg = TrainConfig(
            tokens=steps * batch_size * grad_accum * n_ctx,
            batch_size=batch_size,
            grad_accum=grad_accum,
            precision=precision,  # type: ignore[arg-type]
            lr=lr,
            warmup=WARM_UP / steps,
            n_threads=threads,
            log_every=1,
            eval_every=steps,
            checkpoint_every=steps,
        )
        rows, losses = [], {}
        for width in d_model or (128, 256):
            for variant in variants or VARIANTS:
                cfg = model_config(variant, width, n_layers, n_ctx, dataset.vocab_size)
                folder = Path(temporary) / f"{variant}-{width}"
                row, losses[f"{variant} {width}"] = compared(cfg, train_cfg, dataset, folder)
                rows.append(row)
    print(pd.DataFrame(rows).to_string(index=False))
    print(pd.concat(losses, axis="columns").round(4).to_string())


if __name__ == "__main__":
    typer.run(main)
