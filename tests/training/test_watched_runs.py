"""Monitors and trackers of whole runs, interrupted ones among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import BreakAt, BrokenOffError, lines, model_config, train_config

from satlens.config import to_dict
from satlens.data.dataset import PreparedDataset
from satlens.training import loop, train
from satlens.training.optimiser import clip_gradients

SPIKE_AT = 36
"""Step (from 0) whose loss a fixture raises."""
CFG = train_config(40, eval_every=20, checkpoint_every=19, log_every=4)
MODEL = model_config("attnres", n_layers=2)


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.begun: list[tuple[Path, dict[str, Any], int]] = []
        self.lines: list[dict[str, Any]] = []
        self.closed = 0

    def begin(self, folder: Path, record: dict[str, Any], done: int) -> None:
        self.begun.append((folder, record, done))

    def log(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Gradient norms of the steps that ran; the loss reported for one step is 20 higher."""
    seen: list[float] = []
    forward_backward = loop.forward_backward

    def clip(*arguments: Any) -> torch.Tensor:
        seen.append(clip_gradients(*arguments).item())
        return torch.tensor(seen[-1])

    def raised(*arguments: Any) -> torch.Tensor:
        return forward_backward(*arguments) + (20.0 if len(seen) == SPIKE_AT else 0.0)

    monkeypatch.setattr(loop, "clip_gradients", clip)
    monkeypatch.setattr(loop, "forward_backward", raised)
    return seen


def test_an_interrupted_run_reports_the_same(
    dataset: PreparedDataset, tmp_path: Path, norms: list[float]
) -> None:
    whole, tracker, follower = tmp_path / "whole", Recorder(), BreakAt()
    train(MODEL, CFG, dataset, whole, progress=follower, trackers=[tracker], device="cpu")

    (spike,) = lines(whole, "spike")
    assert spike["step"] == SPIKE_AT + 1
    assert spike["micro_batches"] == [2 * SPIKE_AT, 2 * SPIKE_AT + 1]
    assert spike["grad_norm"] == pytest.approx(norms[SPIKE_AT])
    assert spike["loss"] - 20 == pytest.approx(spike["median"], abs=1.0)

    dead = ["blocks.0.attn_read.query", "blocks.0.attn_read.gamma"]
    counts = [line.get("frozen_parameters") for line in lines(whole, "eval")]
    assert counts == [None, 2, 2]
    assert json.loads((whole / "finished.json").read_text())["unchanged_parameters"] == dead
    (note,) = follower.notes
    assert all(name in note for name in dead)

    # The tracker saw every line of both files, in their order.
    written = {}
    for name in ("metrics", "timing"):
        text = (whole / f"{name}.jsonl").read_text()
        written[name] = [json.loads(line) for line in text.splitlines()]
    assert [line for line in tracker.lines if line["kind"] != "timing"] == written["metrics"]
    timing = [line for line in tracker.lines if line["kind"] == "timing"]
    assert timing == [{"kind": "timing", **line} for line in written["timing"]]
    ((folder, record, done),) = tracker.begun
    assert (folder, done, tracker.closed) == (whole, 0, 1)
    assert record["model"] == json.loads(json.dumps(to_dict(MODEL)))
    for line in written["timing"]:
        assert line["mfu"] is None  # a CPU's peak is not known
        assert 0 <= line["data_wait"] < 1

    # Broken off before the spike, and between it and the line of the log that is due after it.
    parts, again = tmp_path / "parts", Recorder()
    for state, stop in ((0, 22), (19, 39)):
        norms[:] = [0.0] * state
        with pytest.raises(BrokenOffError):
            train(MODEL, CFG, dataset, parts, progress=BreakAt(stop), device="cpu")
    norms[:] = [0.0] * 38
    train(MODEL, CFG, dataset, parts, progress="none", trackers=[again], device="cpu")
    assert again.begun[0][2] == 38
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert json.loads((parts / "finished.json").read_text())["unchanged_parameters"] == dead


def test_a_failing_tracker_does_not_end_a_run(dataset: PreparedDataset, tmp_path: Path) -> None:
    class Failing(Recorder):
        def log(self, line: dict[str, Any]) -> None:
            raise TimeoutError("the service is away")

    follower, good = BreakAt(), Recorder()
    cfg = train_config(3)
    train(MODEL, cfg, dataset, tmp_path / "run", progress=follower, trackers=[Failing(), good])
    assert (tmp_path / "run" / "finished.json").exists()
    assert sum("the service is away" in note for note in follower.notes) == 1
    assert good.closed == 1 and {line["kind"] for line in good.lines} == {"eval", "train", "timing"}
