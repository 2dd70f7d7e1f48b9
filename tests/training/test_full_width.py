"""The papers' models at full width and depth, on a CPU: two steps of one short row each."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import lines

from satlens.data.dataset import PreparedDataset
from satlens.models.decoder import Decoder
from satlens.study.addresses import configured
from satlens.training import train

LENGTH = 128
# The first read of a depth stream has one source, which no query or norm can weigh.
DEAD = {
    "satformer-small/satformer": set(),
    "rd-attnres-s/rd-attnres": {
        f"blocks.0.attn_read.{part}" for part in ("query", "query_v", "gamma")
    },
}
PARAMETERS = {"satformer-small/satformer": 128_496_256, "rd-attnres-s/rd-attnres": 119_800_512}


@pytest.mark.slow
@pytest.mark.parametrize("address", list(DEAD))
def test_two_steps(address: str, dataset: PreparedDataset, tmp_path: Path) -> None:
    """The published recipe but for rows and context; most of the vocabulary is padding."""
    recipe = {
        "tokens": 2 * LENGTH,
        "batch_size": 1,
        "grad_accum": 1,
        "eval_tokens": LENGTH,
        "eval_every": 2,
        "log_every": 1,
        "milestones": (),
        "data_workers": 0,
    }
    found = configured(address, model={"n_ctx": LENGTH}, train=recipe)
    assert dataset.vocab_size < found.model.d_vocab
    final = train(found.model, found.train, dataset, tmp_path, progress="none", device="cpu")
    losses = [line["loss"] for line in lines(tmp_path, "train")]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(math.log(found.model.d_vocab), abs=0.5)
    start = dict(Decoder(found.model, found.train.seed).named_parameters())
    assert sum(p.numel() for p in start.values()) == PARAMETERS[address]
    after = load_file(final / "model.safetensors")
    assert {name for name, p in start.items() if torch.equal(p, after[name])} == DEAD[address]
    assert json.loads((tmp_path / "finished.json").read_text())["steps"] == 2
