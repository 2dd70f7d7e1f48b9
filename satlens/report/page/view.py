"""A result as a page of its own: shown in a notebook, or saved as one HTML file."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup, escape

from satlens.analysis.result import Result
from satlens.errors import AnalysisError
from satlens.report.effects import capital
from satlens.report.page.document import document, environment, write_page
from satlens.report.page.layout import (
    Part,
    Provenance,
    flat_facts,
    part_html,
    picture,
    provenance_html,
)
from satlens.report.page.tables import result_table
from satlens.report.sections.captions import caption
from satlens.report.tokens.fragment import NAME, token_fragment

HEIGHT = 760
# The page in a notebook may run its own scripts and offer its downloads; it has an origin of its
# own, so that it reaches neither the notebook nor its kernel.
_FRAME = Markup(
    '<iframe sandbox="allow-scripts allow-downloads" title="{title}" srcdoc="{page}" '
    'width="100%" height="{height}" style="border:0"></iframe>'
)


class View:
    """A page about one result. Notebooks show it; :meth:`save` writes it as a file."""

    def __init__(self, title: str, html: str, height: int = HEIGHT) -> None:
        self.title = title
        self.html = html
        """The whole page, which loads nothing."""
        self.height = height
        """Of the frame in a notebook, in CSS pixels."""

    def __repr__(self) -> str:
        return f"View({self.title!r}, {len(self.html.encode()) / 1e6:.1f} MB of HTML)"

    def _repr_html_(self) -> str:
        """The page in a frame that a notebook shows."""
        return str(_FRAME.format(title=self.title, page=escape(self.html), height=self.height))

    def save(self, path: str | Path) -> Path:
        """Write the page, and return its path.

        Raises:
            AnalysisError: the file cannot be written.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return write_page(path, self.html)
        except OSError as error:
            raise AnalysisError(f"{path}: cannot write the page: {error.strerror}") from error


def view(result: Result, *, height: int = HEIGHT) -> View:
    """A result to look at: in a notebook, or with :meth:`View.save` in any browser.

    The result of :func:`satlens.token_view` is shown as its text, in the colours of a gate, a
    route, the loss or the category; any other as its figure. Tables follow that can be sorted and
    downloaded (of a token view without ``token_values``, whose numbers the view itself shows).

    Args:
        height: of the frame in a notebook, in CSS pixels.

    Raises:
        AnalysisError: no result, one that has no figure, or a token view whose parts do not fit it.
    """
    if not isinstance(result, Result):
        raise AnalysisError(f"view: expected one result, got {type(result).__name__}")
    title = capital(result.name.replace("_", " "))
    part = Part()
    if result.name == NAME:
        part.fragments.append(token_fragment(result))
    elif len(result.table):
        about = f"{title}. {caption(result)}".strip()
        part.figures.append(picture(result.figure(), title, about, about))
    tables = [each for each in (result, *result.parts) if each.name != "token_values"]
    part.tables += [result_table(each, each.name.replace("_", " ")) for each in tables]
    origin = Provenance(title, flat_facts(result.provenance))
    body = (
        environment()
        .get_template("view.html.j2")
        .render(
            title=title,
            body=part_html(part),
            notes=result.notes,
            provenance=provenance_html([origin]) if origin.facts else "",
        )
    )
    styles = [text for fragment in part.fragments for text in fragment.styles]
    scripts = [text for fragment in part.fragments for text in fragment.scripts]
    return View(title, document(title, Markup(body), styles, scripts), height)
