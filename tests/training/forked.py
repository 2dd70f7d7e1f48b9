"""Processes forked from the test's own: they start at once, and may die in any way.

A fork shares what is imported already; starting Python and torch anew takes some seconds each time.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # which the first step of an optimiser imports
import torch.distributed as dist


class Outcome(NamedTuple):
    """How a process ended."""

    status: int
    """Exit status, or minus the number of the signal that ended it."""
    said: str
    """What it wrote to standard error."""


class Forked:
    """A process that runs a body; its status is that of the body's SystemExit, 1 after an error.

    Args:
        body: runs in the new process; what it returns is lost.
        log: file for its standard error.
    """

    def __init__(self, body: Callable[[], object], log: Path) -> None:
        self._log, self._status = log, None
        self.pid = os.fork()
        if self.pid == 0:
            _run(body, log)
        with suppress(PermissionError, ProcessLookupError):  # either side may be first
            os.setpgid(self.pid, self.pid)

    def send(self, number: signal.Signals, to_all: bool = False) -> None:
        """Send a signal unless it has ended, to what it started as well if ``to_all``."""
        if self._status is None:
            (os.killpg if to_all else os.kill)(self.pid, number)

    def left_behind(self) -> bool:
        """Whether a process that it started is still there."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def ended(self) -> bool:
        """Whether it has ended by now."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status is not None

    def outcome(self, patience: float = 60) -> Outcome:
        """Wait for its end; killed and reported as a failure where that takes too long."""
        limit = time.monotonic() + patience
        while not self.ended():
            if time.monotonic() > limit:
                self.send(signal.SIGKILL)
                raise AssertionError(f"still running after {patience} s: {self._log.read_text()}")
            time.sleep(0.002)
        assert self._status is not None
        return Outcome(self._status, self._log.read_text())


def _run(body: Callable[[], object], log: Path) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 2)
        torch.set_num_threads(1)
        body()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
        os.write(2, f"{end}\n".encode())
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def run_ranks(size: int, body: Callable[[], object], folder: Path, patience: float = 120) -> None:
    """Run a body in a group of ``size`` processes, all of which must end well."""
    outcomes = [rank.outcome(patience) for rank in start_ranks(size, body, folder)]
    assert not any(status for status, _ in outcomes), "\n".join(said for _, said in outcomes)


def start_ranks(size: int, body: Callable[[], object], folder: Path) -> list[Forked]:
    """Start processes that meet over gloo, none if there is one; see :func:`run_ranks`.

    Args:
        folder: for their logs and for the file through which they meet; made if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "store"
    store.unlink(missing_ok=True)

    def joined(rank: int) -> None:
        if size > 1:
            where = f"file://{store}"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
        body()
        if size > 1:
            dist.barrier()

    return [Forked(lambda k=k: joined(k), folder / f"rank-{k}.txt") for k in range(size)]
