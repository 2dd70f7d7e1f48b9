"""What compiled models do in processes without run-time shape checks, which are traced as well.

    python compile_worker.py runs DATA FOLDER JOBS    one of several processes that train together
    python compile_worker.py passes CASES             single passes

JOBS is JSON: a list of [name, model config, recipe]; every process writes how many graphs each run
compiled and what broke one. CASES is JSON: a list of [model config, strategy]; each gets a line of
JSON with the same and the largest difference of a loss or gradient from the uncompiled model's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from satlens.config import ModelConfig, TrainConfig, make
from satlens.data.dataset import PreparedDataset
from satlens.models.decoder import Decoder
from satlens.processes import finish, joined
from satlens.training import train
from satlens.training.compilation import compile_model


def runs(data: str, folder: Path, jobs: list[list[Any]]) -> None:
    graphs = {}
    with joined() as (rank, _):
        dataset = PreparedDataset.open(data)
        for name, model, recipe in jobs:
            torch._dynamo.reset()
            counters.clear()
            configs = make(ModelConfig, model, "m"), make(TrainConfig, recipe, "t")
            train(*configs, dataset, folder / name, progress="none", device="cpu")
            graphs[name] = [counters["stats"]["unique_graphs"], dict(counters["graph_break"])]
        (folder / f"{rank}.json").write_text(json.dumps(graphs))
    finish()


def passes(cases: list[list[Any]]) -> None:
    for config, strategy in cases:
        torch._dynamo.reset()
        counters.clear()
        model, plain = (Decoder(make(ModelConfig, config, "m"), seed=3) for _ in range(2))
        compile_model(model, strategy)
        worst = max(difference(model, plain, seed) for seed in range(2))
        graphs = counters["stats"]["unique_graphs"]
        print(json.dumps([worst, graphs, dict(counters["graph_break"])]), flush=True)


def difference(model: Decoder, plain: Decoder, seed: int) -> float:
    """Largest difference of the loss or a gradient, for the tokens and documents of ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, plain.cfg.d_vocab, (3, plain.cfg.n_ctx), generator=generator)
    documents = torch.randint(0, 3, tokens.shape, generator=generator).sort(-1).values
    losses = []
    for one in (model, plain):
        one.zero_grad()
        losses.append(one(tokens, "loss", documents=documents))
        losses[-1].backward()
    found = [losses[0] - losses[1]]
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name  # zeros would let it decay
        if mine.grad is not None and other.grad is not None and other.numel():
            found.append(mine.grad - other.grad)
    return max(float(gap.abs().max()) for gap in found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.compiler.set_default_backend("aot_eager")
    if sys.argv[1] == "runs":
        runs(sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        passes(json.loads(sys.argv[2]))
