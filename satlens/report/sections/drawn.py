"""The figures of papers on the page: those that ``satlens figures`` drew into the study."""

from __future__ import annotations

import json

from satlens.report.collect import Missing, Run
from satlens.report.page.layout import Part, Picture, Section, shown

FOLDER = "figures"
FILES = ("png", "pdf", "csv", "json")


def drawn_section(run: Run) -> Section | None:
    """Every drawn figure with its caption and files; None where none was drawn."""
    pictures = [_picture(run, path.stem) for path in sorted((run.root / FOLDER).glob("*.json"))]
    kept = [each for each in pictures if each is not None]
    if not kept:
        return None
    return Section("figures", "Figures as the papers have them", parts=[Part(figures=kept)])


def _picture(run: Run, name: str) -> Picture | None:
    folder = run.root / FOLDER
    try:
        facts = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        if "failed" in facts:
            run.missing.append(Missing(f"{FOLDER}/{name}", None, None, str(facts["failed"])))
            return None
        title, caption = str(facts["title"]), str(facts["caption"])
        png = (folder / f"{name}.png").read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        run.missing.append(Missing(f"{FOLDER}/{name}", None, None, "not readable"))
        return None
    files = tuple((kind.upper(), f"{FOLDER}/{name}.{kind}") for kind in FILES)
    return shown(png, title, f"{title}. {caption}", title, files)
