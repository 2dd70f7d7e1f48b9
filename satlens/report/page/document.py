"""A whole HTML page in one file: it loads nothing, and only its own styles and scripts apply.

The policy of a page names its styles and scripts by their sha256. Markup that a document or a
token could smuggle in has no hash, so a browser refuses to run it; escaping is the first wall,
this the second. Two consequences for whoever writes markup: no ``style`` attributes and no
``on...`` attributes (a script may set ``element.style``).
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

FOLDER = Path(__file__).parent
TEMPLATE = "document.html.j2"


@dataclass(frozen=True)
class Fragment:
    """A piece of a page that brings the styles and scripts that it needs."""

    html: Markup
    styles: tuple[str, ...] = ()
    """CSS texts; one that several fragments bring stands in the page once."""
    scripts: tuple[str, ...] = ()
    """JavaScript texts, likewise; they run after the whole page was parsed."""


def document(
    title: str, body: Markup, styles: Iterable[str] = (), scripts: Iterable[str] = ()
) -> str:
    """A complete page: ``body`` between a skip link and the scripts, under a content policy.

    Every page has the styles and the script of ``assets/page.*``: colours in light and dark with
    a switch, sortable tables, downloads. Further ``styles`` and ``scripts`` follow, each once.

    Args:
        title: text, escaped here.
        body: markup with an element of id ``main``, where the skip link leads.
        styles: CSS texts.
        scripts: JavaScript texts.

    Raises:
        ValueError: a text that would end its own element.
    """
    all_styles = tuple(dict.fromkeys((asset("page.css"), *styles)))
    all_scripts = tuple(dict.fromkeys((asset("page.js"), *scripts)))
    for tag, texts in (("style", all_styles), ("script", all_scripts)):
        if any(f"</{tag}" in text.lower() or "<!--" in text for text in texts):
            raise ValueError(f"a text for <{tag}> contains </{tag} or <!--")
    return (
        environment()
        .get_template(TEMPLATE)
        .render(
            title=title,
            body=Markup(body),
            policy=_policy(all_styles, all_scripts),
            styles=[Markup(text) for text in all_styles],
            scripts=[Markup(text) for text in all_scripts],
        )
    )


def _policy(styles: Iterable[str], scripts: Iterable[str]) -> str:
    """Nothing but the page's own styles, scripts and inline pictures."""
    parts = {
        "default-src": "'none'",
        "style-src": " ".join(map(_hash, styles)),
        "script-src": " ".join(map(_hash, scripts)),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def asset(name: str) -> str:
    """Text of a file in ``assets``, with the line ends that a browser hashes."""
    return (FOLDER / "assets" / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def embedded_json(value: Any) -> Markup:
    """``value`` as JSON for ``<script type="application/json">``: no text can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def environment() -> Environment:
    """Templates of this folder; everything that is not :class:`Markup` is escaped."""
    found = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    found.filters["unbroken"] = _unbroken
    return found


def _unbroken(text: str) -> str:
    """Numbers and their per cent sign stay on one line."""
    return str(text).replace(" %", "\N{NO-BREAK SPACE}%")


def write_page(path: Path, html: str) -> Path:
    """Put the page in its place in one move, so that no page is ever half written."""
    if path.is_dir():  # also "." and "/", which have no name to write beside
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    waiting = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        waiting.write_text(html + "\n", encoding="utf-8")
        os.replace(waiting, path)
    finally:
        waiting.unlink(missing_ok=True)
    return path
