from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_runs import model_config, train_config

import satlens
from satlens.data.batches import TrainBatches
from satlens.data.dataset import PreparedDataset
from satlens.models.decoder import Decoder
from satlens.training import NonFiniteError, loop, train
from satlens.training.loader import Loader, RowsByNumber
from satlens.training.step import MicroBatch, forward_backward


def micro_batches(
    batches: TrainBatches, step: int, grad_accum: int, mask: bool = True
) -> list[MicroBatch]:
    cfg = train_config(batch_size=batches.batch_size, grad_accum=grad_accum)
    steps = range(step, step + 1)
    return Loader(RowsByNumber(batches, mask), cfg, steps, torch.device("cpu")).step(step)


def gradients(
    dataset: PreparedDataset, batch_size: int, grad_accum: int, step: int, mask: bool = True
) -> tuple[float, dict[str, torch.Tensor]]:
    model = Decoder(model_config("satformer", document_mask=mask), seed=3)
    batches = TrainBatches(dataset.split("train"), 32, batch_size, seed=5)
    loss = forward_backward(model, micro_batches(batches, step, grad_accum, mask), "fp32")
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("cut", [(8, 1), (1, 8), (2, 4)])
def test_accumulation_gives_the_loss_and_gradients_of_the_whole_batch(
    dataset: PreparedDataset, cut: tuple[int, int], mask: bool
) -> None:
    loss, whole = gradients(dataset, 8, 1, 2, mask)
    cut_loss, accumulated = gradients(dataset, *cut, 2, mask)
    assert cut_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(accumulated[name], gradient, rtol=1e-4, atol=1e-7)


def test_accumulation_weights_a_padded_row_by_its_tokens(dataset: PreparedDataset) -> None:
    """The last row of an epoch is short: a mean of means would be another number."""
    batches = TrainBatches(dataset.split("train"), 32, 1, seed=5)
    scored = [int((batches.batch(k).targets >= 0).sum()) for k in range(batches.chunks_per_epoch)]
    short = min(range(len(scored)), key=scored.__getitem__)
    assert scored[short] < 32
    step = short // 8
    loss, whole = gradients(dataset, 8, 1, step)
    cut_loss, accumulated = gradients(dataset, 1, 8, step)
    assert cut_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(
        accumulated["embed.weight"], whole["embed.weight"], rtol=1e-4, atol=1e-7
    )
    model = Decoder(model_config("satformer"), seed=3)
    parts = micro_batches(batches, step, 8)
    means = [
        model(b.inputs, return_type="loss", targets=b.targets, documents=b.documents).item()
        for b in parts
    ]
    assert sum(means) / 8 != pytest.approx(loss, rel=1e-4)


def test_leaving_out_a_mask_that_masks_nothing_changes_nothing(dataset: PreparedDataset) -> None:
    batches = TrainBatches(dataset.split("train"), 32, 2, seed=5)
    model = Decoder(model_config("satformer"), seed=3)
    seen = set()
    for step in range(batches.chunks_per_epoch // 2):
        (part,) = micro_batches(batches, step, 1)
        seen.add(part.documents is None)
        documents = batches.batch(step).documents
        full = model(part.inputs, return_type="loss", targets=part.targets, documents=documents)
        short = model(
            part.inputs, return_type="loss", targets=part.targets, documents=part.documents
        )
        torch.testing.assert_close(short, full, rtol=1e-6, atol=0)
    assert seen == {True, False}


def test_logged_losses_of_8x1_and_1x8_agree(dataset: PreparedDataset, tmp_path: Path) -> None:
    losses = {}
    for batch_size, grad_accum in ((8, 1), (1, 8)):
        sizes = {"batch_size": batch_size, "grad_accum": grad_accum}
        cfg = train_config(6, **sizes, log_every=1, milestones=(0, 4 * 256))
        out = tmp_path / f"{batch_size}x{grad_accum}"
        train(model_config(), cfg, dataset, out, progress="none", device="cpu")
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[batch_size] = [m["loss"] for m in metrics if m["kind"] == "train"]
    assert losses[1][0] == pytest.approx(losses[8][0], rel=1e-6)
    assert losses[1] == pytest.approx(losses[8], rel=1e-5)
    for done in (0, 4):
        model = satlens.load(out / "milestones" / str(done * 256))
        assert losses[1][done] == pytest.approx(recomputed(model, dataset, done), rel=1e-6)


def recomputed(model: Decoder, dataset: PreparedDataset, step: int) -> float:
    """The mean over a step's scored tokens, in fp64 from the logits of one document at a time."""
    batch = TrainBatches(dataset.split("train"), 32, 8, seed=0).batch(step)
    total, count = 0.0, 0
    model = model.double()
    with torch.no_grad():
        for inputs, targets, documents in zip(*batch, strict=True):
            for document in documents[documents >= 0].unique():
                inside = documents == document
                # Positions count from the row's start, which rotary embeddings do not see.
                log = model(inputs[inside][None])[0].log_softmax(-1)
                total -= log.gather(1, targets[inside][:, None]).sum().item()
                count += int(inside.sum())
    return total / count


def poison(monkeypatch: pytest.MonkeyPatch, at: int, where: str) -> list[dict[str, torch.Tensor]]:
    """Make the loss or one gradient of a step NaN; keeps the weights before each step."""
    before: list[dict[str, torch.Tensor]] = []

    def poisoned(model: Decoder, micro_batches: list[MicroBatch], precision: str) -> torch.Tensor:
        before.append({n: p.detach().clone() for n, p in model.named_parameters()})
        loss = forward_backward(model, micro_batches, precision)
        if len(before) - 1 == at and where == "gradient":
            model.embed.weight.grad[5, 3] = float("inf")
        return loss * float("nan") if len(before) - 1 == at and where == "loss" else loss

    monkeypatch.setattr(loop, "forward_backward", poisoned)
    return before


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_step_stops_before_its_update(
    dataset: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = poison(monkeypatch, at=4, where=where)
    models: list[Decoder] = []
    check = loop.Counters.check
    monkeypatch.setattr(
        loop,
        "Decoder",
        lambda *args: models.append(Decoder(*args)) or models[-1],
    )
    # Look as late as a GPU would: steps after the bad one must be blocked as well.
    monkeypatch.setattr(
        loop.Counters, "check", lambda self, n: check(self, n) if len(before) == 6 else None
    )
    with pytest.raises(NonFiniteError, match=r"^step 4 \(batches 8\.\.9\): .* not finite"):
        train(model_config(), train_config(), dataset, tmp_path / "run", progress="none")
    assert len(before) == 6
    for name, parameter in models[0].named_parameters():
        assert torch.equal(parameter, before[4][name]), name


def test_skipping_counts_and_goes_on(
    dataset: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = poison(monkeypatch, at=4, where="gradient")
    cfg = train_config(9, on_nonfinite="skip")
    train(model_config(), cfg, dataset, tmp_path / "run", progress="none")
    for name in before[0]:
        assert torch.equal(before[4][name], before[5][name]), name
    assert not torch.equal(before[5]["embed.weight"], before[6]["embed.weight"])
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    counts = [m["skipped_steps"] for m in map(json.loads, metrics) if m["kind"] == "train"]
    assert counts == [0, 1, 1]
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["skipped_steps"] == 1
