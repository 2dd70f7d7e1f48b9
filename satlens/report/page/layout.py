"""The parts of a page: sections of sentences, figures, fragments and tables, and their markup."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from satlens.plotting import picture_bytes
from satlens.plotting.style import COLUMN, DPI
from satlens.report.effects import Finding
from satlens.report.page.document import Fragment, document, environment
from satlens.report.page.tables import Link, Table

TEMPLATE = "page.html.j2"
MACROS = "parts.html.j2"
LABELS = {
    "found": "Found",
    "direction": "A direction",
    "open": "Not established",
    "missing": "Missing",
    "caveat": "Read with care",
}
_CSS_DPI = 96


@dataclass(frozen=True)
class Picture:
    """A figure as the page shows it."""

    title: str
    caption: str
    alt: str
    png: str
    """Base64."""
    width: int
    height: int
    double: bool
    files: tuple[Link, ...] = ()


@dataclass
class Part:
    """What is said and shown about one arm, or about all."""

    title: str = ""
    findings: list[Finding] = field(default_factory=list)
    nested: bool = False
    """One of several seeds, below a part about all of them."""
    folded: bool = False
    """Shown on demand, as further seeds are."""
    fragments: list[Fragment] = field(default_factory=list)
    """Interactive views."""
    figures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass
class Section:
    """One question of the study."""

    id: str
    title: str
    caveats: list[Finding] = field(default_factory=list)
    headlines: list[Finding] = field(default_factory=list)
    """What the summary at the top repeats."""
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class Provenance:
    """Facts about one table."""

    title: str
    facts: tuple[tuple[str, str], ...]


def picture(
    figure: Figure, title: str, caption: str, alt: str, files: tuple[Link, ...] = ()
) -> Picture:
    """The figure as an inline PNG at its printed size."""
    return shown(picture_bytes(figure), title, caption, alt, files)


def shown(png: bytes, title: str, caption: str, alt: str, files: tuple[Link, ...] = ()) -> Picture:
    """A figure that was drawn as PNG before."""
    width, height = struct.unpack(">II", png[16:24])  # of the IHDR chunk, which comes first
    return Picture(
        title=title,
        caption=caption,
        alt=alt,
        png=base64.b64encode(png).decode("ascii"),
        width=round(width * _CSS_DPI / DPI * 1.25),
        height=round(height * _CSS_DPI / DPI * 1.25),
        double=width > 1.2 * COLUMN * DPI,
        files=files,
    )


def flat_facts(record: dict[str, Any], prefix: str = "") -> tuple[tuple[str, str], ...]:
    """Nested facts as (dotted name, text), empty ones left out."""
    facts: list[tuple[str, str]] = []
    for name, value in record.items():
        if isinstance(value, dict):
            facts += flat_facts(value, f"{prefix}{name}.")
        elif value is not None and value != "":
            facts.append((prefix + name, str(value)))
    return tuple(facts)


def provenance_html(items: Iterable[Provenance]) -> Markup:
    """Markup of the folded facts about tables, outside a report."""
    return Markup(_macro("provenance")(list(items)))


def part_html(part: Part) -> Markup:
    """Markup of a part outside a report: sentences, fragments, figures, tables.

    The page around it has to be of :func:`satlens.report.page.document.document`, with the styles
    and scripts of the part's fragments.
    """
    return Markup(_macro("body")(part))


def _macro(name: str) -> Callable[..., str]:
    module = environment().get_template(MACROS).make_module({"labels": LABELS})
    return getattr(module, name)


def report_page(*, title: str, sections: list[Section], **content: Any) -> str:
    """The page of a report; everything that is not markup is escaped."""
    body = (
        environment()
        .get_template(TEMPLATE)
        .render(labels=LABELS, title=title, sections=sections, **content)
    )
    fragments = list(_fragments(sections))
    return document(
        title,
        Markup(body),
        [text for fragment in fragments for text in fragment.styles],
        [text for fragment in fragments for text in fragment.scripts],
    )


def _fragments(sections: Iterable[Section]) -> Iterable[Fragment]:
    for section in sections:
        for part in section.parts:
            yield from part.fragments
