"""Studies as a page shows them: one name each, and texts of a plan that cannot act as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from satlens.errors import DataError
from satlens.report.collect import PLAN, Run, collect
from satlens.report.over_seeds import REFERENCE

# An underscore within a word emphasises nothing, and is common in names.
_MARKUP = re.compile(r"[<>*\[\]|`\\]|(?<!\w)_|_(?!\w)")


def studies(roots: Sequence[str | Path]) -> list[Run]:
    """What is under the folders of studies, for a page about all of them.

    Raises:
        DataError: no study, one given twice, two that cannot be told apart; a table that cannot
            be read; an arm whose name is none.
    """
    if not roots:
        raise DataError("findings: no study was given")
    places = [Path(root).resolve() for root in roots]
    for root, place in zip(roots, places, strict=True):
        if places.count(place) > 1:
            raise DataError(f"findings: {root} was given twice")
    runs = [collect(root) for root in roots]
    for run in runs:
        _check(run)
    names = Counter(run.name for run in runs)
    labels = [
        run.name if names[run.name] == 1 else f"{run.name} in {'/'.join(place.parts[-2:])}"
        for run, place in zip(runs, places, strict=True)
    ]
    for run, label in zip(runs, labels, strict=True):
        if labels.count(label) > 1:
            raise DataError(f"{run.root}: another study is called {label} too; rename its folder")
    return [_shown(run, label) for run, label in zip(runs, labels, strict=True)]


def _check(run: Run) -> None:
    """A page without a damaged table would pass for a whole one."""
    for each in run.missing:
        if each.reason.startswith("not readable") and each.name != "run.json":
            raise DataError(f"{run.root}: {each.name} is {each.reason}")
    for arm in run.arms:
        if len(arm.split()) != 1 or escaped(arm).replace("&#95;", "_") != arm:
            raise DataError(f"{run.root / PLAN}: arm {arm!r}: not the name of an arm")


def _shown(run: Run, name: str) -> Run:
    texts = {key: str(run.recipe[key]) for key in ("title", "corpus") if run.recipe.get(key)}
    shown = {key: escaped(text) for key, text in {**texts, "name": name}.items()}
    return replace(run, recipe={**run.recipe, **shown})


def escaped(text: str) -> str:
    """A text on one line whose characters stand for themselves in Markdown, also in a table."""
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", " ".join(text.split()))


def alike(runs: Sequence[Run]) -> set[str]:
    """Names of the studies that share an architecture with another one, the reference aside."""
    return {
        run.name
        for run in runs
        if any(_architectures(run) & _architectures(other) for other in runs if other is not run)
    }


def _architectures(run: Run) -> set[str]:
    return {run.variant(arm) for arm in run.arms} - {REFERENCE}
