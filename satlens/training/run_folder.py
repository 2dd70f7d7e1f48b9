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
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from satlens.checkpoints.files import file_sha256, json_bytes, read_json
from satlens.config import EXECUTION
from satlens.errors import CheckpointError, ConfigError
from satlens.locking import locked

FORMAT = "satlens-run"
VERSION = 1
RUN_FILE = "run.json"
FINISHED_FILE = "finished.json"
LOCK_FILE = ".lock"
IDENTITY = ("model", "train", "data", "evaluation", "device")
"""Parts of run.json that make two runs the same run, but for how steps are computed."""
# Drafts of satlens.checkpoints.files.new_folder, and what write_json and remove_tree rename.
_UNFINISHED = re.compile(
    r"\.(run|finished)\.json\.tmp"
    r"|\.(final|milestones|resume|\d+)(\.\d+-[0-9a-f]{8})?\.(partial|old)"
)
Resume = Literal["auto", "never", "must"]


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

    def expect(self, resume: Resume) -> None:
        """Refuse a folder in which a run may not begin, or not go on.

        Raises:
            ConfigError: no such way to resume.
            CheckpointError: ``never`` and there is a run, or ``must`` and there is none.
        """
        if resume not in get_args(Resume):
            raise ConfigError(f"resume: {resume!r} is none of {', '.join(get_args(Resume))}")
        there = self.run.exists()
        if there and resume == "never":
            raise CheckpointError(f"{self.path}: holds a run already (resume never)")
        if not there and resume == "must":
            raise CheckpointError(f"{self.path}: holds no run to go on with (resume must)")

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
        self.require_same(record)
        return read_run(self.path)

    def require_same(self, record: dict[str, Any], parts: tuple[str, ...] = IDENTITY) -> None:
        """Refuse a folder that holds another run, as far as ``parts`` of its record tell.

        Raises:
            ConfigError: names the first field that differs.
            CheckpointError: run.json is damaged.
        """
        if not self.run.exists():
            return
        record = json.loads(json.dumps(record))
        for field, here, wanted in differences(read_run(self.path), record, parts):
            if field.startswith("train.") and field.split(".")[1] in EXECUTION:
                continue
            raise ConfigError(
                f"{self.run}: {field}: this run has {here!r}, not {wanted!r}; "
                "choose another folder or remove this one"
            )

    def outcome(self) -> dict[str, Any] | None:
        """What finished.json says, or None if the run is not finished.

        Raises:
            CheckpointError: a file that it lists is missing or was changed. Nothing is made again
                by itself: the other files may be a month of work.
        """
        if not self.finished.exists():
            return None
        outcome = read_json(self.finished)
        files = outcome.get("files")
        if not isinstance(files, dict) or not files:
            raise CheckpointError(f"{self.finished}: files: missing or empty")
        for name, digest in files.items():
            file = self.path / name
            if not file.is_file() or file_sha256(file) != digest:
                raise CheckpointError(
                    f"{file}: missing or changed since the run ended; bring it back, or remove "
                    f"{self.path} to train again"
                )
        return outcome

    def require_in_place(self) -> None:
        """Refuse to go on writing where the run is no more.

        Raises:
            CheckpointError: the folder was moved, removed or replaced while the run wrote.
        """
        if not self.run.exists() or not (self.path / LOCK_FILE).exists():
            raise CheckpointError(f"{self.path}: was moved or removed while the run was writing it")

    def finish(self, outcome: dict[str, Any]) -> None:
        """Mark the run as finished and drop its resumable state."""
        files = [self.run, self.metrics]
        for folder in (self.milestones, self.final):
            files += sorted(path for path in folder.rglob("*") if path.is_file())
        digests = {str(file.relative_to(self.path)): file_sha256(file) for file in files}
        write_json(self.finished, {**outcome, "files": digests})
        remove_tree(self.resume)

    def tidy(self) -> None:
        """Remove what a process left that was killed while it wrote; call it under the lock.

        Only what has a name that satlens gives to unfinished files: a run may lie in a folder with
        hidden things of its owner's.
        """
        with writing(self.path):
            for folder in (self.path, self.milestones, self.resume):
                for leftover in folder.glob(".*"):
                    if not _UNFINISHED.fullmatch(leftover.name):
                        continue
                    if leftover.is_dir():
                        shutil.rmtree(leftover)
                    else:
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
