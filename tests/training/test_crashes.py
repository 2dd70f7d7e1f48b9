"""Runs that are killed or told to stop at any moment: going on, they show nothing of it."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from forked import Forked, run_ranks, start_ranks
from small_runs import lines, model_config, outputs, train_config

from satlens.config import TrainConfig
from satlens.data.dataset import PreparedDataset
from satlens.training import loop, state_tensors, train
from satlens.training.loader import RowsByNumber

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and forks")

MODEL = model_config(n_layers=2)
CFG = train_config(24, checkpoint_every=3, milestones=(0, 2000))
WORKERS = (0, 1, 4)


SHORT = train_config(4, checkpoint_every=2, eval_every=2, milestones=(0, 400))


def run(dataset: PreparedDataset, out: Path, cfg: TrainConfig = CFG) -> None:
    train(MODEL, cfg, dataset, out, progress="none", device="cpu")


def reading(workers: int) -> TrainConfig:
    return replace(CFG, data_workers=workers)


Wholes = Callable[[int], dict[str, bytes]]


@pytest.fixture(scope="module")
def whole(dataset: PreparedDataset, tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    """Outputs of a run that nothing interrupted, by the number of data workers."""

    @cache
    def made(workers: int) -> dict[str, bytes]:
        out = tmp_path_factory.mktemp("whole") / "run"
        run(dataset, out, reading(workers))
        assert [line["step"] for line in lines(out, "eval")] == [0, 8, 16, 24]
        return outputs(out)

    return made


def same(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """Every file has the same bytes: weights, metrics, evaluations, and the outcome."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


# -- killed --------------------------------------------------------------------------------------


def die_at_change(number: int) -> None:
    """From now on, kill this process right before its ``number``-th change of the file system."""
    left = number
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate") or (
            event == "open" and arguments[2] & writes
        ):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def die_in_a_file(number: int) -> None:
    """Kill this process when it has written half of its ``number``-th file of a saved state."""
    left, write = number, state_tensors.save_file

    def torn(tensors: Any, file: Path) -> None:
        nonlocal left
        write(tensors, file)
        left -= 1
        if left == 0:
            os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    state_tensors.save_file = torn


class Chain:
    """Runs in one folder, each killed, until one ends; then in the next folder."""

    def __init__(
        self, dataset: PreparedDataset, expected: dict[str, bytes], folder: Path, cfg: TrainConfig
    ) -> None:
        self._dataset, self._expected, self._folder, self._cfg = dataset, expected, folder, cfg
        self._n_finished = self.n_killed = 0

    @property
    def _out(self) -> Path:
        return self._folder / str(self._n_finished)

    def go_on(self, *, seconds: float | None = None, death: Callable[[], object] = int) -> None:
        """Start the run again, or anew, and let it die.

        Args:
            seconds: kill it after so many, or
            death: run in the new process, before the training.
        """

        def body() -> None:
            death()
            run(self._dataset, self._out, self._cfg)

        process = Forked(body, self._folder / "log.txt")
        if seconds is not None:
            time.sleep(seconds)
            process.send(signal.SIGKILL)
        status, said = process.outcome()
        assert status in (-signal.SIGKILL, 0), said
        self.n_killed += status != 0
        if status == 0:
            self._check()

    def finish(self) -> None:
        """Let the last one end."""
        run(self._dataset, self._out, self._cfg)
        self._check()

    def _check(self) -> None:
        same(outputs(self._out), self._expected)
        self._n_finished += 1


@pytest.mark.parametrize("workers", WORKERS)
def test_killed_runs_go_on_to_the_bit(
    dataset: PreparedDataset, whole: Wholes, tmp_path: Path, workers: int
) -> None:
    draw = random.Random(workers)
    chain = Chain(dataset, whole(workers), tmp_path, reading(workers))
    chain.go_on(death=partial(die_at_change, draw.randrange(30, 80)))
    chain.go_on(death=partial(die_in_a_file, draw.randrange(1, 3)))
    chain.go_on(seconds=draw.uniform(0.2, 0.6))
    assert chain.n_killed >= 2
    chain.finish()


def test_readers_change_nothing(whole: Wholes) -> None:
    """But what the records say of them."""
    for workers in WORKERS[1:]:
        for name, content in whole(workers).items():
            if not name.endswith(("run.json", "training.json", "manifest.json", "finished.json")):
                assert content == whole(0)[name], name


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
def test_twenty_random_kills_and_some_in_each_save(
    dataset: PreparedDataset, whole: Wholes, tmp_path: Path, workers: int
) -> None:
    draw = random.Random(workers)
    chain = Chain(dataset, whole(workers), tmp_path, reading(workers))
    while chain.n_killed < 20:
        chain.go_on(seconds=draw.uniform(0, 1.5))
    while chain.n_killed < 30:
        chain.go_on(death=partial(die_at_change, draw.randrange(1, 120)))
    while chain.n_killed < 35:
        chain.go_on(death=partial(die_in_a_file, draw.randrange(1, 4)))
    chain.finish()


