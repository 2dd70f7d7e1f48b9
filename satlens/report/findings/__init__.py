"""docs/findings.md: what the studies found, written from their tables.

    studies (plan.json, results/, figures/) -> findings.md, ledger.csv

The page has no number that is not in a table, and the same tables give the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from satlens.errors import DataError
from satlens.report.claims.ledger import counted, ledger, markdown, summary
from satlens.report.collect import Run
from satlens.report.effects import plain
from satlens.report.findings import costs, gates, losses, pictures, routes, study
from satlens.report.findings.phrases import rows_table
from satlens.report.findings.shown import alike
from satlens.report.findings.shown import studies as collected

TEMPLATE = "findings.md.j2"
Said = TypeVar("Said")
LEDGER = "ledger.csv"


def write_findings(studies: Sequence[str | Path], page: str | Path) -> tuple[Path, Path]:
    """Write the findings of studies as Markdown and the claims ledger beside it as CSV.

    Args:
        studies: their folders.
        page: where the Markdown goes; ``ledger.csv`` goes into the same folder.

    Raises:
        DataError: no study, one given twice, a folder that is none, a damaged table; a page that
            cannot be written.
    """
    page = Path(page)
    if page.is_dir():
        raise DataError(f"{page}: is a folder; name a file in it, such as {page / 'findings.md'}")
    texts = findings(studies, page)
    paths = (page, page.with_name(LEDGER))
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts, strict=True):
            waiting = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                waiting.write_text(text, encoding="utf-8", newline="\n")
                os.replace(waiting, path)
            finally:
                waiting.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{page}: cannot be written: {error.strerror}") from error
    return paths


def findings(studies: Sequence[str | Path], page: Path) -> tuple[str, str]:
    """The page (whose figures are linked from ``page``) and the ledger, as text."""
    runs = collected(studies)
    drawn = [(run, pictures.drawn(run, page)) for run in runs]
    claimed = ledger(runs)
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template(TEMPLATE)
    text = template.render(
        runs=runs,
        study=study,
        losses=losses,
        costs=costs,
        alike=alike(runs),
        answers={
            "gates": _said(runs, gates.gates),
            "routes": _said(runs, routes.roles) + _said(runs, routes.controls),
            "mixtures": _said(runs, routes.routes),
            "streams": _said(runs, routes.components) + _said(runs, routes.ways),
            "mass": _said(runs, costs.mass_and_cause),
            "cost": _said(runs, costs.costs),
        },
        tables={
            "gates": rows_table(_each(runs, gates.rows)),
            "routes": rows_table(_each(runs, routes.rows)),
            "streams": rows_table(_each(runs, routes.rows_of_components)),
            "mass": rows_table(_each(runs, costs.mass_rows)),
        },
        pictures={name: pictures.of_section(name, drawn) for name in pictures.SECTIONS},
        nulls=_said(runs, losses.nulls) + _said(runs, costs.nulls),
        others=pictures.rest(drawn),
        counted=counted(claimed),
        summary=summary(claimed),
        ledger=markdown(claimed),
        sizes=study.parameters_of(runs),
        millions=lambda number: plain(number / 1e6, 1),
    )
    # Nine digits: what two machines differ in lies behind them.
    table = claimed.table.to_csv(index=False, lineterminator="\n", float_format="%.9g")
    return _tidy(text), table


def _each(runs: Sequence[Run], answer: Callable[[Run], list[Said]]) -> list[Said]:
    """The answers of every study, below each other."""
    return [each for run in runs for each in answer(run)]


def _said(runs: Sequence[Run], answer: Callable[[Run], list[str]]) -> list[str]:
    """The sentences of every study, with its name where another one could have said the same."""
    several = alike(runs)

    def named(run: Run, text: str) -> str:
        told_apart = run.name not in several or f"study `{run.name}`" in text
        return text if told_apart else f"Study `{run.name}`: {text}"

    return [named(run, text) for run in runs for text in answer(run)]


def _tidy(text: str) -> str:
    """No blank line twice, none at the end, no spaces at ends of lines."""
    lines: list[str] = []
    for line in (line.rstrip() for line in text.splitlines()):
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).rstrip("\n") + "\n"
