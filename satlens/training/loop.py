"""Training one model: the loop, and what it does between steps.

Under torchrun every process runs this; what is asked of all of them is in
:mod:`satlens.training.distributed`, and the first one alone writes and speaks.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from satlens.checkpoints import save
from satlens.config import ModelConfig, TrainConfig, to_dict
from satlens.data.batches import TrainBatches
from satlens.data.dataset import PreparedDataset
from satlens.data.windows import Windows
from satlens.errors import CheckpointError, ConfigError, DataError
from satlens.models.decoder import Decoder
from satlens.processes import world
from satlens.training.distributed import (
    check_shares,
    check_together,
    largest,
    own_place,
    shared,
    together,
)
from satlens.training.environment import changes, code_identity, run_record, torch_settings
from satlens.training.evaluation import evaluate, evaluation_slice
from satlens.training.flops import flops_per_token, model_flops_utilisation
from satlens.training.frozen import FrozenParameters
from satlens.training.hardware import peak_flops
from satlens.training.interrupts import StopRequest, TrainingStopped, stop_on_signals
from satlens.training.journal import Journal
from satlens.training.loader import Loader, RowsByNumber, readers_watched
from satlens.training.monitors import Counters, NonFiniteError, Stopwatch
from satlens.training.optimiser import (
    clip_gradients,
    learning_rate,
    make_optimiser,
    set_learning_rate,
)
from satlens.training.plan import Plan, plan
from satlens.training.progress import Progress, ProgressKind, open_progress
from satlens.training.resume import START, ResumePoint, consolidated, load_state, save_state
from satlens.training.run_folder import Resume, RunFolder, remove_tree
from satlens.training.spikes import SpikeLog
from satlens.training.step import forward_backward
from satlens.training.trackers import Tracker, Trackers

NAMED = 8
"""Parameters that a note names at most; finished.json has all."""


def train(
    model_cfg: ModelConfig,
    train_cfg: TrainConfig,
    dataset: PreparedDataset,
    out: str | Path,
    *,
    progress: ProgressKind | Progress = "auto",
    device: str | torch.device | None = None,
    resume: Resume = "auto",
    trackers: Iterable[Tracker] = (),
) -> Path:
    """Train a model, or go on with a run that was stopped; a finished run returns at once.

    Called again with the same arguments after any interruption, it ends with the same weights,
    metrics and evaluations to the bit (same machine, torch, number of threads and of processes).
    Under torchrun all processes call it with the same arguments.

    Args:
        model_cfg: the architecture; its ``d_vocab`` may be padded beyond the tokenizer's.
        train_cfg: the recipe.
        dataset: trained on its ``train`` split, evaluated on a fixed slice of ``val``.
        out: folder of the run, see :mod:`satlens.training.run_folder`.
        progress: ``auto`` (a bar on a terminal, else lines), ``bar``, ``lines``, ``none``, or a
            :class:`satlens.training.progress.Progress` of your own.
        device: ``cpu`` or ``cuda``; by default a GPU if there is one. Under torchrun ``cuda`` is a
            GPU of each process's own.
        resume: ``auto`` goes on with what ``out`` holds or begins there, ``never`` refuses a folder
            that holds a run, ``must`` one that holds nothing to go on from.
        trackers: what else is to show the lines of metrics and timing, see
            :mod:`satlens.training.trackers`; one that fails does not end the run.

    Returns:
        The folder of the final checkpoint.

    Raises:
        ConfigError: an impossible budget, a device that is not there, a step that the processes
            cannot share out, or ``out`` holds a run with other arguments.
        DataError: the tokenizer does not fit the model.
        CheckpointError: another process writes this run, the folder cannot be written, no saved
            state is whole, or ``resume`` forbids it.
        SatlensError: the processes were not given the same, or one that reads ahead was killed.
        NonFiniteError: a loss or gradient is not finite and ``on_nonfinite`` is ``stop``.
        TrainingStopped: SIGTERM or SIGINT; the state is saved, the exit status 0.
    """
    follower, folder, where = open_progress(progress), RunFolder(out), own_place(device)
    check_run(model_cfg, train_cfg, dataset, out, resume)
    made = plan(model_cfg, train_cfg)
    with ExitStack() as stack:
        together(lambda: folder.expect(resume))
        stack.enter_context(torch_settings(train_cfg, where))
        windows = evaluation_slice(dataset, model_cfg, train_cfg)
        record = run_record(model_cfg, train_cfg, dataset, windows, made, where)
        check_together({**record, "environment": code_identity()})
        together(lambda: stack.enter_context(folder.locked()))
        stop = stack.enter_context(stop_on_signals())
        if together(lambda: _is_finished(folder, record, follower)):
            return folder.final
        shown = Trackers(trackers, follower.note)
        run = Run(
            model_cfg, train_cfg, dataset, folder, windows, made, where, follower, resume, shown
        )
        try:
            with readers_watched():
                run.loop(stop)
            run.finish()
        except TrainingStopped as stopped:
            follower.note(stopped.text)
            raise
        finally:
            run.close()
    return folder.final


def check_run(
    model_cfg: ModelConfig,
    train_cfg: TrainConfig,
    dataset: PreparedDataset,
    out: str | Path,
    resume: Resume = "auto",
) -> None:
    """Refuse what :func:`train` would refuse at once, and write nothing.

    Raises:
        ConfigError, DataError, CheckpointError: as there.
    """
    folder = RunFolder(out)
    if dataset.vocab_size > model_cfg.d_vocab:
        raise DataError(
            f"{dataset.path}: vocab_size: {dataset.vocab_size} exceeds the model's "
            f"d_vocab={model_cfg.d_vocab}"
        )
    if folder.path.resolve() == Path(dataset.path).resolve():
        raise ConfigError(f"{folder.path}: holds the data; a run needs a folder of its own")
    plan(model_cfg, train_cfg)
    check_shares(train_cfg)
    together(lambda: folder.expect(resume))
    known = {"model": to_dict(model_cfg), "train": to_dict(train_cfg)}
    together(lambda: folder.require_same(known, ("model", "train")))


def _is_finished(folder: RunFolder, record: dict[str, Any], follower: Progress) -> bool:
    """Make the folder this run's, or check that it is; whether the run in it is finished."""
    folder.tidy()
    begun = folder.begin(record)
    if folder.outcome() is not None:
        remove_tree(folder.resume)  # which a process killed at the very end may have left
        return True
    changed = changes(begun, record)
    if changed:
        follower.note(
            f"{folder.path}: {', '.join(changed)} changed since this run began: it goes on, "
            "but not to the bit"
        )
    return False


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
        resume: Resume,
        trackers: Trackers,
    ) -> None:
        self.cfg, self.folder, self.plan = train_cfg, folder, made
        self.dataset, self.windows, self.device = dataset, windows, device
        self.model = Decoder(model_cfg, train_cfg.seed, dataset.tokenizer)
        self.runner = shared(self.model, train_cfg, device)
        """What a training pass calls; ``model`` has the names, weights and hooks."""
        self.parameters = list(self.model.parameters())
        self.optimiser = make_optimiser(self.model, train_cfg)
        self.frozen = FrozenParameters(self.model)
        self.counters = Counters(device, train_cfg.on_nonfinite)
        self.spikes = SpikeLog(device, train_cfg.log_every)
        self.kept = self.model, self.optimiser, {**self.counters.tensors, **self.spikes.tensors}
        """What a saved state holds, under names of their own."""
        point = self._restored(resume, progress)
        self.done = self.logged = point.step
        self.noted = False
        self.journal = Journal(folder, point, trackers)
        self.stopwatch = Stopwatch(_utilisation(model_cfg, train_cfg, device))
        self.progress = progress
        sizes = model_cfg.n_ctx, train_cfg.batch_size, train_cfg.seed
        rows = RowsByNumber(TrainBatches(dataset.split("train"), *sizes), model_cfg.document_mask)
        self.loader = Loader(rows, train_cfg, range(self.done, made.n_steps), device)
        progress.begin(folder.path.name, made.n_steps, self.done)

    def _restored(self, resume: Resume, progress: Progress) -> ResumePoint:
        """Take over the newest saved state, or clear the folder for a run that begins."""
        point = load_state(self.folder.resume, *self.kept, progress.note)
        if point is not None:
            return point
        if resume == "must":
            raise CheckpointError(f"{self.folder.path}: no saved state to go on from (resume must)")
        together(self.folder.clear)
        return START

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
                micro_batches = self.loader.step(step)
            loss = forward_backward(self.runner, micro_batches, self.cfg.precision)
            norm = clip_gradients(self.optimiser, self.parameters, self.cfg.clip)
            self.counters.add(step, loss, norm)
            self.spikes.add(step, loss, norm)
            # Fused AdamW reads this flag on the device and leaves everything as it is where set.
            self.optimiser.found_inf = self.counters.blocked  # type: ignore[attr-defined]
            set_learning_rate(self.optimiser, learning_rate(step, self.plan.n_steps, self.cfg))
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            self.done = step + 1
            self._after_step(stop)

    def _after_step(self, stop: StopRequest) -> None:
        done, made, fields = self.done, self.plan, None
        milestone = done in made.milestones
        if made.logs(done) or made.evaluates(done) or milestone or self.device.type == "cpu":
            self.counters.check(self.cfg.grad_accum)  # on a GPU, looking means waiting
        if made.logs(done):
            fields = self._log()
        if made.evaluates(done):
            fields = (fields or {}) | self._evaluate()
        if milestone:
            self._keep_milestone()
        # One process may have been told to stop before the others: all stop after this step.
        asked = largest(stop.signal or 0) if done < made.n_steps else 0
        if made.saves(done) or asked:
            self._save()
        self.progress.update(done, fields)
        if asked:
            raise TrainingStopped(
                f"{self.folder.path}: stopped by {signal.Signals(asked).name} after step {done} of "
                f"{made.n_steps}, state saved; run the same command again to go on"
            )

    def _log(self) -> dict[str, float]:
        """Write the spikes, the training and the timing line of the steps since the last ones."""
        done, per_step = self.done, self.plan.tokens_per_step
        for spike in self.spikes.drain(done, self.cfg.grad_accum):
            self.journal.metrics(spike)
        values = self.counters.drain()
        line = {
            "kind": "train",
            "step": done,
            "tokens": done * per_step,
            "lr": learning_rate(done - 1, self.plan.n_steps, self.cfg),
            **values,
        }
        self.journal.metrics(line)
        timing = self.stopwatch.drain((done - self.logged) * per_step)
        self.journal.timing({"step": done, **timing})
        self.logged = done
        shown = {
            "loss": values["loss"],
            "tok/s": timing["tokens_per_second"],
            "MFU": timing["mfu"],
        }
        return {name: value for name, value in shown.items() if value is not None}

    def _evaluate(self) -> dict[str, float]:
        """Write the evaluation line of the weights as they are."""
        with self.stopwatch.part("evaluation"):
            values = evaluate(self.model, self.windows, self.cfg.precision)
            values |= self._frozen()
        if not math.isfinite(values["val_loss"]):
            raise NonFiniteError(f"step {self.done}: the validation loss is not finite")
        self.val_loss = values["val_loss"]
        tokens = self.done * self.plan.tokens_per_step
        self.journal.metrics({"kind": "eval", "step": self.done, "tokens": tokens, **values})
        return {"val_loss": self.val_loss}

    def _frozen(self) -> dict[str, int]:
        """How many parameters no step has changed; their names are noted once."""
        if self.done == 0:
            return {}
        names = self.frozen.names()
        if names and not self.noted:
            self.progress.note(
                f"{self.folder.path}: {len(names)} parameters still have every bit of the start "
                f"after step {self.done}: {', '.join(names[:NAMED])}"
                + (" ..." if len(names) > NAMED else "")
            )
        self.noted = True
        return {"frozen_parameters": len(names)}

    def _save(self) -> None:
        """Write the state from which the run can go on."""
        self.counters.check(self.cfg.grad_accum)
        with self.stopwatch.part("saving"):
            together(self.folder.require_in_place)
            save_state(self.folder.resume, self.journal.point(self.done), *self.kept)

    def _keep_milestone(self) -> None:
        if self.done in self.plan.milestones:
            self._checkpoint(self.folder.milestones / str(self.plan.milestones[self.done]))

    def _checkpoint(self, path: Path) -> None:
        """Write the weights as a checkpoint, in place of what a killed process left there."""
        with self.stopwatch.part("saving"):
            whole = consolidated(self.model)

            def write() -> None:
                self.folder.require_in_place()
                remove_tree(path)
                if whole is not None:  # it is in the first process
                    save(whole, path, training=self._training_record())

            together(write)

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
        self.journal.point(self.done)
        outcome = {
            "steps": self.done,
            "tokens": self.done * self.plan.tokens_per_step,
            "val_loss": self.val_loss,
            "skipped_steps": int(self.counters.tensors["skipped"].item()),
            "unchanged_parameters": self.frozen.names(),
        }
        together(lambda: self.folder.finish(outcome))

    def close(self) -> None:
        self.loader.close()
        self.journal.close()
        self.progress.end()


def _utilisation(
    model_cfg: ModelConfig, cfg: TrainConfig, device: torch.device
) -> Callable[[float], float | None]:
    """MFU at a number of tokens a second; the peak that is known is that of bf16."""
    peak = peak_flops(device) if cfg.precision == "bf16" else None
    flops, n_devices = flops_per_token(model_cfg), world().size
    return partial(model_flops_utilisation, flops=flops, n_devices=n_devices, peak=peak)
