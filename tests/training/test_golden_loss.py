"""Twenty steps of training give every architecture the losses that its equations give.

The golden losses are those of the straight-line evaluation of ``tests/models``, which shares
nothing with the implementation, trained in float64 by a loop of a few lines with torch's AdamW.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from small_runs import lines, model_config, train_config
from straight_line import evaluate_weights
from torch.nn.functional import cross_entropy

from satlens.config import ModelConfig, TrainConfig
from satlens.data.batches import TrainBatches
from satlens.data.dataset import PreparedDataset
from satlens.models.decoder import Decoder
from satlens.models.presets import VARIANTS
from satlens.training import train

STEPS = 20
SHOWN = (1, 5, 10, 20)

# Training loss at steps 1, 5, 10 and 20.
GOLDEN = {
    "transformer": [5.76309, 3.83435, 3.5231, 3.16996],
    "resformer": [5.76536, 3.83811, 3.44957, 3.06946],
    "resformer-identity": [5.76395, 3.883, 3.35432, 2.92034],
    "resformer-learnable": [5.76395, 3.88324, 3.35883, 2.91655],
    "satformer": [5.76366, 3.82409, 3.56142, 3.20391],
    "attnres": [5.76309, 3.82734, 3.45782, 2.99145],
    "attnres-full": [5.76309, 3.83497, 3.4736, 3.01196],
    "rd-attnres": [5.76309, 3.82796, 3.46018, 2.99216],
    "rd-attnres-tied": [5.76309, 3.82734, 3.45782, 2.99145],
    "rd-attnres-average": [5.76309, 3.82733, 3.45787, 2.99151],
    "rd-attnres-frozen-v": [5.76309, 3.82672, 3.45788, 2.98835],
    "hyperconnections": [5.76309, 3.8303, 3.46119, 3.03099],
    "hyperconnections-static": [5.76309, 3.83102, 3.49065, 3.0644],
    "denseformer": [5.76309, 3.83238, 3.5042, 3.12074],
    "muddformer": [5.76309, 3.82941, 3.4487, 3.04333],
    "muddformer-prepost": [5.76309, 4.92562, 4.26786, 3.92541],
    "delta-attnres": [5.76309, 3.83097, 3.50554, 3.1057],
    "delta-attnres-full": [5.76309, 3.83182, 3.51202, 3.10745],
}
# PrePostDANorm divides by the size of mixtures that start at zero. At the others' rate, noise of
# 1e-7 in the initial weights moves its losses by 1e-2, in float64 too.
LEARNING_RATE = {"muddformer-prepost": 3e-3}
DECAYING = (".qkv.weight", ".o.weight", ".gate_up.weight", ".down.weight", "embed.weight")


def configs(name: str) -> tuple[ModelConfig, TrainConfig]:
    recipe = {"lr": LEARNING_RATE.get(name, 1e-2), "log_every": 1, "eval_every": STEPS}
    return model_config(name, d_model=64), train_config(STEPS, checkpoint_every=STEPS, **recipe)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_losses_of_twenty_steps(name: str, dataset: PreparedDataset, tmp_path: Path) -> None:
    train(*configs(name), dataset, tmp_path, progress="none", device="cpu")
    losses = {line["step"]: line["loss"] for line in lines(tmp_path, "train")}
    assert [losses[step] for step in SHOWN] == pytest.approx(GOLDEN[name], abs=1e-4)


def straight_line_losses(name: str, dataset: PreparedDataset) -> list[float]:
    """Losses of the same recipe, from the equations."""
    model_cfg, cfg = configs(name)
    start = Decoder(model_cfg, cfg.seed).state_dict()
    weights = {key: value.double().requires_grad_() for key, value in start.items()}
    decaying = [w for key, w in weights.items() if key.endswith(DECAYING)]
    others = [w for key, w in weights.items() if not key.endswith(DECAYING)]
    groups = [
        {"params": decaying, "weight_decay": cfg.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas)
    batches = TrainBatches(dataset.split("train"), model_cfg.n_ctx, cfg.batch_size, cfg.seed)
    losses = []
    for step in range(STEPS):
        for group in optimiser.param_groups:  # one step of warm-up, then a cosine to a tenth
            fall = 0.5 + 0.5 * math.cos(math.pi * step / (STEPS - 1))
            group["lr"] = cfg.lr * (0.1 + 0.9 * fall)
        rows = [batches.batch(2 * step + k) for k in range(2)]
        inputs, targets, documents = (torch.cat(parts) for parts in zip(*rows, strict=True))
        logits = evaluate_weights(model_cfg, weights, inputs, documents).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VARIANTS))
def test_the_equations_give_them(name: str, dataset: PreparedDataset) -> None:
    losses = straight_line_losses(name, dataset)
    assert [losses[step - 1] for step in SHOWN] == pytest.approx(GOLDEN[name], abs=1e-5)
