"""Training speed and memory of the depth streams, against the transformer and their plain forms.

    python benchmarks/streams.py --d-model 256

All models take one optimiser step a round, in a fresh order, on one thread in bf16 autocast. A
ratio is the median over rounds of paired ratios of processor time, with quartiles; the transformer
against itself shows what the machine cannot resolve. Saved bytes are what one forward pass keeps
for the backward pass.
"""

from __future__ import annotations

import gc
import time
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer
from plain import PLAIN, plain_streams

from satlens.analysis.efficiency import Arm, saved_bytes
from satlens.config import TrainConfig
from satlens.models.presets import config_for
from satlens.training.allocator import keep_freed_memory

WARM_UP = 2
BASELINE, CONTROL = "transformer", "transformer (again)"
VARIANTS = (
    "denseformer",
    "muddformer",
    "muddformer-prepost",
    "hyperconnections",
    "hyperconnections-static",
    "delta-attnres",
    "delta-attnres-full",
)


def plain_name(variant: str) -> str:
    return f"{variant} (plain)"


def make_arms(variants: list[str], batch_size: int, **sizes: int) -> dict[str, Arm]:
    """The transformer twice, and each variant in satlens' and in its plain formulation."""
    train_cfg = TrainConfig(batch_size=batch_size)
    arms = {row: Arm(config_for(BASELINE, **sizes), train_cfg) for row in (BASELINE, CONTROL)}
    for variant in variants:
        cfg = config_for(variant, **sizes)
        arms[variant] = Arm(cfg, train_cfg)
        if cfg.stream.kind in PLAIN:
            with plain_streams():
                arms[plain_name(variant)] = Arm(cfg, train_cfg)
    return arms


def step_times(arms: dict[str, Arm], rounds: int) -> dict[str, np.ndarray]:
    """Processor seconds of a training step by arm: one a round."""
    for arm in arms.values():
        for _ in range(WARM_UP):
            arm.step()
    times: dict[str, list[float]] = {row: [] for row in arms}
    generator = np.random.default_rng(0)
    gc.disable()
    for _ in range(rounds):
        for row in generator.permutation(list(arms)):
            start = time.process_time()
            arms[row].step()
            times[row].append(time.process_time() - start)
        gc.collect()
    gc.enable()
    return {row: np.array(taken) for row, taken in times.items()}


def ratio(slow: np.ndarray, fast: np.ndarray) -> str:
    low, middle, high = np.quantile(slow / fast, (0.25, 0.5, 0.75))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def table(arms: dict[str, Arm], times: dict[str, np.ndarray]) -> pd.DataFrame:
    """A row a variant: paired speed ratios, and saved bytes as ratios."""
    saved = {row: saved_bytes(arm.model, arm.loss) for row, arm in arms.items()}
    rows = []
    for row in arms:
        plain = plain_name(row)
        if row == BASELINE or row.endswith("(plain)"):
            continue
        rows.append(
            {
                "variant": row,
                "speed / transformer": ratio(times[BASELINE], times[row]),
                "speed / plain": ratio(times[plain], times[row]) if plain in arms else "",
                "saved MB": f"{saved[row] / 1e6:.1f}",
                "saved / transformer": f"{saved[row] / saved[BASELINE]:.3f}",
                "saved / plain": f"{saved[row] / saved[plain]:.3f}" if plain in arms else "",
            }
        )
    return pd.DataFrame(rows).set_index("variant")


def main(
    variants: Annotated[list[str] | None, typer.Argument(help="Names of variants.")] = None,
    d_model: int = 256,
    n_layers: int = 8,
    n_ctx: int = 256,
    batch_size: int = 4,
    rounds: int = 15,
) -> None:
    """Print a table of speed and memory."""
    torch.set_num_threads(1)
    keep_freed_memory()
    sizes = {"d_model": d_model, "n_layers": n_layers, "n_ctx": n_ctx}
    if d_model % 64 == 0:
        sizes["n_heads"] = d_model // 64
    arms = make_arms(variants or list(VARIANTS), batch_size, **sizes)
    times = step_times(arms, rounds)
    print(table(arms, times).to_string())


if __name__ == "__main__":
    typer.run(main)
