"""The zoo: one small trained model an architecture, shipped with the package.

``satlens.load("tiny/satformer")`` opens one, offline. They come from the recipe ``zoo``: trained
on the embedded corpus, one seed, equal budgets; ``make zoo`` rebuilds them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from satlens.errors import CheckpointError

PREFIX = "tiny/"
_FOLDER = Path(__file__).parents[1] / "zoo"


def zoo_names() -> list[str]:
    """Names that :func:`satlens.load` opens without a file or a network."""
    return [PREFIX + config.parent.name for config in sorted(_FOLDER.glob("*/config.json"))]


def zoo_entry(name: str) -> Path:
    """Folder of a zoo model.

    Raises:
        CheckpointError: no such model, naming those there are.
    """
    if name not in zoo_names():
        raise CheckpointError(f"{name}: the zoo has {', '.join(zoo_names()) or 'no models'}")
    return _FOLDER / name.removeprefix(PREFIX)


def replace_zoo(study: Path) -> list[str]:
    """Put the trained models of a study of the recipe ``zoo`` in place of the shipped ones.

    Args:
        study: folder of the finished study, one seed an arm.

    Raises:
        CheckpointError: a folder without trained models.
    """
    trained = sorted(study.glob("train/*/seed0/final"))
    if not trained:
        raise CheckpointError(f"{study}: has no train/*/seed0/final; run `satlens reproduce zoo`")
    with tempfile.TemporaryDirectory(dir=_FOLDER.parent, prefix=".zoo.") as draft:
        for folder in trained:
            shutil.copytree(folder, Path(draft) / folder.parents[1].name)
        for old in _FOLDER.glob("*/config.json"):
            shutil.rmtree(old.parent)
        for new in Path(draft).iterdir():
            new.rename(_FOLDER / new.name)
    return zoo_names()


if __name__ == "__main__":
    try:
        print("\n".join(replace_zoo(Path(sys.argv[1]))))
    except CheckpointError as error:
        sys.exit(f"satlens: error: {error}")
