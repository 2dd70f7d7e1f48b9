"""From run directories to their report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from satlens.errors import DataError
from satlens.report import caveats, words
from satlens.report.claims.table import claims
from satlens.report.collect import Run
from satlens.report.effects import Finding, heading, listed
from satlens.report.page.document import write_page
from satlens.report.page.layout import Provenance, Section, flat_facts, report_page
from satlens.report.sections.differences import differences_section
from satlens.report.sections.drawn import drawn_section
from satlens.report.sections.facts import facts, lead
from satlens.report.sections.losses import arms_section
from satlens.report.sections.questions import (
    ablation_section,
    attribution_section,
    categories_section,
    circuits_section,
    claims_section,
    divergence_section,
    others_section,
    routes_section,
    sparsity_section,
    trajectory_sections,
)
from satlens.report.sections.tasks import tasks_section
from satlens.report.sections.tokens import token_section
from satlens.report.side_by_side import collect_all

REPORT = "report.html"


def build_report(runs: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page of a run, or of several side by side; its path.

    The page says in words what the tables hold, shows their figures and has the tables to sort and
    to download. It is one file that loads nothing. What is missing or damaged is named on the page.
    For a study, ``results/claims.*`` is written too.

    Args:
        runs: a study, a folder that analyses wrote to, or several of both.
        out: the page; by default ``report.html`` in the run, of several in the current folder.

    Raises:
        DataError: no such folder, nothing in it to report, or a page that cannot be written.
    """
    run = collect_all([runs] if isinstance(runs, str | Path) else list(runs))
    path = run.root / REPORT if out is None else Path(out)
    run.page = path.parent
    sections = [section for section in _sections(run) if section is not None]
    page = report_page(
        title=_title(run),
        lead=lead(run),
        facts=facts(run),
        short=_short(run, sections),
        scale=_scale(run),
        sections=sections,
        provenance=_provenance(run),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_page(path, page)
    except OSError as error:
        raise DataError(f"{path}: cannot write the page: {error.strerror}") from error


def _sections(run: Run) -> list[Section | None]:
    return [
        differences_section(run),
        _claims(run),
        arms_section(run),
        token_section(run),
        sparsity_section(run),
        routes_section(run),
        categories_section(run),
        divergence_section(run),
        ablation_section(run),
        attribution_section(run),
        circuits_section(run),
        tasks_section(run),
        *trajectory_sections(run),
        others_section(run),
        drawn_section(run),
    ]


def _claims(run: Run) -> Section | None:
    """Claims are judged by whole studies; several of them are what ``findings`` is for."""
    if run.is_plain or run.runs:
        return None
    claimed = claims(run)
    claimed.save(run.root / "results", figures=False)
    return claims_section(run, claimed)


def _title(run: Run) -> str:
    if run.runs:
        return listed(list(run.runs))
    return str(run.recipe.get("title") or run.root.resolve().name)


def _scale(run: Run) -> list[Finding]:
    """What studies are too small to say; folders of results do not know their scale."""
    studies = [each for each in (run, *run.runs.values()) if each.recipe]
    if not studies:
        return []
    sizes = [run.n_parameters(arm) for arm in run.arms]
    recipe = studies[0].recipe if len(studies) == 1 else {}
    if any(each.recipe.get("corpus") == "sotu" for each in studies):
        recipe = {**recipe, "corpus": "sotu"}
    return caveats.scale(recipe, [size for size in sizes if size])


def _short(run: Run, sections: list[Section]) -> list[Finding]:
    """The headline findings of every section, or their first ones, then what is missing."""
    found = [finding for section in sections for finding in section.headlines]
    if not found:
        parts = [section.parts[0] for section in sections if section.parts]
        found = [part.findings[0] for part in parts if part.findings]
    return found + words.missing(run.missing) or [
        Finding("No sentence follows from the results in this directory.", "missing")
    ]


# -- provenance ------------------------------------------------------------------------------------


def _provenance(run: Run) -> list[Provenance]:
    items = []
    for label, each in (run.runs or {"": run}).items():
        of = f" of {label}" if label else ""
        items += [Provenance(f"{k}{of}", flat_facts(r.provenance)) for k, r in each.study.items()]
    items += [
        Provenance(name, flat_facts(result.provenance)) for name, result in run.others.items()
    ]
    for (arm, seed, name), result in run.results.items():
        title = f"{name.replace('_', ' ')} of {heading(arm, seed)}"
        items.append(Provenance(title, flat_facts(result.provenance)))
    return items
