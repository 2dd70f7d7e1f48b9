"""Folders that ship with satlens beside its modules: recipes and figure scripts. No torch."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def shipped_folder(name: str) -> Path:
    """``analyses`` or ``figures``: in the package, or beside it in a source tree."""
    installed = Path(str(files("satlens"))) / name
    return installed if installed.is_dir() else Path(__file__).parents[1] / name
