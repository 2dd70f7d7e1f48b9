"""Progress on stderr: bars with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from satlens.runner import Step

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def progress_bar(quiet: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """A callback ``(stage, done, total)`` that shows one long task."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield _plain_progress()
        return
    from rich.console import Console
    from rich.progress import Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, int] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield show


def _plain_progress() -> Callable[[str, int, int], None]:
    last = time.monotonic()

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{stage}: {done} of {total}", file=sys.stderr, flush=True)

    return show


class StudyDisplay:
    """Shows the steps of a study; use as a context manager."""

    def __init__(self, n_steps: int) -> None:
        self.n_steps = n_steps
        self.n_done = 0
        self._bars = None
        self._tasks: dict[str, object] = {}
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            self._bars = Progress(
                TextColumn("{task.description:<38}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[message]}"),
                console=Console(stderr=True),
                transient=True,
            )

    def __enter__(self) -> StudyDisplay:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def start(self, step: Step) -> None:
        if self._bars is not None:
            self._tasks[step.id] = self._bars.add_task(step.id, total=1.0, message="")

    def progress(self, step: Step, fraction: float, message: str) -> None:
        if self._bars is not None:
            self._bars.update(self._tasks[step.id], completed=fraction, message=message)  # type: ignore[arg-type]

    def finish(self, step: Step, seconds: float, left: float | None) -> None:
        self.n_done += 1
        remaining = "" if not left or left < 1 else f", about {format_seconds(left)} left"
        line = f"[{self.n_done}/{self.n_steps}] {step.id} in {format_seconds(seconds)}{remaining}"
        if self._bars is not None:
            self._bars.remove_task(self._tasks.pop(step.id))  # type: ignore[arg-type]
            self._bars.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)


def format_seconds(seconds: float) -> str:
    """``8 s`` or ``3 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
