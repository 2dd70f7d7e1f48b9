"""``manifest.json``: the SHA-256 of every file of a satlens checkpoint.

safetensors does not notice flipped bits; this does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from satlens.checkpoints.files import (
    CONFIG,
    TOKENIZER,
    TRAINING,
    file_sha256,
    json_bytes,
    plain_name,
    read_json,
)
from satlens.errors import CheckpointError

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """List every file of a folder that is being written."""
    files = {file.name: file_sha256(file) for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_bytes(json_bytes({"files": files}, MANIFEST))


def verify(folder: Path, weights: Sequence[Path]) -> dict[str, str]:
    """Check every file against the manifest.

    Returns:
        SHA-256 by file name.

    Raises:
        CheckpointError: no manifest; a file that it lacks, that is missing or that was altered; a
            name that leaves the folder.
    """
    where = folder / MANIFEST
    entries = read_json(where).get("files")
    if not isinstance(entries, dict):
        raise CheckpointError(f"{where}: files: missing")
    for name in entries:
        plain_name(name, f"{where}: files")
    optional = [name for name in (TOKENIZER, TRAINING) if (folder / name).exists()]
    for name in (CONFIG, *(file.name for file in weights), *optional):
        if name not in entries:
            raise CheckpointError(f"{where}: files: {name} is not listed")
    for name, expected in entries.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: is missing, but {MANIFEST} lists it")
        if file_sha256(folder / name) != expected:
            raise CheckpointError(
                f"{folder / name}: sha256 differs from {MANIFEST}: the file is damaged or altered"
            )
    return dict(entries)
