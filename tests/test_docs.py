"""README and docs: links lead somewhere, code runs, commands exist, pages follow the code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
import yaml
from markdown_it import MarkdownIt
from typer.main import get_command

import satlens
from satlens.cli import app, main
from satlens.data.sources import embedded

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(satlens.__file__).parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
GENERATED = DOCS / "cli.md"
MARKDOWN = MarkdownIt("commonmark").enable("table")


class Block(NamedTuple):
    """A fenced block: its language, its text and its first line in the page."""

    language: str
    text: str
    line: int


def markdown_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return text


def blocks_of(page: Path) -> list[Block]:
    tokens = MARKDOWN.parse(markdown_of(page))
    return [
        Block(t.info.strip(), t.content, t.map[0] + 2)
        for t in tokens
        if t.type == "fence" and t.map
    ]


def pairs_of(page: Path) -> list[tuple[Block, Block]]:
    """Every block with the one after it, or with an empty one."""
    blocks = blocks_of(page)
    return list(pairwise([*blocks, Block("", "", 0)]))


def with_blocks(language: str, *besides: Path) -> pytest.MarkDecorator:
    """Parametrises by the pages that have blocks of a language."""
    pages = [p for p in PAGES if p not in besides]
    found = [p for p in pages if any(block.language == language for block in blocks_of(p))]
    return pytest.mark.parametrize("page", found, ids=name_of)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links_of(page: Path) -> Iterator[str]:
    for token in MARKDOWN.parse(markdown_of(page)):
        for child in token.children or ():
            address = child.attrs.get("href") or child.attrs.get("src")
            if address is not None:
                yield str(address)
        if token.type in ("html_block", "inline"):
            yield from re.findall(r'<(?:a|img)\b[^>]*?(?:href|src)="([^"]+)"', token.content)


def anchors_of(page: Path) -> set[str]:
    """Anchors of the headings, as both GitHub and MkDocs make them from plain words."""
    tokens = MARKDOWN.parse(markdown_of(page))
    titles = [
        "".join(child.content for child in following.children or ())
        for token, following in pairwise(tokens)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=name_of)
def test_every_relative_link_and_anchor_leads_somewhere(page):
    lost = []
    for address in links_of(page):
        if re.match(r"[a-z]+:", address):
            continue
        path, _, anchor = address.partition("#")
        target = (page.parent / path).resolve() if path else page
        found = target.exists() and target.is_relative_to(ROOT)
        if not found or (anchor and anchor not in anchors_of(target)):
            lost.append(address)
    assert lost == []


# -- code ------------------------------------------------------------------------------------------


@pytest.fixture
def small_corpus(monkeypatch, tmp_path):
    """The embedded corpus cut to short documents, in an empty folder."""
    whole = [document._replace(text=document.text[:600]) for document in embedded.read_embedded()]
    monkeypatch.setattr(embedded, "read_embedded", lambda: iter(whole))
    monkeypatch.chdir(tmp_path)


@with_blocks("python", ROOT / "CONTRIBUTING.md")  # test_contributing.py follows that one
def test_python_blocks_run_and_raise_what_the_page_says(page, small_corpus):
    """In order, in one namespace; a block before ``text`` with an error raises that error."""
    if "evaluate_tasks" in markdown_of(page):
        pytest.importorskip("lm_eval", reason="pip install 'satlens[eval]'")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block, following in pairs_of(page):
        if block.language != "python":
            continue
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        said = following.text.strip() if following.language == "text" else ""
        if not re.match(r"\w+Error: ", said):
            exec(code, namespace)
            continue
        with pytest.raises(satlens.SatlensError) as raised:
            exec(code, namespace)
        assert f"{raised.type.__name__}: {raised.value}".startswith(said), (page, block.line)


def commands_in(page: Path) -> Iterator[tuple[int, list[str], Block]]:
    """Line, words and the block after it, of every command in ``sh`` blocks."""
    for block, following in pairs_of(page):
        if block.language != "sh":
            continue
        for number, line in enumerate(block.text.replace("\\\n", " ").splitlines(), block.line):
            for part in line.split(" && "):
                if words := shlex.split(part, comments=True):
                    yield number, words, following


@with_blocks("sh")
def test_commands_in_shell_blocks_exist_with_their_options(page):
    group = get_command(app)
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line, words, _ in commands_in(page):
        where = f"{page.name}, line {line}: {' '.join(words)}"
        if words[0] == "make":
            assert set(words[1:]) - {w for w in words if "=" in w} <= set(targets), where
        if "satlens" not in words:
            continue
        arguments = words[words.index("satlens") + 1 :]
        try:
            with group.make_context("satlens", arguments) as context:
                rest = [*context._protected_args, *context.args]
                name, command, rest = group.resolve_command(context, rest)
                assert command is not None and name is not None
                command.make_context(name, rest, parent=context)
        except typer.Exit as stop:  # --help, --version
            if stop.exit_code:
                pytest.fail(where)
        except Exception as error:
            pytest.fail(f"{where}: {error}")


@with_blocks("sh")
def test_commands_that_are_shown_to_fail_say_that(page, small_corpus, monkeypatch, capsys):
    for line, words, following in commands_in(page):
        if not following.text.startswith("satlens: error: "):
            continue
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit):
            main()
        assert capsys.readouterr().err.startswith(following.text.strip()), (page, line)


# -- pages that follow the code --------------------------------------------------------------------


def error_classes() -> set[str]:
    """SatlensError and what derives from it, from the sources."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    found = {"SatlensError"}
    while more := {name for name in bases if name not in found and bases[name] & found}:
        found |= more
    return found


