"""TensorBoard and Weights & Biases see a run's lines, and cannot end it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from satlens.errors import ConfigError
from satlens.training.trackers import (
    TensorBoardTracker,
    Trackers,
    WandbTracker,
    figures,
    open_trackers,
)

LINES = [
    {"kind": "eval", "step": 0, "tokens": 0, "val_loss": 5.5, "open_fraction/L1": 0.5},
    {"kind": "spike", "step": 2, "micro_batches": [4, 5], "loss": 9.0, "grad_norm": None},
    {"kind": "train", "step": 3, "tokens": 600, "loss": 5.0, "grad_norm": 1.5},
    {"kind": "timing", "step": 3, "seconds": 1.0, "mfu": None},
    {"kind": "train", "step": 6, "tokens": 1200, "loss": 4.0, "grad_norm": 1.25},
]
RECORD = {"model": {"d_model": 32}, "train": {"lr": 0.1}, "data": {"sha256": "ab"}, "plan": {}}


def test_names_of_figures() -> None:
    assert figures(LINES[0]) == {"eval/tokens": 0, "eval/val_loss": 5.5, "open_fraction/L1": 0.5}
    assert figures(LINES[1]) == {"spike/loss": 9.0}
    assert figures(LINES[3]) == {"timing/seconds": 1.0}


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


@needs_tensorboard
def test_tensorboard_shows_the_lines_once_after_a_kill(tmp_path: Path) -> None:
    first = TensorBoardTracker()
    first.begin(tmp_path, RECORD, 0)
    for line in LINES:
        first.log(line)
    # Killed here, with nothing closed: what was logged is on the disk. The state was of step 3.
    second = TensorBoardTracker()
    second.begin(tmp_path, RECORD, 3)
    second.log(LINES[4])
    second.log({"kind": "train", "step": 9, "loss": 3.0})
    second.close()
    shown = curves(tmp_path / "tensorboard")
    assert shown["train/loss"] == [(3, 5.0), (6, 4.0), (9, 3.0)]
    assert shown["eval/val_loss"] == [(0, 5.5)]
    assert shown["open_fraction/L1"] == [(0, 0.5)]
    assert shown["spike/loss"] == [(2, 9.0)]
    assert "timing/mfu" not in shown
    first.close()


@needs_tensorboard
def test_a_run_that_starts_anew_hides_all_of_the_old_one(tmp_path: Path) -> None:
    for loss in (5.0, 4.0):
        tracker = TensorBoardTracker()
        tracker.begin(tmp_path, RECORD, 0)
        tracker.log({"kind": "eval", "step": 0, "val_loss": loss})
        tracker.close()
    assert curves(tmp_path / "tensorboard")["eval/val_loss"] == [(0, 4.0)]


def mocked_wandb(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Calls that a stand-in for the package receives."""
    calls: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append(("log", (step, values))),
        finish=lambda: calls.append(("finish", None)),
    )

    def init(**options: Any) -> Any:
        calls.append(("init", options))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return calls


def test_wandb_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = mocked_wandb(monkeypatch)
    for done in (0, 3):
        tracker = WandbTracker("paper", mode="offline")
        tracker.begin(tmp_path / "arm", RECORD, done)
        tracker.log(LINES[4])
        tracker.close()
    (_, first), (_, logged), (_, _), (_, second) = calls[:4]
    assert first == second
    assert first["project"] == "paper" and first["resume"] == "allow" and first["name"] == "arm"
    assert first["config"] == {key: RECORD[key] for key in ("model", "train", "data")}
    assert first["id"] == json.loads((tmp_path / "arm/wandb/run-id.json").read_text())["id"]
    assert logged == (6, {"train/tokens": 1200, "train/loss": 4.0, "train/grad_norm": 1.25})
    other = WandbTracker("paper", mode="offline")
    other.begin(tmp_path / "other", RECORD, 0)
    assert calls[-1][1]["id"] != first["id"]


@pytest.mark.slow
def test_wandb_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for done, lines in ((0, LINES), (3, LINES[4:])):
        tracker = WandbTracker("paper", mode="offline")
        tracker.begin(tmp_path, RECORD, done)
        for line in lines:
            tracker.log(line)
        ids.append(tracker._run.id)
        tracker.close()
    assert ids[0] == ids[1] == json.loads((tmp_path / "wandb/run-id.json").read_text())["id"]
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))
    assert len(files) == 2 and all(file.stat().st_size > 0 for file in files)


# -- failures --------------------------------------------------------------------------------------


class Recorder:
    """A tracker that remembers, and fails at one kind of call if asked to."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at, self.calls = fails_at, []

    def _called(self, name: str, value: Any = None) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise ConnectionError("no route\nto host")

    def begin(self, folder: Path, record: dict[str, Any], done: int) -> None:
        self._called("begin")

    def log(self, line: dict[str, Any]) -> None:
        self._called("log")

    def close(self) -> None:
        self._called("close")


@pytest.mark.parametrize("fails_at", ["begin", "log", "close"])
def test_a_tracker_that_fails_is_left_out_with_one_note(tmp_path: Path, fails_at: str) -> None:
    notes: list[str] = []
    bad, good = Recorder(fails_at), Recorder()
    trackers = Trackers([bad, good], notes.append)
    trackers.begin(tmp_path, RECORD, 0)
    for line in LINES:
        trackers.log(line)
    trackers.close()
    trackers.close()
    assert good.calls == ["begin", *["log"] * len(LINES), "close"]
    assert bad.calls.count(fails_at) == 1 and bad.calls[-1] == fails_at
    assert notes == ["Recorder: ConnectionError: no route to host; the run goes on without it"]


def test_a_missing_package_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for options in ({"tensorboard": True}, {"wandb": "paper"}):
        with pytest.raises(ConfigError, match=r"not installed; pip install 'satlens\[trackers\]'"):
            open_trackers(**options)  # type: ignore[arg-type]
    assert open_trackers() == []
