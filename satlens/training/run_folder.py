"""The folder of a run: what is in it, who may write it, and whether it is finished.

run.json            resolved configs, identity of data and tokenizer, plan, environment
metrics.jsonl       training and evaluation lines, the same bytes however often it was resumed
timing.jsonl        wall-clock figures of the same steps, which differ from run to run
milestones/<tokens> checkpoints kept for good
resume/<step>       resumable state (see satlens.training.resume), removed at the end
final               the final checkpoint
finished.json       written last: the outcome and the SHA-256 of every file above but timing
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from satlens.checkpoints.files import file_sha256, json_bytes, read_json
from satlens.errors import CheckpointError, ConfigError
from satlens.locking import locked

FORMAT = "satlens-run"
VERSION = 1
RUN_FILE = "run.json"
FINISHED_FILE = "finished.json"
LOCK_FILE = ".lock"
IDENTITY = ("model", "train", "data", "evaluation", "device")
"""Parts of run.json that make two runs the same run."""


class RunFolder:
    """Paths and bookkeeping of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run = self.path / RUN_FILE
        self.metrics = self.path / "metrics.jsonl"
        self.timing = self.path / "timing.jsonl"
        self.milestones = self.path / "milestones"
        self.resume = self.path / "resume"
        self.final = self.path / "final"
        self.finished = self.path / FINISHED_FILE

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writers out; the lock ends with this process, however it ends.

        Raises:
            CheckpointError: another process is writing this run, or the folder cannot be made.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / LOCK_FILE).touch()
        with locked(self.path / LOCK_FILE, str(self.path), error=CheckpointError):
            yield

    def begin(self, record: dict[str, Any]) -> dict[str, Any]:
        """Write run.json, or check that the one there is of the same run.

        Returns:
            The record on disk (its environment is that of the first start).

        Raises:
            ConfigError: another run lives here; names the first field that differs.
            CheckpointError: run.json is damaged, or outputs lie here without one.
        """
        record = json.loads(json.dumps({"format": FORMAT, "version": VERSION, **record}))
        if not self.run.exists():
            for path in (self.metrics, self.milestones, self.resume, self.final):
                if path.exists():
                    raise CheckpointError(
                        f"{path}: exists without {RUN_FILE}: not a run of satlens"
                    )
            write_json(self.run, record)
            return record
        found = read_run(self.path)
        for field, here, wanted in differences(found, record):
            raise ConfigError(
                f"{self.run}: {field}: this run has {here!r}, not {wanted!r}; "
                "choose another folder or remove this one"
            )
        return found

    def outcome(self, note: Callable[[str], None]) -> dict[str, Any] | None:
        """What finished.json says, or None if the run is not finished or was changed since."""
        if not self.finished.exists():
            return None
        outcome = read_json(self.finished)
        for name, digest in outcome.get("files", {}).items():
            file = self.path / name
            if not file.is_file() or file_sha256(file) != digest:
                note(f"{file}: missing or changed since the run ended; training again")
                return None
        return outcome

    def finish(self, outcome: dict[str, Any]) -> None:
        """Mark the run as finished and drop its resumable state."""
        files = [self.run, self.metrics]
        for folder in (self.milestones, self.final):
            files += sorted(path for path in folder.rglob("*") if path.is_file())
        digests = {str(file.relative_to(self.path)): file_sha256(file) for file in files}
        write_json(self.finished, {**outcome, "files": digests})
        remove_tree(self.resume)

    def tidy(self) -> None:
        """Remove what a process left that was killed while it wrote; call it under the lock."""
        with writing(self.path):
            for folder in (self.path, self.milestones, self.resume):
                for leftover in folder.glob(".*"):
                    if leftover.is_dir():
                        shutil.rmtree(leftover)
                    elif leftover.name != LOCK_FILE:
                        leftover.unlink()

    def clear(self) -> None:
        """Remove every output, the marker first; run.json stays."""
        with writing(self.path):
            self.finished.unlink(missing_ok=True)
            for folder in (self.final, self.milestones, self.resume):
                remove_tree(folder)
            for file in (self.metrics, self.timing):
                file.unlink(missing_ok=True)


def read_run(path: str | Path) -> dict[str, Any]:
    """run.json of a run folder.

    Raises:
        CheckpointError: missing, damaged or of a newer version.
    """
    file = Path(path) / RUN_FILE
    record = read_json(file)
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{file}: format: {FORMAT!r} expected, got {record.get('format')!r}")
    if record.get("version") != VERSION:
        raise CheckpointError(
            f"{file}: version: {record.get('version')!r}, this satlens reads {VERSION}"
        )
    return record


def differences(
    first: dict[str, Any], second: dict[str, Any], parts: tuple[str, ...] = IDENTITY
) -> Iterator[tuple[str, Any, Any]]:
    """Dotted fields in which two records differ, with both values (None where absent)."""
    for part in parts:
        yield from _differences(part, first.get(part), second.get(part))


def _differences(name: str, first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys((*second, *first)):
            yield from _differences(f"{name}.{key}", first.get(key), second.get(key))
    elif first != second:
        yield name, first, second


# -- writing -----------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk, a read-only folder and the like into one line.

    Raises:
        CheckpointError: the body failed to write.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror or error})") from None


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a whole file or nothing.

    Raises:
        CheckpointError: it cannot be written.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    with writing(file):
        try:
            with temporary.open("wb") as stream:
                stream.write(json_bytes(content, file.name))
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
        descriptor = os.open(file.parent, os.O_RDONLY)  # the rename, too, survives a power cut
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a folder so that nobody sees half of it: renamed first."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.old")
        with writing(path):
            if doomed.exists():
                shutil.rmtree(doomed)
            os.rename(path, doomed)
            shutil.rmtree(doomed)
