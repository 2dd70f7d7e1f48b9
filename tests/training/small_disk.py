"""A disk that fills up and can be write-protected, for root, too."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from forked import Forked

REFUSED = 77
"""Exit status of a process that may not mount anything."""


class Disk:
    """A small disk in memory that this process alone sees, mounted on a folder.

    Args:
        folder: made if it is missing; what lies there is hidden.
    """

    _READ_ONLY, _REMOUNT, _PRIVATE = 1, 32, 1 << 18 | 1 << 14
    _MOUNTS, _USERS = 0x20000, 0x10000000

    def __init__(self, folder: Path, size: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._libc = folder, ctypes.CDLL(None)
        if self._libc.unshare(self._MOUNTS | (self._USERS if os.geteuid() else 0)):
            raise SystemExit(REFUSED)
        private = self._mount(None, "/", self._PRIVATE, None)
        if not private or not self._mount("tmpfs", str(folder), 0, f"size={size}"):
            raise SystemExit(REFUSED)

    def _mount(self, kind: str | None, where: str, flags: int, options: str | None) -> bool:
        texts = (text if text is None else text.encode() for text in (kind, where, kind))
        data = options if options is None else options.encode()
        return self._libc.mount(*texts, ctypes.c_ulong(flags), data) == 0

    def unmount(self) -> None:
        """Show again what it hides."""
        assert self._libc.umount(str(self.folder).encode()) == 0

    def fill(self) -> None:
        """Leave no room."""
        with suppress(OSError), (self.folder / "filling").open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))

    def resize(self, size: str) -> None:
        """Make it larger."""
        assert self._mount(None, str(self.folder), self._REMOUNT, f"size={size}")

    def protect(self, on: bool) -> None:
        """Refuse or allow writing, whoever asks."""
        flags = self._REMOUNT | (self._READ_ONLY if on else 0)
        assert self._mount(None, str(self.folder), flags, None)


def may_mount(folder: Path) -> bool:
    """Whether disks can be had here."""
    if sys.platform != "linux":
        return False
    return Forked(lambda: Disk(folder / "disk", "8k"), folder / "disk.txt").outcome().status == 0


def in_a_process(body: Callable[[], object], log: Path) -> None:
    """Run a body that mounts disks in a process of its own."""
    if sys.platform != "linux":
        pytest.skip("mounts")
    status, said = Forked(body, log).outcome()
    if status == REFUSED:
        pytest.skip("no disk may be mounted here")
    assert status == 0, said