def test_every_error_class_has_a_page():
    pages = {page.stem for page in (DOCS / "errors").glob("*.md")} - {"index"}
    assert pages == error_classes() - {"SatlensError"}
    index = DOCS / "errors" / "index.md"
    assert {Path(link).stem for link in links_of(index)} == pages
    for page in pages:
        assert markdown_of(DOCS / "errors" / f"{page}.md").startswith(f"# {page}\n")


def test_the_command_line_page_is_what_typer_writes(tmp_path):
    command = "satlens.cli utils docs --name satlens --output".split()
    out = tmp_path / "cli.md"
    subprocess.run(
        [sys.executable, "-m", "typer", *command, str(out)], check=True, capture_output=True
    )
    assert GENERATED.read_text() == out.read_text(), f"run: typer {' '.join(command)} docs/cli.md"


def test_the_reference_has_every_public_name_once():
    listed = Counter(
        name
        for page in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    )
    assert max(listed.values()) == 1
    public = {f"{home}.{name}" for name, home in satlens._HOMES.items()}
    assert public - set(listed) == {"satlens.errors.SatlensError"}  # with the error pages
    if importlib.util.find_spec("lm_eval") is None:
        del listed["satlens.interop.lm_eval"]
    for name in listed:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            home, _, last = name.rpartition(".")
            assert hasattr(importlib.import_module(home), last), name


def test_the_navigation_has_every_page():
    def leaves(entry) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from leaves(part)

    nav = Counter(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    notebooks = [f"notebooks/{notebook.stem}.md" for notebook in NOTEBOOKS]
    assert nav == Counter([*pages, *notebooks, "CONTRIBUTING.md"])


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install 'satlens[docs]'")
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    loaded = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="?([^">\s]+)')
    styles = re.compile(
        r'<link\b(?=[^>]*rel="?(?:stylesheet|preconnect|icon))[^>]*href="?([^">\s]+)'
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        remote = [a for a in loaded.findall(text) + styles.findall(text) if "//" in a]
        assert remote == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_the_readme_says_what_the_findings_say():
    readme, findings = ((ROOT / name).read_text() for name in ("README.md", "docs/findings.md"))
    shown = re.search(r"<!-- lines of docs/findings\.md -->\n(.*?)<!-- end -->", readme, re.S)
    assert shown is not None
    lines = shown[1].splitlines()
    assert lines and set(lines) <= set(findings.splitlines())
