"""Progress on stderr: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Literal, Protocol

from satlens.errors import ConfigError
from satlens.processes import world

ProgressKind = Literal["auto", "bar", "lines", "none"]
SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    """Whatever wants to follow a run."""

    def begin(self, title: str, total: int, done: int) -> None:
        """The run starts, or goes on at step ``done`` of ``total``."""

    def update(self, done: int, fields: dict[str, float] | None = None) -> None:
        """A step is finished; ``fields`` are new figures to show, by name."""

    def note(self, text: str) -> None:
        """A line that the user should read."""

    def end(self) -> None:
        """Nothing more will come."""


class NoProgress:
    """Shows notes only."""

    def begin(self, title: str, total: int, done: int) -> None:
        self.title = title

    def update(self, done: int, fields: dict[str, float] | None = None) -> None:
        return

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        return


class Silent(NoProgress):
    """Shows nothing: one process speaks for all."""

    def note(self, text: str) -> None:
        return


class LineProgress(NoProgress):
    """A line every ten seconds at most, and one at the end."""

    def begin(self, title: str, total: int, done: int) -> None:
        self.title, self.total, self.first = title, total, done
        self.start = self.last = time.monotonic()
        self.fields: dict[str, float] = {}

    def update(self, done: int, fields: dict[str, float] | None = None) -> None:
        if fields is None:
            return
        self.fields |= fields
        now = time.monotonic()
        if now - self.last < SECONDS_BETWEEN_LINES and done < self.total:
            return
        self.last = now
        left = (now - self.start) / max(done - self.first, 1) * (self.total - done)
        shown = " ".join(f"{name} {value:.4g}" for name, value in self.fields.items())
        self.note(f"{self.title}: step {done}/{self.total} {shown} left {left:.0f} s")


class BarProgress(NoProgress):
    """A bar of rich with figures and the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=2,
        )
        self.fields: dict[str, float] = {}

    def begin(self, title: str, total: int, done: int) -> None:
        self.task = self.bar.add_task(title, total=total, completed=done, shown="")
        self.bar.start()

    def update(self, done: int, fields: dict[str, float] | None = None) -> None:
        if fields is None:
            self.bar.update(self.task, completed=done)
            return
        self.fields |= fields
        shown = " ".join(f"{name} {value:.4g}" for name, value in self.fields.items())
        self.bar.update(self.task, completed=done, shown=shown)

    def note(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False)

    def end(self) -> None:
        self.bar.stop()


def open_progress(progress: ProgressKind | Progress) -> Progress:
    """The follower asked for; ``auto`` is a bar on a terminal and lines elsewhere.

    Under torchrun the first process has it and the others are silent.

    Raises:
        ConfigError: an unknown kind.
    """
    if world().rank > 0:
        return Silent()
    if not isinstance(progress, str):
        return progress
    kinds = {"bar": BarProgress, "lines": LineProgress, "none": NoProgress}
    kind = ("bar" if sys.stderr.isatty() else "lines") if progress == "auto" else progress
    if kind not in kinds:
        raise ConfigError(f"progress: unknown kind {progress!r} (auto, {', '.join(kinds)})")
    return kinds[kind]()
