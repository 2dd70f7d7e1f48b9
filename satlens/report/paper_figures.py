"""Figures of papers, drawn from the tables of a study by the scripts in ``figures/``.

    tables of a study -> NAME.pdf, NAME.png, NAME.csv (every plotted value), NAME.json (sidecar)

A script is a module with a docstring whose first line is the figure's title, ``SOURCE`` (the paper
that has such a figure) and ``draw(run) -> Drawing``. It reads tables alone: the same tables give
the same bytes. The sidecar says where every table came from: checkpoint and data sha256, command,
versions, seed and the commit that made it; PDF and PNG carry the same facts as metadata.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from satlens import __version__
from satlens.analysis.result import Result
from satlens.errors import SatlensError
from satlens.plotting import FORMATS, picture_bytes
from satlens.report.collect import Run, collect
from satlens.shipped import shipped_folder

FOLDER = "figures"
DRAWN_WITH = ("matplotlib", "numpy", "pandas", "seaborn")
Progress = Callable[[str, int, int], None]


class NotDrawnError(SatlensError):
    """A study lacks what a figure shows; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One figure before it is written."""

    figure: Figure
    plotted: pd.DataFrame
    """Every plotted value, a row a mark: what it is, its value, and ``low``, ``high`` where it has
    an interval."""
    tables: Sequence[Result]
    """What it was drawn from, as found in the run."""
    caption: str
    """What is shown: units, what intervals cover, number of seeds; no claim about the outcome."""


class Drawn(NamedTuple):
    """What became of one script."""

    name: str
    files: tuple[Path, ...]
    """Empty where the figure was not drawn."""
    reason: str
    """Why it was not drawn."""
    error: Exception | None = None
    """What stopped the script, where the study has its tables and it failed all the same."""


@dataclass(frozen=True)
class Script:
    """One of the scripts."""

    path: Path
    module: ModuleType = field(repr=False)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def title(self) -> str:
        return (self.module.__doc__ or self.name).strip().splitlines()[0].rstrip(".")


def of_variant(run: Run, analysis: str, variant: str) -> tuple[str, dict[int, Result]]:
    """The first arm of a variant that has an analysis, and its results by seed.

    Raises:
        NotDrawnError: there is none.
    """
    for arm, seeds in run.of(analysis).items():
        if run.variant(arm) == variant:
            return arm, seeds
    raise NotDrawnError(f"needs the {analysis} of an arm of variant {variant}")


def scripts(only: Sequence[str] = ()) -> list[Script]:
    """The scripts, in the order of their names.

    Raises:
        SatlensError: ``only`` names one that does not exist.
    """
    paths = {path.stem: path for path in sorted(shipped_folder("figures").glob("*.py"))}
    for name in only:
        if name not in paths:
            raise SatlensError(f"--only {name}: no such figure; there are {', '.join(paths)}")
    return [_load(path) for name, path in paths.items() if not only or name in only]


def _load(path: Path) -> Script:
    spec = importlib.util.spec_from_file_location(f"satlens_figure_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SatlensError(f"{path}: not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Script(path, module)


def draw_figures(
    study: str | Path,
    out: str | Path | None = None,
    *,
    only: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[Drawn]:
    """Draw every figure that a study has the tables for.

    A script that fails costs its own figure alone: its sidecar says why there is no picture.

    Args:
        study: its folder.
        out: where the files go; by default ``figures`` in the study.
        only: names of figures; all where empty.

    Raises:
        SatlensError: no such study or figure; a figure named in ``only`` that cannot be drawn; a
            table that cannot be read, since a figure without it would pass for a whole one; a
            folder that cannot be written.
    """
    run = collect(study)
    for each in run.missing:
        if each.reason.startswith("not readable") and each.name != "run.json":
            raise SatlensError(f"{run.root}: {each.name} is {each.reason}")
    folder = run.root / FOLDER if out is None else Path(out)
    chosen = scripts(only)
    drawn = []
    for done, script in enumerate(chosen):
        if progress is not None:
            progress(script.name, done, len(chosen))
        try:
            contents = _contents(script, script.module.draw(run), run)
        except NotDrawnError as reason:
            if only:
                raise NotDrawnError(f"{script.name}: {reason}") from None
            _remove(script, folder)
            drawn.append(Drawn(script.name, (), str(reason)))
        except Exception as error:
            why = " ".join(f"cannot be drawn: {type(error).__name__}: {error}".split())
            if only:
                raise SatlensError(f"{script.name}: {why}") from error
            _remove(script, folder)
            facts = {"figure": script.name, "title": script.title, "failed": why}
            _write(script, {f"{script.name}.json": _sidecar(facts)}, folder)
            drawn.append(Drawn(script.name, (), why, error))
        else:
            drawn.append(Drawn(script.name, _write(script, contents, folder), ""))
    if progress is not None:
        progress("figures", len(chosen), len(chosen))
    return drawn


def _contents(script: Script, drawing: Drawing, run: Run) -> dict[str, bytes]:
    """The files of a figure by name."""
    facts = _facts(script, drawing, run)
    text = io.StringIO()
    drawing.plotted.to_csv(text, index=False, lineterminator="\n")
    contents = {f"{script.name}.csv": text.getvalue().encode()}
    about = json.dumps(facts, separators=(",", ":"))
    for kind in FORMATS:
        picture = picture_bytes(drawing.figure, kind, title=script.title, about=about)
        contents[f"{script.name}.{kind}"] = picture
    written = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(contents.items())}
    contents[f"{script.name}.json"] = _sidecar({**facts, "files": written})
    return contents


def _sidecar(facts: dict[str, Any]) -> bytes:
    return (json.dumps(facts, indent=1) + "\n").encode()


def _remove(script: Script, folder: Path) -> None:
    """Take away what was drawn from other tables."""
    kinds = (*FORMATS, "csv", "json") if folder.is_dir() else ()
    for kind in kinds:
        (folder / f"{script.name}.{kind}").unlink(missing_ok=True)


def _write(script: Script, contents: dict[str, bytes], folder: Path) -> tuple[Path, ...]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            temporary = folder / f".{name}.{os.getpid()}.tmp"
            temporary.write_bytes(data)
            os.replace(temporary, folder / name)
    except OSError as error:
        raise SatlensError(f"{folder}: cannot write {script.name}: {error.strerror}") from error
    return tuple(folder / name for name in contents)


def _facts(script: Script, drawing: Drawing, run: Run) -> dict[str, Any]:
    """What the sidecar and the files' metadata say."""
    return {
        "figure": script.name,
        "title": script.title,
        "source": script.module.SOURCE,
        "caption": drawing.caption,
        "command": f"satlens figures {run.name} --only {script.name}",
        "drawn_with": {
            "satlens": __version__,
            **{name: metadata.version(name) for name in DRAWN_WITH},
        },
        "tables": [_table_facts(result, run) for result in drawing.tables],
    }


def _table_facts(result: Result, run: Run) -> dict[str, Any]:
    """Where a table came from."""
    facts = result.provenance
    return {
        "table": run.place(result),
        "csv_sha256": hashlib.sha256(result.csv()).hexdigest(),
        "checkpoint": facts.get("checkpoint"),
        "data_sha256": (facts.get("data") or {}).get("sha256"),
        "seed": facts.get("seed"),
        "command": facts.get("command"),
        "code": facts.get("code"),
        "packages": facts.get("packages"),
    }
