"""Processes that train together give the losses of one, from the same rows in the same order."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from small_runs import lines, model_config, train_config

from satlens.config import ModelConfig, TrainConfig, make, to_dict
from satlens.data.dataset import PreparedDataset
from satlens.training import train
from satlens.training.loader import RowsByNumber

WORKER = Path(__file__).with_name("together_worker.py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo")

EVERY = {"log_every": 1, "eval_every": 10, "checkpoint_every": 100, "milestones": (0, 2000)}
# Name -> model, recipe, and the step at which process 1 alone gets SIGTERM. The first read of
# rd-attnres is dead. Micro-batches of 3 rows leave an epoch's short row in one process's share.
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "ddp": ({"name": "satformer"}, {"strategy": "ddp"}, None),
    "fsdp": ({"name": "satformer"}, {"strategy": "fsdp"}, None),
    "dead-ddp": ({"name": "rd-attnres"}, {"strategy": "ddp", "data_workers": 2}, 7),
    "dead-fsdp": ({"name": "rd-attnres"}, {"strategy": "fsdp"}, 7),
    "rerun-fsdp": (
        {"name": "satformer"},
        {"strategy": "fsdp", "gradient_checkpointing": True, "precision": "bf16"},
        None,
    ),
    "1x8": ({"name": "satformer"}, {"batch_size": 1, "grad_accum": 8, "tokens": 20 * 256}, None),
    "odd": ({"name": "satformer"}, {"grad_accum": 3}, None),
}
DEAD = ["blocks.0.attn_read.gamma", "blocks.0.attn_read.query", "blocks.0.attn_read.query_v"]


def configs(name: str) -> tuple[ModelConfig, TrainConfig]:
    model, recipe, _ = JOBS[name]
    return model_config(**model), train_config(20, **{**EVERY, **recipe})


def run_processes(size: int, data: Path, folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """What each of ``size`` processes saw, started as torchrun starts them."""
    jobs = [[name, *map(to_dict, configs(name)), JOBS[name][2]] for name in names]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(data), str(folder), json.dumps(jobs)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), **shared},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, said, strict=True):
        assert process.returncode == 0, error[-3000:]
    return [
        {**json.loads((folder / f"{rank}.json").read_text()), "stdout": out, "stderr": error}
        for rank, (out, error) in enumerate(said)
    ]


def alone(
    name: str, dataset: PreparedDataset, out: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[int, list[list[int]]]:
    """The same run by one process; what it saw."""
    from together_worker import watched

    seen: dict[int, list[list[int]]] = {}
    monkeypatch.setattr(RowsByNumber, "__getitem__", watched(seen))
    model_cfg, train_cfg = configs(name)
    one = make(TrainConfig, {**to_dict(train_cfg), "data_workers": 0}, "t")
    train(model_cfg, one, dataset, out, progress="none", device="cpu")
    return seen


@pytest.fixture(scope="module")
def two(
    dataset: PreparedDataset, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_processes(2, dataset.path, folder, list(JOBS))


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder, "train")]


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("ddp", 1e-5), ("fsdp", 1e-5), ("dead-ddp", 1e-5), ("dead-fsdp", 1e-5), ("rerun-fsdp", 3e-2)],
)
def test_two_processes_give_the_losses_of_one(
    name: str,
    tolerance: float,
    two: tuple[Path, list[dict[str, Any]]],
    dataset: PreparedDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, ranks = two
    expected = alone(name, dataset, tmp_path / "one", monkeypatch)
    assert losses(folder / name) == pytest.approx(losses(tmp_path / "one"), abs=tolerance)
    assert len(losses(folder / name)) == 20
    for mine, one in zip(
        lines(folder / name, "eval"), lines(tmp_path / "one", "eval"), strict=True
    ):
        assert list(mine) == list(one)
        assert mine["val_loss"] == pytest.approx(one["val_loss"], abs=tolerance)
    if not configs(name)[1].data_workers:
        # Micro-batch k was read by process k mod 2, and none was read twice.
        assert sorted(expected) == list(range(40))
        for rank, found in enumerate(ranks):
            mine = {int(number): rows for number, rows in found[name]["seen"].items()}
            assert mine == {k: rows for k, rows in expected.items() if k % 2 == rank}
    # The same weights: batches shared out give the numbers of all to the bit.
    assert lines(folder / name, "eval")[0] == lines(tmp_path / "one", "eval")[0]
    if configs(name)[1].precision == "fp32":
        whole, one = (
            load_file(run / "milestones" / "0" / "model.safetensors")
            for run in (folder / name, tmp_path / "one")
        )
        assert whole.keys() == one.keys()
        assert all(whole[key].equal(one[key]) for key in one)
        final = load_file(folder / name / "final" / "model.safetensors")
        reference = load_file(tmp_path / "one" / "final" / "model.safetensors")
        for key, value in reference.items():
            assert (final[key] - value).abs().max() < 1e-4, key


@pytest.mark.parametrize("name", ["dead-ddp", "dead-fsdp"])
def test_parameters_without_gradients_break_nothing(
    name: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    outcome = json.loads((two[0] / name / "finished.json").read_text())
    assert sorted(outcome["unchanged_parameters"]) == DEAD


@pytest.mark.parametrize("name", ["dead-ddp", "dead-fsdp"])
def test_a_signal_to_one_process_stops_all_after_the_same_step(
    name: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    """Told to stop at step 7 and gone on with; 20 losses above say that nothing was lost."""
    for found in two[1]:
        assert "stopped by SIGTERM after step 8 of 20, state saved; run" in found[name]["stopped"]
    assert "after step 8 of 20" in two[1][0]["stderr"]
    assert two[1][1]["stderr"] == ""


def test_the_loss_does_not_depend_on_how_a_step_is_cut(
    two: tuple[Path, list[dict[str, Any]]], dataset: PreparedDataset, tmp_path: Path
) -> None:
    cfg = train_config(20, **{**EVERY, "batch_size": 8, "grad_accum": 1})
    train(model_config("satformer"), cfg, dataset, tmp_path / "8x1", progress="none", device="cpu")
    cut, whole = losses(two[0] / "1x8"), losses(tmp_path / "8x1")
    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    assert cut == pytest.approx(whole, rel=1e-5)


def test_all_processes_are_told_what_one_ran_into(two: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = two
    for found in ranks:
        assert found["odd"]["error"].startswith(
            "ConfigError: grad_accum: 2 processes do not share out 3 micro-batches; set a multiple"
        )
        differ, taken = found["refused"]
        assert differ.startswith("SatlensError: train: process 1 of 2 has another model, other")
        assert taken.startswith("CheckpointError: ")
        assert "is writing this run" in taken
        for name, job in found.items():
            if name in JOBS and name != "odd":
                assert job["error"] == "", name
    assert not (folder / "odd").exists()
    assert not (folder / "differ").exists()


def test_the_command_line_trains_and_the_first_process_speaks(
    two: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = two
    assert [found["stdout"] for found in ranks] == [f"{folder / 'cli' / 'final'}\n", ""]
    assert json.loads((folder / "cli" / "finished.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_torchrun_hands_sigterm_on_and_says_an_error_once(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    model = "n_layers=3 d_model=32 n_ctx=32".split()
    recipe = "tokens=38400 batch_size=3 eval_tokens=300 precision=fp32 log_every=1".split()
    commands = Path(sys.executable).parent

    def start(*more: str) -> subprocess.Popen[str]:
        settings = [f"model.{each}" for each in model] + [f"train.{each}" for each in recipe]
        return subprocess.Popen(
            [
                *(commands / "torchrun", "--nproc-per-node=2", "--no-python"),
                *(commands / "satlens", "train", dataset.path, tmp_path / "run"),
                *(f"--set={each}" for each in (*settings, *more)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    said = start("train.grad_accum=3").communicate(timeout=120)[1]
    assert said.count("satlens: error: grad_accum: 2 processes do not share out 3") == 1
    stopped = start("train.grad_accum=2")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and len(lines(tmp_path / "run", "train")) > 20):
        assert stopped.poll() is None
        time.sleep(0.05)
    stopped.terminate()
    said = stopped.communicate(timeout=120)[1]
    (place,) = (tmp_path / "run" / "resume").iterdir()
    assert f"stopped by SIGTERM after step {int(place.name)} of 200, state saved" in said
    out, said = start("train.grad_accum=2", "train.data_workers=1").communicate(timeout=120)
    assert out == f"{tmp_path / 'run' / 'final'}\n", said
    cfg = train_config(200, eval_every=100, log_every=1)
    train(
        model_config("transformer", n_key_value_heads=4, d_vocab=dataset.vocab_size),
        cfg,
        dataset,
        tmp_path / "one",
        progress="none",
        device="cpu",
    )
    assert losses(tmp_path / "run")[:50] == pytest.approx(losses(tmp_path / "one")[:50], abs=1e-4)
    assert len(losses(tmp_path / "run")) == 200
