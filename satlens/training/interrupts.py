"""SIGTERM and SIGINT: the step in hand is finished, the state saved, the exit status 0."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class TrainingStopped(SystemExit):
    """A signal ended the run early, with its state saved; uncaught, the process exits with 0.

    The text says how to resume.
    """

    def __init__(self, text: str) -> None:
        super().__init__(0)
        self.text = text

    def __str__(self) -> str:
        return self.text


class StopRequest:
    """Whether a signal has asked the run to stop, and which one."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note the first SIGTERM or SIGINT instead of dying; a second SIGINT acts as it did before.

    Further SIGTERMs are the same request again: a scheduler sends it to every process of a job, and
    torchrun, one of them, hands it on to its own. Outside the main thread, which alone receives
    signals, nothing is installed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}

    def restore(number: int) -> None:
        handler = previous[number]
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        restore(signal.SIGINT)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number in SIGNALS:
            restore(number)
