"""Answers to requests, kept in a file as they are found, so that a killed evaluation continues.

A folder may hold the answers of many models: a file's name begins with the hash of everything that
decides them, which its first line spells out. Every further line is one answer. Processes that
share an evaluation write a file each and read all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from satlens.errors import DataError
from satlens.locking import locked

_VERSION = 1


class Answers:
    """Answers by the hash of their request.

    Args:
        known: those that are there.
        file: where further ones are appended; None keeps them in memory only.
    """

    def __init__(self, known: dict[str, Any] | None = None, file: BinaryIO | None = None) -> None:
        self._known = {} if known is None else known
        self._file = file

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, answers: Mapping[str, Any]) -> None:
        """Keep answers (ready for JSON), those already known as they are."""
        new = {key: answer for key, answer in answers.items() if key not in self._known}
        self._known |= new
        if self._file is None or not new:
            return
        lines = (_line({"request": key, "answer": answer}) for key, answer in new.items())
        self._file.write(b"".join(lines))
        self._file.flush()


@contextmanager
def open_answers(
    folder: str | Path | None, identity: Mapping[str, Any], rank: int = 0
) -> Iterator[Answers]:
    """The answers that a folder holds of one model and protocol, to read and to add to.

    Args:
        folder: made where it is missing; None keeps answers in memory only.
        identity: everything that decides an answer beside its request, ready for JSON.
        rank: of this process among those that share the evaluation.

    Raises:
        DataError: a damaged file; another process writes to it.
    """
    if folder is None:
        yield Answers()
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    header = _line({"satlens_answers": _VERSION, "identity": identity})
    key = hashlib.sha256(header).hexdigest()[:16]
    own = folder / f"{key}-{rank}.jsonl"
    with locked(own.with_suffix(".lock"), str(own), error=DataError):
        known: dict[str, Any] = {}
        for file in sorted(folder.glob(f"{key}-*.jsonl")):
            known |= _read(file, header)
        with own.open("ab") as target:
            # A kill can leave half a line, which further answers must not join.
            target.truncate(_complete(own.read_bytes()))
            if target.seek(0, 2) == 0:
                target.write(header)
                target.flush()
            yield Answers(known, target)


def _read(file: Path, header: bytes) -> dict[str, Any]:
    """Answers of a file; half a line at its end is left out."""
    content = file.read_bytes()
    lines = content[: _complete(content)].splitlines(keepends=True)
    if lines and lines[0] != header:
        raise DataError(f"{file}: line 1: not what this evaluation wrote; remove the file")
    known = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            entry = json.loads(line)
            known[entry["request"]] = entry["answer"]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{file}: line {number}: not an answer; remove the file") from None
    return known


def _complete(content: bytes) -> int:
    """Bytes up to the end of the last whole line."""
    return content.rfind(b"\n") + 1


def _line(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, allow_nan=False).encode() + b"\n"
