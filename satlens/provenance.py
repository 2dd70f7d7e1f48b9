"""Where a result comes from: checkpoint, data, code and command. Imports no torch.

Nothing here depends on the time of day, so the same run twice gives the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "satlens",
    "torch",
    "transformer-lens",
    "numpy",
    "scipy",
    "pandas",
    "spacy",
    "tokenizers",
)


def provenance(
    *,
    checkpoint: Mapping[str, Any] | None,
    data: Mapping[str, Any] | None,
    tokenizer: str | None,
    seed: int | None,
    n_documents: int,
    n_tokens: int,
    tagger: Mapping[str, Any] | None = None,
    dtype: object = None,
    attention: str | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """The record that accompanies a table, with the same keys in the same order every time.

    Args:
        checkpoint: facts about the weights, ``sha256`` among them; None for fresh weights.
        data: facts about the data, ``sha256`` among them (split, slice, window protocol ...).
        tokenizer: fingerprint of the tokenizer, None for data that came as token numbers.
        seed: seed of resampling and of anything else that is drawn.
        n_documents, n_tokens: how much was measured.
        tagger: ``name`` and ``version`` of the tagger, None where nothing was tagged.
        dtype: of the weights during the run, ``torch.float32`` or its name.
        attention: implementation of attention, such as ``sdpa`` or ``eager``.
        command: how the run was started, by default as typed.
    """
    return {
        "checkpoint": _with_sha256(checkpoint),
        "data": _with_sha256(data),
        "tokenizer": tokenizer,
        "tagger": None if tagger is None else dict(tagger),
        "seed": seed,
        "n_documents": n_documents,
        "n_tokens": n_tokens,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "attention": attention,
        "command": command_line(sys.argv) if command is None else command,
        "code": git_state(Path(__file__).parent),
        "python": platform.python_version(),
        "packages": package_versions(),
    }


def _with_sha256(facts: Mapping[str, Any] | None) -> dict[str, Any]:
    """The facts, with a null hash rather than none when it is unknown."""
    return {"sha256": None, **(facts or {})}


def command_line(argv: list[str]) -> str:
    """The command as typed, without the place where the program is installed.

    A notebook kernel has no command of its own: its arguments name a file of the session.
    """
    program = Path(argv[0]).name if argv and argv[0] else "python"
    if "ipykernel" in program or "kernel_launcher" in program:
        return "notebook"
    if program == "__main__.py":
        program = f"python -m {Path(argv[0]).parent.name}"
        return " ".join([program, shlex.join(argv[1:])]).strip()
    return shlex.join([program, *argv[1:]])


def package_versions() -> dict[str, str | None]:
    """Installed version of each of ``PACKAGES``, None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@functools.cache
def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that tracks the code in ``folder`` and whether it was changed.

    None for code that git does not track, such as an installed package, even when it lies inside
    somebody else's checkout.
    """
    tracked = _git(folder, "ls-files", "--error-unmatch", "--", "__init__.py")
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--", ".")
    if not tracked or not commit or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


@functools.cache
def source_sha256(*names: str) -> str:
    """SHA-256 over the names and contents of some of this package's modules and subpackages."""
    package = Path(__file__).parent
    files = {file for name in names for file in _sources(package / name)}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _sources(path: Path) -> list[Path]:
    return [path] if path.suffix else list(path.rglob("*.py"))


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None when it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=30,
            # Reading must not write to the user's index.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
