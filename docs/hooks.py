"""What the site needs beyond plain MkDocs: pages from outside of ``docs/``, and docstring roles.

``docs/`` links to files beside it (CONTRIBUTING.md, notebooks, figures of studies) by relative
paths, which work wherever the repository is browsed. Here each becomes a file of the site, and the
links are turned to it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parent.parent
DOCS = Path(__file__).parent.name
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)")
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`~?([^`]+)`")

# Path in the repository -> path in the site, of every file of it.
_in_site: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebooks, and what pages link to outside of ``docs/``, with what that links to."""
    _in_site.clear()
    _in_site.update({f"{DOCS}/{file.src_uri}": file.src_uri for file in files})
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        _added(f"notebooks/{notebook.name}", files, config)
    for page in files.documentation_pages():
        _add_linked(page, files, config)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository to the same files in the site."""
    here = page.file.src_uri
    origin = _origin(here)

    def turned(match: re.Match[str]) -> str:
        target = _in_site.get(_resolved(origin, match[1]))
        return match[1] if target is None else posixpath.relpath(target, posixpath.dirname(here))

    return _LINK.sub(turned, markdown)


def _add_linked(page: File, files: Files, config: MkDocsConfig) -> None:
    for target in _targets(page):
        _added(target, files, config)


def _added(path: str, files: Files, config: MkDocsConfig) -> None:
    """A file of the repository, at the same path in the site; a notebook as the page it makes."""
    if path in _in_site or not (ROOT / path).is_file():
        return
    if path.endswith(".ipynb"):
        name = path.removesuffix(".ipynb")
        exporter = MarkdownExporter()
        text, resources = exporter.from_filename(
            str(ROOT / path), resources={"output_files_dir": f"{Path(name).name}_files"}
        )
        for picture, content in resources["outputs"].items():
            where = posixpath.join(posixpath.dirname(name), picture)
            files.append(File.generated(config, where, content=content))
        added = File.generated(config, f"{name}.md", content=text)
    else:
        added = File.generated(config, path, abs_src_path=str(ROOT / path))
    files.append(added)
    _in_site[path] = added.src_uri
    if added.is_documentation_page():
        _add_linked(added, files, config)


def _targets(page: File) -> Iterator[str]:
    origin = _origin(page.src_uri)
    for match in _LINK.finditer(page.content_string):
        yield _resolved(origin, match[1])


def _origin(src_uri: str) -> str:
    """Path in the repository of a file of the site."""
    return next(path for path, uri in _in_site.items() if uri == src_uri)


def _resolved(origin: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


class PlainRoles(griffe.Extension):
    """Shows the cross-reference roles of docstrings as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite its docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
