"""One of several processes that train together: what it saw is written for the test.

    python together_worker.py DATA FOLDER JOBS

JOBS is JSON: a list of [name, model config, recipe, signal], the last one a step after which this
process alone is sent SIGTERM if its rank is 1, or null. Then the command line trains one more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from satlens import cli
from satlens.config import ModelConfig, TrainConfig, make
from satlens.data.dataset import PreparedDataset
from satlens.errors import SatlensError
from satlens.processes import joined, world
from satlens.training import TrainingStopped, train
from satlens.training.loader import Loader, Rows, RowsByNumber
from satlens.training.run_folder import RunFolder

read, step = RowsByNumber.__getitem__, Loader.step
Seen = dict[int, list[list[int]]]


def watched(seen: Seen) -> Any:
    """``RowsByNumber.__getitem__`` that keeps the documents of each row, in their order."""

    def look(self: RowsByNumber, number: int) -> Rows:
        documents = self.batches.batch(number).documents
        seen[number] = [row.unique_consecutive().tolist() for row in documents]
        return read(self, number)

    return look


def stopping(at: int) -> Any:
    """``Loader.step`` that has process 1 alone told to stop while it waits for a step."""

    def wait(self: Loader, number: int) -> Any:
        if number == at and world().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # a scheduler's and torchrun's
        return step(self, number)

    return wait


def run(job: list[Any], dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    name, model, recipe, stop = job
    model_cfg, train_cfg = make(ModelConfig, model, "m"), make(TrainConfig, recipe, "t")
    seen: Seen = {}
    RowsByNumber.__getitem__ = watched(seen)  # type: ignore[method-assign]
    if stop is not None:
        Loader.step = stopping(stop)  # type: ignore[method-assign]
    arguments = model_cfg, train_cfg, dataset, folder / name
    stopped = error = ""
    try:
        train(*arguments, progress="none", device="cpu")
    except TrainingStopped as reason:
        stopped = str(reason)
        Loader.step = step  # type: ignore[method-assign]
        train(*arguments, progress="none", device="cpu", resume="must")
    except SatlensError as reason:
        error = f"{type(reason).__name__}: {reason}"
    return {"seen": seen, "stopped": stopped, "error": error}


def refused(dataset: PreparedDataset, folder: Path, job: list[Any]) -> list[str]:
    """What each process is told where one of them cannot go on, or is given something else."""
    rank = world().rank
    other = [job[0], job[1], {**job[2], "seed": rank}, None]
    found = [run(other, dataset, folder / "differ")["error"]]
    (folder / "taken").mkdir(exist_ok=True)
    locked = RunFolder(folder / "taken" / job[0])
    # Another process writes this run, as the first one alone finds out.
    if rank == 1:
        with locked.locked():
            torch.distributed.barrier()
            found.append(run(job, dataset, folder / "taken")["error"])
    else:
        torch.distributed.barrier()
        found.append(run(job, dataset, folder / "taken")["error"])
    return found


def main(data: str, folder: Path, jobs: list[list[Any]]) -> None:
    torch.set_num_threads(1)
    with joined() as (rank, _):
        dataset = PreparedDataset.open(data)
        found: dict[str, Any] = {job[0]: run(job, dataset, folder) for job in jobs}
        found["refused"] = refused(dataset, folder, jobs[0])
        (folder / f"{rank}.json").write_text(json.dumps(found))
        sizes = "n_layers=1 d_model=32 n_ctx=32".split()
        recipe = "tokens=384 batch_size=3 grad_accum=2 eval_tokens=300 precision=fp32".split()
        options = [f"--set=model.{each}" for each in sizes]
        options += [f"--set=train.{each}" for each in recipe]
        sys.argv = ["satlens", "train", data, str(folder / "cli"), *options]
        cli.main()  # ends the process


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
