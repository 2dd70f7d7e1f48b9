from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from small_runs import train_config

from satlens.data.batches import TrainBatches
from satlens.data.dataset import PreparedDataset
from satlens.errors import SatlensError
from satlens.processes import World
from satlens.training import loader
from satlens.training.interrupts import stop_on_signals
from satlens.training.loader import Loader, RowsByNumber, readers_watched

CPU = torch.device("cpu")


@contextmanager
def opened(dataset: PreparedDataset, steps: range, **changes: int) -> Iterator[Loader]:
    batches = TrainBatches(dataset.split("train"), 64, 3, seed=5)
    found = Loader(RowsByNumber(batches, True), train_config(**changes), steps, CPU)
    try:
        yield found
    finally:
        found.close()


def drawn(dataset: PreparedDataset, steps: range, **changes: int) -> list[tuple]:
    with opened(dataset, steps, **changes) as found:
        return [
            tuple(part.tolist() if torch.is_tensor(part) else part for part in micro_batch)
            for number in steps
            for micro_batch in found.step(number)
        ]


@pytest.mark.parametrize("data_workers", [1, 3])
def test_readers_change_nothing(dataset: PreparedDataset, data_workers: int) -> None:
    batches = TrainBatches(dataset.split("train"), 64, 3, seed=5)
    steps = range(batches.chunks_per_epoch // 3)  # two epochs
    expected = drawn(dataset, steps, data_workers=0)
    before = torch.get_rng_state()
    assert drawn(dataset, steps, data_workers=data_workers) == expected
    assert torch.equal(torch.get_rng_state(), before)
    # A run that goes on at a step sees what comes there.
    rest = range(steps.stop - 9, steps.stop)
    assert drawn(dataset, rest, data_workers=data_workers) == expected[2 * rest.start :]
    for k in range(0, len(expected), 2):
        shares = [part[-1] for part in expected[k : k + 2]]
        scored = [sum(t >= 0 for row in part[1] for t in row) for part in expected[k : k + 2]]
        assert shares == [n / sum(scored) for n in scored]
    assert {part[-1] for part in expected} != {0.5}


@pytest.mark.parametrize("size", [2, 3, 6])
def test_processes_share_out_each_step(
    dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    steps = range(4, 8)
    whole = drawn(dataset, steps, grad_accum=6)
    for rank in range(size):
        monkeypatch.setattr(loader, "world", lambda rank=rank: World(rank, size))
        assert drawn(dataset, steps, grad_accum=6) == whole[rank::size]


def test_a_signal_while_waiting_ends_neither_the_wait_nor_the_readers(
    dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent to every process, as a scheduler does; noted by the one that trains."""
    read = RowsByNumber.__getitem__

    def slow(self: RowsByNumber, number: int) -> loader.Rows:
        time.sleep(0.2)
        return read(self, number)

    expected = drawn(dataset, range(3))
    monkeypatch.setattr(RowsByNumber, "__getitem__", slow)
    with stop_on_signals() as stop, opened(dataset, range(3), data_workers=2) as found:
        readers = [worker.pid or 0 for worker in torch.multiprocessing.active_children()]
        assert len(readers) == 2
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        for pid in readers:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        inputs = [part.inputs.tolist() for number in range(3) for part in found.step(number)]
    assert inputs == [part[0] for part in expected]
    assert stop.signal == signal.SIGTERM
    assert not torch.multiprocessing.active_children()


def test_a_killed_reader_is_one_line(dataset: PreparedDataset) -> None:
    def run() -> None:
        with opened(dataset, range(1000), data_workers=1) as found, readers_watched():
            found.step(0)
            (reader,) = torch.multiprocessing.active_children()
            reader.kill()
            for number in range(1, 1000):
                found.step(number)

    with pytest.raises(SatlensError, match="data_workers: a process that reads ahead") as caught:
        run()
    assert "\n" not in str(caught.value)