@pytest.mark.slow
def test_readers_end_with_a_killed_run(dataset: PreparedDataset, tmp_path: Path) -> None:
    process = Forked(partial(run, dataset, tmp_path / "run", reading(4)), tmp_path / "log.txt")
    while not (tmp_path / "run" / "resume").exists():
        time.sleep(0.01)
    process.send(signal.SIGKILL)
    assert process.outcome().status == -signal.SIGKILL
    limit = time.monotonic() + 30  # they look every five seconds
    while process.left_behind():
        assert time.monotonic() < limit
        time.sleep(0.1)


@pytest.mark.slow
def test_killed_before_any_change_of_the_disk(dataset: PreparedDataset, tmp_path: Path) -> None:
    """Each change of a short run in turn: every state that the folder can be left in."""
    run(dataset, tmp_path / "whole", SHORT)
    expected = outputs(tmp_path / "whole")
    for number in range(1, 10_000):
        folder = tmp_path / str(number)
        folder.mkdir()
        chain = Chain(dataset, expected, folder, SHORT)
        chain.go_on(death=partial(die_at_change, number))
        if chain.n_killed == 0:
            break
        chain.finish()
    assert number > 30


# -- told to stop ----------------------------------------------------------------------------------


def before(holder: Any, name: str, call: int, act: Callable[[], None]) -> None:
    """Do something right before the ``call``-th call of a function, in this process."""
    function, count = getattr(holder, name), 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            act()
        return function(*args, **kwargs)

    setattr(holder, name, watched)


def while_it_waits_for_data(main: int, number: signal.Signals, once: Path) -> None:
    """Called by each reader; the first one sends the signal."""
    with suppress(FileExistsError):
        once.mkdir()
        os.kill(main, number)
        time.sleep(0.2)


MOMENTS: dict[str, tuple[Any, str, int]] = {
    "data": (RowsByNumber, "__getitem__", 9),
    "step": (loop, "forward_backward", 5),
    "evaluation": (loop, "evaluate", 2),
    "milestone": (loop, "save", 2),
    "save": (state_tensors, "save_file", 2),
}


@pytest.mark.parametrize(
    ("moment", "workers", "number"),
    [
        ("data", 0, signal.SIGTERM),
        ("data", 1, signal.SIGTERM),
        ("data", 4, signal.SIGINT),
        ("step", 1, signal.SIGINT),
        ("evaluation", 4, signal.SIGTERM),
        ("milestone", 0, signal.SIGTERM),
        ("save", 4, signal.SIGTERM),
    ],
)
def test_told_to_stop_it_saves_and_goes_on_to_the_bit(
    dataset: PreparedDataset,
    whole: Wholes,
    tmp_path: Path,
    moment: str,
    workers: int,
    number: signal.Signals,
) -> None:
    out, log = tmp_path / "run", tmp_path / "log.txt"

    def body() -> None:
        main, act = os.getpid(), lambda: while_it_waits_for_data(main, number, tmp_path / "sent")
        if moment != "data":  # as from a terminal: to the process and to those that read for it
            act = lambda: os.killpg(main, number)  # noqa: E731
        before(*MOMENTS[moment], act)
        run(dataset, out, reading(workers))

    process = Forked(body, log)
    status, said = process.outcome()
    assert status == 0, said
    assert said.count("\n") == 1
    assert f"stopped by {number.name} after step" in said
    (step,) = {int(word) for word in said.split() if word.isdigit()} - {24}
    assert 0 < step < 24
    assert (out / "resume" / f"{step:09d}" / "state.json").exists()
    assert not process.left_behind()
    run(dataset, out, reading(workers))
    same(outputs(out), whole(workers))


# -- two processes ---------------------------------------------------------------------------------


def newest(out: Path) -> str:
    """The newest saved state of a run."""
    return max((path.name for path in (out / "resume").glob("[0-9]*")), default="")


def kill_ranks(dataset: PreparedDataset, out: Path, cfg: TrainConfig, times: int) -> None:
    """Kill one of two processes after some progress, and with it the other, as torchrun does."""
    draw = random.Random(3)
    for _ in range(times):
        before = newest(out)
        ranks = start_ranks(2, partial(run, dataset, out, cfg), out.parent / "logs")
        limit = time.monotonic() + 60
        while newest(out) == before:
            assert time.monotonic() < limit
            assert not any(rank.ended() for rank in ranks)
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.1))
        first = draw.randrange(2)
        ranks[first].send(signal.SIGKILL)
        time.sleep(0.05)
        ranks[1 - first].send(signal.SIGKILL)
        assert ranks[first].outcome().status == -signal.SIGKILL
        ranks[1 - first].outcome()


def killed_pairs(dataset: PreparedDataset, folder: Path, cfg: TrainConfig, times: int) -> None:
    kill_ranks(dataset, folder / "cut" / "run", cfg, times)
    for name in ("cut", "whole"):
        run_ranks(2, partial(run, dataset, folder / name / "run", cfg), folder / name / "logs")
    same(outputs(folder / "cut" / "run"), outputs(folder / "whole" / "run"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_killed_processes_go_on_to_the_bit(
    dataset: PreparedDataset, tmp_path: Path, strategy: str
) -> None:
    killed_pairs(dataset, tmp_path, replace(CFG, strategy=strategy), times=1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_killed_ten_times(
    dataset: PreparedDataset, tmp_path: Path, strategy: str
) -> None:
    killed_pairs(dataset, tmp_path, train_config(400, strategy=strategy, log_every=10), times=10)
