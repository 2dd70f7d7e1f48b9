"""Processes that share a pass all end with the tables of one process, to the bit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes_worker import measured

from satlens.analysis.engine.merging import merge
from satlens.errors import SatlensError
from satlens.processes import World, first_alone, joined, own_device, world

WORKER = Path(__file__).with_name("processes_worker.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_processes(size: int, folder: Path, state: Path) -> list[dict]:
    """What each of ``size`` processes wrote, started as torchrun starts them."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), str(state)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), **shared},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def alone():
    """Tables and forwards of one process."""
    torch.set_num_threads(1)
    steps = []
    tables = measured(lambda *step: steps.append(step))
    return tables, sum(done > 0 for _, done, _ in steps)


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """Where the passes of all runs are kept: those of another number of processes do not serve."""
    return tmp_path_factory.mktemp("state")


@pytest.mark.skipif(sys.platform != "linux", reason="gloo")
@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_processes_gives_the_same_tables(size, alone, state, tmp_path):
    expected, n_forwards = alone
    ranks = run_processes(size, tmp_path, state)
    for found in ranks:
        assert found["size"] == size
        assert found["tables"] == expected
    # Nothing is run twice, and a finished pass is not run again.
    assert sum(found["forwards"] for found in ranks) == n_forwards
    assert all(found["again"] and found["repeated"] == 0 for found in ranks)
    assert all("process 1 of" in found["refused"] for found in ranks)
    assert [found["found_cache"] for found in ranks] == [False] + [True] * (size - 1)


def test_without_others_there_is_nothing_to_exchange(monkeypatch):
    assert world() == World(0, 1)
    with joined() as here, first_alone():
        assert here == World(0, 1)
        merge({})
    assert own_device("cuda") == "cuda"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(SatlensError, match=r"MASTER_ADDR.*torchrun"), joined():
        pass
