"""Training one model: the loop, and what it does between steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from satlens.checkpoints import save
from satlens.config import ModelConfig, TrainConfig, to_dict
from satlens.data.batches import TrainBatches
from satlens.data.dataset import PreparedDataset
from satlens.data.windows import Windows
from satlens.errors import DataError
from satlens.models.build import checked_device
from satlens.models.decoder import Decoder
from satlens.training.environment import code_identity, run_record, torch_settings
from satlens.training.evaluation import evaluate, evaluation_slice
from satlens.training.interrupts import StopRequest, TrainingStopped, stop_on_signals
from satlens.training.monitors import Counters, JsonLines, NonFiniteError, Stopwatch
from satlens.training.optimiser import (
    clip_gradients,
    learning_rate,
    make_optimiser,
    set_learning_rate,
)
from satlens.training.plan import Plan, plan
from satlens.training.progress import Progress, ProgressKind, open_progress
from satlens.training.resume import ResumePoint, load_state, save_state
from satlens.training.run_folder import RunFolder, remove_tree
from satlens.training.step import forward_backward, load_step, unchanged_parameters


def train(
    model_cfg: ModelConfig,
    train_cfg: TrainConfig,
    dataset: PreparedDataset,
    out: str | Path,
    *,
    progress: ProgressKind | Progress = "auto",
    device: str | torch.device | None = None,
) -> Path:
    """Train a model, or go on with a run that was stopped; a finished run returns at once.

    Called again with the same arguments after any interruption, it ends with the same weights,
    metrics and evaluations to the bit (same machine, torch and number of threads).

    Args:
        model_cfg: the architecture; its ``d_vocab`` may be padded beyond the tokenizer's.
        train_cfg: the recipe.
        dataset: trained on its ``train`` split, evaluated on a fixed slice of ``val``.
        out: folder of the run, see :mod:`satlens.training.run_folder`.
        progress: ``auto`` (a bar on a terminal, else lines), ``bar``, ``lines``, ``none``, or a
            :class:`satlens.training.progress.Progress` of your own.
        device: ``cpu`` or ``cuda``; by default a GPU if there is one.

    Returns:
        The folder of the final checkpoint.

    Raises:
        ConfigError: an impossible budget, a device that is not there, or ``out`` holds a run with
            other arguments.
        DataError: the tokenizer does not fit the model.
        CheckpointError: another process writes this run, the folder cannot be written, or no
            saved state is whole.
        NonFiniteError: a loss or gradient is not finite and ``on_nonfinite`` is ``stop``.
        TrainingStopped: SIGTERM or SIGINT; the state is saved, the exit status 0.
    """
    follower, folder = open_progress(progress), RunFolder(out)
    where = checked_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dataset.vocab_size > model_cfg.d_vocab:
        raise DataError(
            f"{dataset.path}: vocab_size: {dataset.vocab_size} exceeds the model's "
            f"d_vocab={model_cfg.d_vocab}"
        )
    made = plan(model_cfg, train_cfg)
    with folder.locked(), torch_settings(train_cfg, where), stop_on_signals() as stop:
        folder.tidy()
        windows = evaluation_slice(dataset, model_cfg, train_cfg)
        record = run_record(model_cfg, train_cfg, dataset, windows, made, where)
        environment = folder.begin(record)["environment"]
        if folder.outcome(follower.note) is not None:
            return folder.final
        changed = [
            name for name, value in record["environment"].items() if environment.get(name) != value
        ]
        if changed:
            follower.note(
                f"{folder.path}: {', '.join(changed)} changed since this run began: it goes on, "
                "but not to the bit"
            )
        run = Run(model_cfg, train_cfg, dataset, folder, windows, made, where, follower)
        try:
            run.loop(stop)
            run.finish()
        except TrainingStopped as stopped:
            follower.note(stopped.text)
            raise
        finally:
            run.close()
    return folder.final


class Run:
    """A run in progress: restored from its folder, ready for its next step."""

    def __init__(
        self,
        model_cfg: ModelConfig,
        train_cfg: TrainConfig,
        dataset: PreparedDataset,
        folder: RunFolder,
        windows: Windows,
        made: Plan,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.cfg, self.folder, self.plan = train_cfg, folder, made
        self.dataset, self.windows, self.device = dataset, windows, device
        self.model = Decoder(model_cfg, train_cfg.seed, dataset.tokenizer).to(device)
        self.optimiser = make_optimiser(self.model, train_cfg)
        self.batches = TrainBatches(
            dataset.split("train"), model_cfg.n_ctx, train_cfg.batch_size, train_cfg.seed
        )
        self.counters = Counters(device, train_cfg.on_nonfinite)
        point = None
        if folder.finished.exists():  # its outputs were changed: nothing of them is trusted
            folder.clear()
        else:
            state = self.model, self.optimiser, self.counters.tensors
            point = load_state(folder.resume, *state, progress.note)
        if point is None:
            folder.clear()
            point = ResumePoint(0, 0, 0)
        self.done = self.logged = point.step
        self.metrics = JsonLines(folder.metrics, point.metrics_bytes)
        self.timing = JsonLines(folder.timing, point.timing_bytes)
        self.stopwatch, self.progress = Stopwatch(), progress
        if train_cfg.compile:
            self.model.compile()
        progress.begin(folder.path.name, made.n_steps, self.done)

    def loop(self, stop: StopRequest) -> None:
        """Every step that is left.

        Raises:
            NonFiniteError, TrainingStopped: see :func:`train`.
        """
        if self.done == 0:
            self._evaluate()
            self._keep_milestone()
        for step in range(self.done, self.plan.n_steps):
            with self.stopwatch.part("data"):
                micro_batches = load_step(self.batches, step, self.cfg.grad_accum, self.device)
            loss = forward_backward(self.model, micro_batches, self.cfg.precision)
            norm = clip_gradients(self.model, self.cfg.clip)
            self.counters.add(step, loss, norm)
            # Fused AdamW reads this flag on the device and leaves everything as it is where set.
            self.optimiser.found_inf = self.counters.blocked  # type: ignore[attr-defined]
            set_learning_rate(self.optimiser, learning_rate(step, self.plan.n_steps, self.cfg))
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            self.done = step + 1
            self._after_step(stop)

    def _after_step(self, stop: StopRequest) -> None:
        done, made, fields = self.done, self.plan, None
        saves, milestone = made.saves(done) or bool(stop), done in made.milestones
        due = made.logs(done) or made.evaluates(done) or saves or milestone
        if due or self.device.type == "cpu":  # on a GPU, looking means waiting
            self.counters.check(self.cfg.grad_accum)
        if made.logs(done):
            fields = self._log()
        if made.evaluates(done):
            fields = (fields or {}) | self._evaluate()
        if milestone:
            self._keep_milestone()
        if saves:
            with self.stopwatch.part("saving"):
                point = ResumePoint(done, self.metrics.sync(), self.timing.sync())
                state = self.model, self.optimiser, self.counters.tensors
                save_state(self.folder.resume, point, *state)
        self.progress.update(done, fields)
        if stop.signal is not None and done < made.n_steps:
            raise TrainingStopped(
                f"{self.folder.path}: stopped by {stop.signal.name} after step {done} of "
                f"{made.n_steps}, state saved; run the same command again to go on"
            )

    def _log(self) -> dict[str, float]:
        """Write the training line and the timing line of the steps since the last ones."""
        done, per_step = self.done, self.plan.tokens_per_step
        values = self.counters.drain()
        line = {
            "kind": "train",
            "step": done,
            "tokens": done * per_step,
            "lr": learning_rate(done - 1, self.plan.n_steps, self.cfg),
            **values,
        }
        self.metrics.write(line)
        timing = self.stopwatch.drain((done - self.logged) * per_step)
        self.timing.write({"step": done, **timing})
        self.logged = done
        shown = {"tok/s": timing["tokens_per_second"]}
        return shown if values["loss"] is None else {"loss": values["loss"], **shown}

    def _evaluate(self) -> dict[str, float]:
        """Write the evaluation line of the weights as they are."""
        with self.stopwatch.part("evaluation"):
            values = evaluate(self.model, self.windows, self.cfg.precision)
        if not math.isfinite(values["val_loss"]):
            raise NonFiniteError(f"step {self.done}: the validation loss is not finite")
        self.val_loss = values["val_loss"]
        tokens = self.done * self.plan.tokens_per_step
        self.metrics.write({"kind": "eval", "step": self.done, "tokens": tokens, **values})
        return {"val_loss": self.val_loss}

    def _keep_milestone(self) -> None:
        if self.done in self.plan.milestones:
            self._checkpoint(self.folder.milestones / str(self.plan.milestones[self.done]))

    def _checkpoint(self, path: Path) -> None:
        """Write the weights as a checkpoint, in place of what a killed process left there."""
        with self.stopwatch.part("saving"):
            remove_tree(path)
            save(self.model, path, training=self._training_record())

    def _training_record(self) -> dict[str, Any]:
        """training.json of a checkpoint: how far, on what, by which recipe and code."""
        return {
            "steps": self.done,
            "tokens": self.done * self.plan.tokens_per_step,
            "data": {"sha256": self.dataset.sha256, "tokenizer": self.dataset.fingerprint},
            "config": to_dict(self.cfg),
            "code": code_identity(),
        }

    def finish(self) -> None:
        """Write the final checkpoint, then the marker of a finished run."""
        self._checkpoint(self.folder.final)
        self.metrics.sync()
        self.folder.finish(
            {
                "steps": self.done,
                "tokens": self.done * self.plan.tokens_per_step,
                "val_loss": self.val_loss,
                "skipped_steps": int(self.counters.tensors["skipped"].item()),
                "unchanged_parameters": unchanged_parameters(self.model, self.cfg.seed),
            }
        )

    def close(self) -> None:
        self.metrics.close()
        self.timing.close()
        self.progress.end()
