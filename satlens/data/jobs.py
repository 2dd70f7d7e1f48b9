"""Jobs that worker processes share, each of which leaves a record when it is done.

What a job writes depends on its arguments alone, so the number of workers changes nothing but the
time. A job with a record is not run again: whoever is stopped at any moment continues from there.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from satlens.runner import initialise_worker

Progress = Callable[[str, int, int], None]
"""Called with (stage, units done, units in all)."""

Tick = Callable[[int], None]
"""Called by a job, often, with the number of units done since the last call (it may be 0)."""


class Job(NamedTuple):
    """One piece of work."""

    action: Callable[..., dict[str, Any]]
    """A function of a module, called as ``action(tick, *arguments)``, or as ``action(tick, corpus,
    *arguments)`` where the job reads the corpus; its result is recorded as JSON."""
    arguments: tuple[Any, ...]
    record: Path
    """File of the result, written when everything else is on the disk."""
    size: int = 1
    """Units that the job ticks in all."""
    reads_corpus: bool = False


class _StoppedError(Exception):
    """Another job has failed or the user has interrupted: this one is given up."""


class Workers:
    """Runs jobs in processes; a context manager. The processes start with the first job.

    Args:
        n: processes. 1 runs the jobs in this process, and libraries may use several threads.
        corpus: what jobs read; sent to each process once.
        alive: file that every process has locked (shared) while it lives, also when this one is
            killed; see :func:`wait_for_others`.
    """

    def __init__(self, n: int, corpus: Any, alive: Path) -> None:
        self.n, self._corpus, self._alive = n, corpus, alive
        context = multiprocessing.get_context("spawn")
        self._counter, self._stop = context.Value("q", 0), context.Event()
        self._context = context
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._stop.set()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, stage: str, jobs: Sequence[Job], report: Progress) -> list[dict[str, Any]]:
        """The results of jobs, in their order; those with a record are not run.

        Raises:
            BrokenProcessPool: a worker was killed.
            Exception: that of the first job that fails, in their order, whatever the number of
                workers.
        """
        results = [_recorded(job.record) for job in jobs]
        left = {k: job for k, job in enumerate(jobs) if results[k] is None}
        total = sum(job.size for job in jobs)
        done = total - sum(job.size for job in left.values())
        report(stage, done, total)
        run = self._here if self.n == 1 else self._shared
        for number, result in run(left, lambda more: report(stage, done + more, total)):
            results[number] = result
        report(stage, total, total)
        return [result for result in results if result is not None]

    def _here(
        self, jobs: dict[int, Job], report: Callable[[int], None]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        done = 0

        def tick(units: int) -> None:
            nonlocal done
            done += units
            report(done)

        for number, job in jobs.items():
            yield number, _perform(job, tick, self._corpus)

    def _shared(
        self, jobs: dict[int, Job], report: Callable[[int], None]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        before, counter = self._counter.value, self._counter
        with _interrupts_held():
            running = {self._started().submit(_perform_here, job): k for k, job in jobs.items()}
        failures: dict[int, BaseException] = {}
        while running:
            finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            report(counter.value - before)
            for future in finished:
                number, error = running.pop(future), future.exception()
                if error is None:
                    yield number, future.result()
                else:
                    failures[number] = error
            if failures:
                _drop_later(running, min(failures))
        if failures:
            raise failures[min(failures)]

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            state = _State(self._counter, self._stop, self._corpus)
            arguments = (state, self._alive)
            self._pool = ProcessPoolExecutor(
                self.n, self._context, initializer=_begin, initargs=arguments
            )
        return self._pool


def _drop_later(running: dict[Future[dict[str, Any]], int], number: int) -> None:
    """Forget the jobs after one that failed; those before it may have the fault to report."""
    for future in [each for each, k in running.items() if k > number]:
        future.cancel()
        del running[future]


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, which goes to the whole group: we tell them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_others(alive: Path) -> None:
    """Return when no process of a killed preparation lives; they notice within a second."""
    descriptor = os.open(alive, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


# -- in a worker ----------------------------------------------------------------------------------


class _State(NamedTuple):
    """What a process keeps from job to job."""

    counter: Any
    stop: Any
    corpus: Any


_states: list[_State] = []


def _begin(state: _State, alive: Path) -> None:
    initialise_worker()
    fcntl.flock(os.open(alive, os.O_RDWR | os.O_CREAT, 0o644), fcntl.LOCK_SH)
    _states.append(state)


def _perform_here(job: Job) -> dict[str, Any]:
    return _perform(job, _tick, _states[0].corpus)


def _tick(units: int) -> None:
    counter, stop, _ = _states[0]
    if stop.is_set():
        raise _StoppedError
    with counter.get_lock():
        counter.value += units


def _perform(job: Job, tick: Tick, corpus: Any) -> dict[str, Any]:
    arguments = (corpus, *job.arguments) if job.reads_corpus else job.arguments
    result = job.action(tick, *arguments)
    write_json(job.record, result)
    return result


# -- files ----------------------------------------------------------------------------------------


def _recorded(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # never begun, or the machine went down
        return None


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a file as a whole or not at all, and durably."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sync(temporary)
    os.replace(temporary, file)


def sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
