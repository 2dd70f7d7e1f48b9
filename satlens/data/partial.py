"""The hidden folder beside a prepared corpus in which it is made: ``.OUT.partial``.

lock            held by the process that writes
alive           held by its workers
options.json    what the parts were made with: another source or option begins anew
read/           first reading of the pieces (satlens.data.pieces)
tokenizer.json  once it is trained
tokens/         tokenised pieces
shards/         records of the shards
data/           what OUT will be; moved there when complete
old/            what OUT was, for the moment of the move
finished.json   the options and the manifest of what was moved to OUT
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from satlens.data.jobs import sync, wait_for_others, write_json
from satlens.data.manifest import MANIFEST_FILE
from satlens.data.pieces import UnfinishedError
from satlens.data.tokenizers import TOKENIZER_FILE
from satlens.errors import DataError
from satlens.locking import locked

Note = Callable[[str], None]
_OPTIONS, _FINISHED, _LOCK, _ALIVE = "options.json", "finished.json", "lock", "alive"


class Partial:
    """The parts of a corpus in preparation; made by :func:`partial`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.parent / f".{out.name}.partial"
        self.read, self.tokens = self.folder / "read", self.folder / "tokens"
        self.shards, self.data = self.folder / "shards", self.folder / "data"
        self.tokenizer = self.folder / TOKENIZER_FILE
        self.alive = self.folder / _ALIVE
        self._old = self.folder / "old"

    def is_finished(self, options: dict[str, Any]) -> bool:
        """Whether OUT was made here with these options: the move was the last thing done."""
        made = _read(self.folder / _FINISHED)
        there = _read(self.out / MANIFEST_FILE)
        return made is not None and made == {"options": options, "manifest": there}

    def begin(self, options: dict[str, Any], note: Note) -> None:
        """Keep the parts that were made with the same options, else clear them away."""
        if self._old.is_dir() and not self.out.exists():  # half a move
            os.rename(self._old, self.out)
        before = _read(self.folder / _OPTIONS)
        if before == options and self.data.is_dir():
            n_done = sum(1 for place in (self.read, self.tokens) for _ in place.glob("*.json"))
            note(f"{self.out}: goes on from an interrupted preparation ({n_done} parts are done)")
        elif before not in (None, options):
            changed = sorted(k for k in before | options if before.get(k) != options.get(k))
            note(f"{self.out}: begins anew: changed since it was interrupted: {', '.join(changed)}")
        # Without ``data`` it was moved to OUT, which is gone; parts may be half removed.
        if before != options or not self.data.is_dir():
            self._clear()
            write_json(self.folder / _OPTIONS, options)
        for place in (self.read, self.tokens, self.shards, self.data):
            place.mkdir(exist_ok=True)

    def publish(self, options: dict[str, Any], manifest: dict[str, Any], overwrite: bool) -> None:
        """Complete ``data`` with the manifest and move it to OUT; what is there may be replaced."""
        write_json(self.data / MANIFEST_FILE, manifest)
        sync(self.data)
        write_json(self.folder / _FINISHED, {"options": options, "manifest": manifest})
        if overwrite and self.out.is_dir() and any(self.out.iterdir()):
            os.rename(self.out, self._old)
        os.rename(self.data, self.out)  # fails if there is anything in OUT
        sync(self.out.parent)

    def has_begun(self) -> bool:
        """Whether there may be parts of a preparation."""
        return (self.folder / _OPTIONS).exists()

    def remove(self) -> None:
        """Remove the folder."""
        self._clear()
        shutil.rmtree(self.folder)

    def _clear(self) -> None:
        """Remove the parts: first what makes them count, last what tells that OUT is finished."""
        (self.folder / _OPTIONS).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (_LOCK, _ALIVE, _FINISHED):
                path.unlink()
        (self.folder / _FINISHED).unlink(missing_ok=True)


@contextmanager
def partial(out: Path) -> Iterator[Partial]:
    """Hold the hidden folder of OUT alone.

    It is removed when the work is done and after bad input. After anything else (a signal, a full
    disk, a source that cannot be reached) it stays, and the same command goes on from it.

    Raises:
        DataError: another process has it, or the system refuses; bad input.
    """
    parts = Partial(out)
    try:
        parts.folder.mkdir(parents=True, exist_ok=True)
        with locked(parts.folder / _LOCK, str(out), error=DataError):
            if not (parts.folder / _LOCK).exists():
                raise UnfinishedError(f"{out}: another process has just written it")
            wait_for_others(parts.alive)
            try:
                yield parts
            except UnfinishedError:
                raise
            except DataError:
                parts.remove()
                raise
            parts.remove()
    except OSError as error:
        reason = f"{out}: cannot be written ({error.strerror or error})"
        if not parts.has_begun():
            shutil.rmtree(parts.folder, ignore_errors=True)
            raise DataError(reason) from None
        raise UnfinishedError(
            f"{reason}; what is done lies in {parts.folder.name}, the same command goes on from it"
        ) from None


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
