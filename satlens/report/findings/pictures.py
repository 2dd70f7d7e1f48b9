"""The figures of studies as Markdown: links to the drawn files, captions from their sidecars."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from satlens.errors import DataError
from satlens.report.collect import Run
from satlens.report.paper_figures import FOLDER

SECTIONS = {
    "loss": ("seeds_and_milestones", "loss_and_time"),
    "gates": (
        *("open_gates_by_depth", "gate_map", "gates_by_category"),
        *("gate_ablation", "gate_functions"),
    ),
    "routes": ("route_divergence", "route_maps", "route_controls", "attnres_routes"),
    "streams": (
        *("effective_routes", "denseformer_weights"),
        *("muddformer_weights", "hyperconnections_weights"),
    ),
    "mass": ("mass_and_cause",),
    "cost": ("loss_and_cost",),
}
"""Section -> figures in it; a figure that is in none stands at the end."""


@dataclass(frozen=True)
class Drawn:
    """A figure that a study has."""

    name: str
    markdown: str


def drawn(run: Run, page: Path) -> list[Drawn]:
    """Every figure in a study's folder, linked from a page.

    Raises:
        DataError: a sidecar that cannot be read.
    """
    found = []
    for sidecar in sorted((run.root / FOLDER).glob("*.json")):
        picture = sidecar.with_suffix(".png")
        if picture.exists():
            found.append(Drawn(sidecar.stem, _markdown(run.name, sidecar, picture, page)))
    return found


def _markdown(study: str, sidecar: Path, picture: Path, page: Path) -> str:
    try:
        facts = json.loads(sidecar.read_text(encoding="utf-8"))
        title, caption, source = (str(facts[key]) for key in ("title", "caption", "source"))
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{sidecar}: not the sidecar of a figure; draw it again") from None
    where = Path(os.path.relpath(picture.resolve(), page.resolve().parent)).as_posix()
    pdf, values = (where.removesuffix("png") + ending for ending in ("pdf", "csv"))
    said = f"{title} (study {study}). {caption.removesuffix('.')}. Kind of figure: {source}."
    said = said.replace("*", "\\*")
    text = f"*{said} [PDF]({pdf}), [values]({values}).*"
    return f"![{title}]({where})\n\n{text}"


def of_section(section: str, studies: Sequence[tuple[Run, Sequence[Drawn]]]) -> list[str]:
    """The Markdown of a section's figures, in its order, of every study that has them."""
    return [
        each.markdown
        for name in SECTIONS[section]
        for _, figures in studies
        for each in figures
        if each.name == name
    ]


def rest(studies: Sequence[tuple[Run, Sequence[Drawn]]]) -> list[str]:
    """Figures that no section names."""
    known = {name for names in SECTIONS.values() for name in names}
    return [each.markdown for _, figures in studies for each in figures if each.name not in known]
