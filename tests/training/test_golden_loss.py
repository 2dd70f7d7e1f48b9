"""Twenty steps of training give the losses they gave when this was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import lines, model_config, train_config

from satlens.data.dataset import PreparedDataset
from satlens.training import train

# Training loss at steps 1, 5, 10, 20 and the validation loss at the end, fp32, one thread.
# Noise of one part in a million in the initial weights moves them by less than 1e-5; the
# variants are further apart than the tolerance.
GOLDEN = {
    "transformer": [5.76309, 3.83435, 3.52310, 3.16996, 3.16529],
    "satformer": [5.76366, 3.82409, 3.56142, 3.20391, 3.18706],
    "rd-attnres": [5.76309, 3.82796, 3.46018, 2.99216, 3.00214],
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_losses_of_twenty_steps(name: str, dataset: PreparedDataset, tmp_path: Path) -> None:
    found = []
    for run in ("first", "second"):
        cfg = train_config(20, lr=1e-2, log_every=1, eval_every=20)
        out, model_cfg = tmp_path / run, model_config(name, d_model=64)
        train(model_cfg, cfg, dataset, out, progress="none", device="cpu")
        found.append((out / "metrics.jsonl").read_bytes())
    assert found[0] == found[1]
    losses = {m["step"]: m["loss"] for m in lines(tmp_path / "first", "train")}
    final = lines(tmp_path / "first", "eval")[-1]["val_loss"]
    values = [*(losses[step] for step in (1, 5, 10, 20)), final]
    assert values == pytest.approx(GOLDEN[name], abs=1e-3)
