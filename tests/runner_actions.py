"""Actions for the tests of the step runner; imported by its worker processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from satlens.errors import DataError


def write(root: Path, params: dict, report) -> None:
    """Concatenate the inputs and a text; log the call."""
    with (root / "calls.log").open("a") as log:
        log.write(params["out"] + "\n")
    text = "".join((root / name).read_text() for name in params.get("inputs", []))
    (root / params["out"]).write_text(text + params["text"])
    report(1.0, "written")


def fail(root: Path, params: dict, report) -> None:
    raise DataError("shard.bin: token count: expected 3, got 2")


def die(root: Path, params: dict, report) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def slow(root: Path, params: dict, report) -> None:
    (root / "pid").write_text(str(os.getpid()))
    time.sleep(60)


def accumulate(root: Path, params: dict, report) -> None:
    """Keeps a partial file; fails the first time, ends the second."""
    partial = root / params["out"]
    if not partial.exists():
        partial.write_text("half ")
        raise DataError("interrupted")
    partial.write_text(partial.read_text() + "whole")


def resume(root: Path, params: dict, report) -> None:
    """Keeps a state beside its result; refuses the state of another version."""
    state = root / "run" / "resume"
    state.parent.mkdir(exist_ok=True)
    if not state.exists():
        state.write_text(str(params["version"]))
        raise DataError("interrupted")
    assert state.read_text() == str(params["version"])
    (root / params["out"]).write_text("done")


def stop(root: Path, params: dict, report) -> None:
    """Ends as a training does that a signal stopped: status 0, the rest still to do."""
    raise SystemExit(0)
