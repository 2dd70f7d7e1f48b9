"""Progress on stderr: bars with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, int] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield show


def _plain_progress() -> Callable[[str, int, int], None]:
    last = time.monotonic()
    began: dict[str, tuple[float, int]] = {}

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        since, at_first = began.setdefault(stage, (now, done))
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            left = ""
            if at_first < done < total:
                seconds = (now - since) * (total - done) / (done - at_first)
                left = f", about {format_seconds(seconds)} left"
            print(f"{stage}: {done} of {total}{left}", file=sys.stderr, flush=True)

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


# -- results on a terminal -------------------------------------------------------------------------

MAX_COLUMNS = 6


def table_text(table: Any, keys: list[str]) -> str:
    """A result table for a terminal: its keys and first statistics, each with its interval.

    Statistics of the untrained model and those beyond the first six are left to the CSV.
    """
    skipped = {*keys, "n_documents", "n_tokens", "flags"}
    names = [
        name
        for name in table
        if name not in skipped
        and not name.endswith(("_low", "_high"))
        and table[name].notna().any()
    ]
    first = [name for name in names if not name.endswith("_init")][:MAX_COLUMNS]
    shown = table[keys].copy()
    for name in first:
        ends = [table.get(name + end, [None] * len(table)) for end in ("_low", "_high")]
        shown[name] = [with_interval(*cells) for cells in zip(table[name], *ends, strict=True)]
    left = len(names) - len(first)
    more = f"\n({left} more statistics in the CSV that --out writes)" if left else ""
    return shown.to_string(index=False, max_colwidth=44, na_rep="") + more


def with_interval(value: Any, low: Any = None, high: Any = None) -> str:
    """``0.312 [0.301, 0.325]``, or the value alone where there is no interval."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value != value:
        return ""
    if low is None or high is None or low != low or high != high:
        return f"{value:.4g}"
    return f"{value:.4g} [{low:.4g}, {high:.4g}]"


def headlines(summary: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every estimate in a result's summary with its interval, a line each."""
    for name, value in summary.items():
        if isinstance(value, dict) and "estimate" in value:
            ends = value.get("estimate"), value.get("low"), value.get("high")
            yield f"{prefix}{name}: {with_interval(*ends)}"
        elif isinstance(value, dict):
            yield from headlines(value, f"{prefix}{name}.")
