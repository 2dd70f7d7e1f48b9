"""Where a checkpoint lies: a local folder, or a download of safetensors and JSON files."""

from __future__ import annotations

import re
from pathlib import Path

from satlens.checkpoints.files import CONFIG
from satlens.checkpoints.zoo import PREFIX, zoo_entry
from satlens.errors import CheckpointError

# Nothing that could run: no .bin, no .py.
_PATTERNS = ["*.safetensors", "*.json"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate(path: str | Path) -> Path:
    """The local folder of a checkpoint: given, of the zoo (``tiny/name``), or fetched from the
    Hugging Face hub (``org/name``).

    Raises:
        CheckpointError: no such folder, a file, or a download that failed.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / CONFIG).exists():
            inner = sorted(f.parent.name for f in folder.glob(f"*/{CONFIG}"))
            hint = f"; did you mean {folder / inner[0]}?" if inner else ""
            raise CheckpointError(f"{folder}: has no {CONFIG}{hint}")
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder}: is a file; a checkpoint is a folder with {CONFIG}")
    if isinstance(path, str) and path.startswith(PREFIX):
        return zoo_entry(path)
    if isinstance(path, str) and _HUB_ID.fullmatch(path):
        return _download(path)
    raise CheckpointError(f"{folder}: no such checkpoint folder")


def _download(name: str) -> Path:
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # the client raises its own, httpx's and the system's errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{name}: no such local folder, and not to be had from the Hugging Face hub ({reason})"
        ) from None
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"{name}: the repository has no {CONFIG}")
    return folder
