"""The lines that a run writes and shows as it goes; the first process does, all must call."""

from __future__ import annotations

from typing import Any

from satlens.training.distributed import together
from satlens.training.monitors import JsonLines
from satlens.training.resume import ResumePoint
from satlens.training.run_folder import RunFolder, read_run
from satlens.training.trackers import Trackers


class Journal:
    """metrics.jsonl and timing.jsonl, cut back to where a saved state was, and the trackers.

    Args:
        trackers: get every line, too.

    Raises:
        CheckpointError: (here and in every method, in all processes) a file is shorter than the
            state says, or cannot be written.
    """

    def __init__(self, folder: RunFolder, point: ResumePoint, trackers: Trackers) -> None:
        self._files: list[JsonLines] = []
        self._trackers: Trackers | None = None  # those of the first process

        def start() -> None:
            metrics = JsonLines(folder.metrics, point.metrics_bytes, point.metrics_sha256)
            self._files += [metrics, JsonLines(folder.timing, point.timing_bytes)]
            self._trackers = trackers
            trackers.begin(folder.path, read_run(folder.path), point.step)

        together(start)

    def metrics(self, line: dict[str, Any]) -> None:
        """Append to what is the same however often a run was resumed."""
        together(lambda: self._write(0, line, line))

    def timing(self, line: dict[str, Any]) -> None:
        """Append to the wall-clock figures."""
        together(lambda: self._write(1, line, {"kind": "timing", **line}))

    def _write(self, file: int, line: dict[str, Any], shown: dict[str, Any]) -> None:
        self._files[file].write(line)
        if self._trackers is not None:
            self._trackers.log(shown)

    def point(self, step: int) -> ResumePoint:
        """Where the files are after ``step`` steps, all of it safe on the disk."""

        def synced() -> tuple[int, int, str]:
            metrics, timing = self._files
            return metrics.sync(), timing.sync(), metrics.sha256

        return ResumePoint(step, *together(synced))

    def close(self) -> None:
        for file in self._files:
            file.close()
        if self._trackers is not None:
            self._trackers.close()
