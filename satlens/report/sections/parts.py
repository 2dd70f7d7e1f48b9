"""Parts of sections: what is said of a checkpoint, the figure and the tables of its results."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from satlens.analysis.result import Result
from satlens.plotting import figure_for
from satlens.report import words
from satlens.report.collect import Run
from satlens.report.effects import Finding, capital, heading
from satlens.report.page.layout import Part, Picture, Section, picture
from satlens.report.page.tables import Link, Table, result_table
from satlens.report.sections.captions import caption

Say = Callable[[str, int, Result], list[Finding]]
Headline = Callable[[str, dict[int, Result]], list[Finding]]


def by_arm(
    run: Run,
    name: str,
    title: str,
    notes: list[Finding],
    say: Say,
    headline: Headline,
) -> Section | None:
    """A section with a part for every arm and seed that has the result.

    Args:
        name: of the analysis, which is the id of the section.
        notes: caveats that stand at its head.
        say: sentences about one checkpoint.
        headline: sentences about all seeds of an arm.

    Returns:
        None where nobody has the result, nor should have it.
    """
    found = run.of(name)
    absent = [m for m in run.missing if m.name == name]
    if not found and not absent:
        return None
    section = Section(name, title, caveats=list(notes))
    for arm, results in found.items():
        across = headline(arm, results)
        section.headlines += across
        nested = len(results) > 1 and bool(across)
        if nested:
            section.parts.append(Part(arm, across))
        for number, (seed, result) in enumerate(results.items()):
            part = of_seed(run, result, arm, seed, say(arm, seed, result))
            part.folded, part.nested = number > 0, nested
            section.parts.append(part)
    if absent:
        section.parts.append(Part("Not measured", words.missing(absent)))
    return section


def of_seed(run: Run, result: Result, arm: str, seed: int, findings: list[Finding]) -> Part:
    """What is said of one checkpoint, its figure, its tables."""
    title, folder = heading(arm, seed), run.folder(arm, seed)
    part = Part(title, findings)
    if len(result.table):
        part.figures.append(figure_of(run, result, folder, f"{capital(result.name)} of {title}"))
    part.tables += tables_of(run, result, folder, title)
    return part


def figure_of(run: Run, result: Result, folder: Path, title: str) -> Picture:
    """The figure of a result in ``folder``, with links to its files beside the page."""
    parts = {part.name: part.table for part in result.parts}
    figure = figure_for(result.name, result.table, result.summary, parts)
    text = f"{title}. {caption(result)}".rstrip()
    return picture(figure, title, text, text, _links(run, folder, result.name, ("png", "pdf")))


def tables_of(run: Run, result: Result, folder: Path, whose: str) -> list[Table]:
    """The table of a result and those of its parts, each with its download."""
    return [
        table_of(run, each, folder, f"{each.name.replace('_', ' ')} of {whose}", f"{whose}-")
        for each in (result, *result.parts)
    ]


def table_of(run: Run, result: Result, folder: Path, title: str, prefix: str = "") -> Table:
    """One table; ``prefix`` tells its download from those of other checkpoints."""
    return result_table(result, title, prefix, _links(run, folder, result.name, ("csv", "json")))


def _links(run: Run, folder: Path, name: str, kinds: tuple[str, ...]) -> tuple[Link, ...]:
    """Files of a result at or below the page's own folder, relative to it."""
    if run.page is None:
        return ()
    files = [folder / f"{name}.{kind}" for kind in kinds]
    base = run.page.resolve()
    return tuple(
        (file.name, Path(os.path.relpath(file.resolve(), base)).as_posix())
        for file in files
        if file.exists() and file.resolve().is_relative_to(base)
    )
