"""A run's lines shown elsewhere: TensorBoard and Weights & Biases.

metrics.jsonl and timing.jsonl stay the record of a run. Trackers receive the same lines and never
end it: one that fails is left out from then on, with a note.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from satlens.checkpoints.files import read_json
from satlens.errors import ConfigError
from satlens.training.run_folder import write_json


class Tracker(Protocol):
    """Whatever shows a run's figures; only the first process of a run calls it."""

    def begin(self, folder: Path, record: dict[str, Any], done: int) -> None:
        """The run of ``folder`` starts, or goes on after ``done`` steps; later lines come again.

        Args:
            record: content of run.json.
        """

    def log(self, line: dict[str, Any]) -> None:
        """A line: ``kind`` (train, eval, spike or timing), ``step`` and figures by name."""

    def close(self) -> None:
        """Nothing more will come."""


class Trackers:
    """Several trackers as one that does not fail.

    Args:
        note: told once about each tracker that fails.
    """

    def __init__(self, trackers: Iterable[Tracker], note: Callable[[str], None]) -> None:
        self._left, self._note = list(trackers), note

    def begin(self, folder: Path, record: dict[str, Any], done: int) -> None:
        self._each(lambda tracker: tracker.begin(folder, record, done))

    def log(self, line: dict[str, Any]) -> None:
        self._each(lambda tracker: tracker.log(line))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._left = []

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._left):
            try:
                call(tracker)
            except Exception as error:  # of a service that a run must outlive, whatever it is
                self._left.remove(tracker)
                reason = " ".join(str(error).split()) or "no reason given"
                name = type(tracker).__name__
                self._note(f"{name}: {type(error).__name__}: {reason}; the run goes on without it")


class TensorBoardTracker:
    """Event files in ``<run>/tensorboard``; a run that goes on continues them at its step.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self) -> None:
        _require("tensorboard", "tensorboard")
        self._writer: Any = None

    def begin(self, folder: Path, record: dict[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what an earlier process wrote from this step on: it comes again.
        again = done + 1 if done else 0
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=again)

    def log(self, line: dict[str, Any]) -> None:
        for tag, value in figures(line).items():
            self._writer.add_scalar(tag, value, line["step"])
        # A killed process loses nothing that a saved state has behind it.
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """A run of Weights & Biases, found again by the id in ``<run>/wandb/run-id.json``.

    W&B refuses steps before the last one that it has, so the lines that come again after an
    interruption appear once.

    Args:
        project: the W&B project.
        mode: ``online``, ``offline`` (files in ``<run>/wandb`` for ``wandb sync``), or None for
            what the environment (``WANDB_MODE``) says.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, project: str, mode: str | None = None) -> None:
        _require("wandb", "wandb")
        self._project, self._mode = project, mode
        self._run: Any = None

    def begin(self, folder: Path, record: dict[str, Any], done: int) -> None:
        import wandb

        self._run = wandb.init(
            project=self._project,
            id=_run_id(folder / "wandb" / "run-id.json"),
            resume="allow",
            name=folder.resolve().name,
            dir=str(folder),
            config={key: record[key] for key in ("model", "train", "data") if key in record},
            mode=self._mode,  # type: ignore[arg-type]
            settings=wandb.Settings(console="off"),
        )

    def log(self, line: dict[str, Any]) -> None:
        self._run.log(figures(line), step=line["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def open_trackers(*, tensorboard: bool = False, wandb: str | None = None) -> list[Tracker]:
    """The trackers that options ask for.

    Args:
        wandb: the W&B project.

    Raises:
        ConfigError: a package is not installed.
    """
    trackers: list[Tracker] = [TensorBoardTracker()] if tensorboard else []
    return [*trackers, WandbTracker(wandb)] if wandb is not None else trackers


def figures(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by the name they are drawn under.

    ``train/loss``, ``eval/val_loss``; signals of the architecture, which have a site in their name
    (``open_fraction/L3``), keep it, so that one signal's sites stand together.
    """
    return {
        key if "/" in key else f"{line['kind']}/{key}": value
        for key, value in line.items()
        if key != "step" and isinstance(value, int | float)
    }


def _run_id(file: Path) -> str:
    """The id in a file, which is made where it does not exist."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"id": uuid4().hex[:12]})
    return read_json(file)["id"]


def _require(package: str, option: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{option}: not installed; pip install 'satlens[trackers]'")
