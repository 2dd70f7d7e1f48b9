"""The plain loop that the trainer is timed against does the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import training as benchmark
from plain.decoder import PlainDecoder
from plain.loop import PlainLoop
from small_runs import lines, model_config, train_config

from satlens.data.batches import TrainBatches
from satlens.data.dataset import PreparedDataset
from satlens.models.decoder import Decoder
from satlens.training import train

STEPS = 12
PLAIN = {"n_key_value_heads": 4, "document_mask": False}


@pytest.mark.parametrize(("name", "grad_accum"), [("transformer", 2), ("satformer", 1)])
def test_losses_are_ours(
    name: str, grad_accum: int, dataset: PreparedDataset, tmp_path: Path
) -> None:
    cfg = train_config(STEPS, grad_accum=grad_accum, lr=1e-2, log_every=1, warmup=0.25)
    model_cfg = model_config(name, **PLAIN)
    batches = TrainBatches(dataset.split("train"), model_cfg.n_ctx, cfg.batch_size, cfg.seed)
    full = model_cfg.n_ctx * cfg.batch_size
    assert all(batches.scored(k) == full for k in range(STEPS * grad_accum)), "no padded row"
    plain = PlainLoop(Decoder(model_cfg, cfg.seed), cfg, batches, STEPS)
    train(model_cfg, cfg, dataset, tmp_path, progress="none", device="cpu")
    ours = [line["loss"] for line in lines(tmp_path, "train")]
    assert ours == pytest.approx([plain.step().item() for _ in range(STEPS)], abs=2e-5)


@pytest.mark.parametrize(
    "changes", [{"n_key_value_heads": 2}, {"gate": "tanh"}, {"document_mask": True}], ids=str
)
def test_other_models_are_refused(changes: dict[str, object]) -> None:
    model = Decoder(model_config("satformer", **{**PLAIN, **changes}), seed=None)
    with pytest.raises(ValueError, match="no plain decoder"):
        PlainDecoder(model)


def test_benchmark(dataset: PreparedDataset, tmp_path: Path) -> None:
    """Both take turns, and the first losses stand side by side."""
    model_cfg = benchmark.model_config("satformer", 32, 2, 32, dataset.vocab_size)
    cfg = train_config(25, log_every=1, precision="bf16", lr=1e-3)
    row, losses = benchmark.compared(model_cfg, cfg, dataset, tmp_path)
    assert losses.shape == (benchmark.COMPARED, 2)
    assert (losses["satlens"] - losses["plain"]).abs().max() < 1e-2
    assert row["parameters"] == Decoder(model_cfg).n_parameters()
