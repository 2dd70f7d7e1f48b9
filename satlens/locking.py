"""Locks on folders that one process at a time may write. Imports no torch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from satlens.errors import SatlensError

_held: set[int] = set()
"""Descriptors of the locks of this process."""


def _forget() -> None:
    """A forked child, which may outlive a process that is killed, does not keep its locks."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def locked(
    file: Path, what: str, *, shared: bool = False, error: type[SatlensError] = SatlensError
) -> Iterator[None]:
    """Hold a lock file; the lock ends with this process, however it ends.

    Args:
        file: made where it is missing; holds the id of the process that has it alone.
        what: what is being written, for the message.
        shared: others may share it, as long as nobody has it alone.

    Raises:
        SatlensError: (or ``error``) another process has it.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            raise error(
                f"{what}: process {holder or 'unknown'} is writing this run; "
                "wait for it or choose another folder"
            ) from None
        if not shared:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        _held.add(descriptor)
        yield
    finally:
        _held.discard(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
