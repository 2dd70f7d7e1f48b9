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
from satlens.report.collect import Run, collect
from satlens.report.effects import plain
from satlens.report.findings import costs, gates, losses, pictures, routes, study
from satlens.report.findings.phrases import rows_table
from satlens.report.ledger import counted, ledger, markdown, summary

TEMPLATE = "findings.md.j2"
Said = TypeVar("Said")
LEDGER = "ledger.csv"


def write_findings(studies: Sequence[str | Path], page: str | Path) -> tuple[Path, Path]:
    """Write the findings of studies as Markdown and the claims ledger beside it as CSV.

    Args:
        studies: their folders.
        page: where the Markdown goes; ``ledger.csv`` goes into the same folder.

    Raises:
        DataError: no study, or a folder that is none; a page that cannot be written.
    """
    page = Path(page)
    texts = findings(studies, page)
    paths = (page, page.with_name(LEDGER))
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts, strict=True):
            waiting = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            waiting.write_text(text, encoding="utf-8", newline="\n")
            os.replace(waiting, path)
    except OSError as error:
        raise DataError(f"{page}: cannot be written: {error.strerror}") from error
    return paths


def findings(studies: Sequence[str | Path], page: Path) -> tuple[str, str]:
    """The page (whose figures are linked from ``page``) and the ledger, as text."""
    if not studies:
        raise DataError("findings: no study was given")
    runs = [collect(root) for root in studies]
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
        each=lambda answer: _each(runs, answer),
        answers={
            "gates": _each(runs, gates.gates),
            "routes": _each(runs, routes.roles) + _each(runs, routes.controls),
            "mixtures": _each(runs, routes.routes),
            "streams": _each(runs, routes.components) + _each(runs, routes.ways),
            "mass": _each(runs, costs.mass_and_cause),
            "cost": _each(runs, costs.costs),
        },
        tables={
            "gates": rows_table(_each(runs, gates.rows)),
            "routes": rows_table(_each(runs, routes.rows)),
            "streams": rows_table(_each(runs, routes.rows_of_components)),
            "mass": rows_table(_each(runs, costs.mass_rows)),
        },
        pictures={name: pictures.of_section(name, drawn) for name in pictures.SECTIONS},
        nulls=_each(runs, losses.nulls) + _each(runs, costs.nulls),
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


def _tidy(text: str) -> str:
    """No blank line twice, none at the end, no spaces at ends of lines."""
    lines: list[str] = []
    for line in (line.rstrip() for line in text.splitlines()):
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).rstrip("\n") + "\n"
