"""The package as a whole: what importing costs, what may import what, what the CLI offers."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import satlens

PACKAGE = Path(satlens.__file__).parent
HEAVY = ("torch", "transformer_lens", "transformers", "pandas", "matplotlib", "spacy", "nnsight")

# A module may import from its own row and the rows above it.
LAYERS = (
    ("errors", "config", "locking", "processes", "shipped", "runner", "provenance"),
    ("data",),
    ("hook_table", "activation_cache", "hooks", "models"),
    ("checkpoints",),
    ("training", "plotting", "display", "interop", "tasks"),
    ("analysis",),
    ("report",),
    ("actions",),
    ("study",),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def heavy_modules_after(code: str) -> list[str]:
    probe = (
        f"{code}\nimport sys, json\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    return json.loads(output.stdout.splitlines()[-1])


def test_importing_satlens_and_asking_for_help_loads_nothing_heavy():
    assert heavy_modules_after("import satlens; satlens.ModelConfig()") == []
    help_page = "import sys\nsys.argv = ['satlens', '--help']\nfrom satlens.cli import main\n"
    assert heavy_modules_after(help_page + "try: main()\nexcept SystemExit: pass") == []


def test_every_public_name_resolves():
    for name in satlens.__all__:
        assert getattr(satlens, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = satlens.nonsense


def imported_parts(file: Path) -> set[str]:
    """Top-level parts of satlens that a file imports, but for type checking only."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    parts = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        parts |= {n.split(".")[1] for n in names if n.startswith("satlens.")}
    return parts


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_lower_layers_do_not_import_upper_ones():
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        part = part_of(file)
        if part == "__init__":
            continue
        for other in imported_parts(file):
            # Results draw themselves, so analysis may name plotting; nothing else looks up.
            if LEVEL[other] > LEVEL[part]:
                wrong.append(f"{file.relative_to(PACKAGE)} imports satlens.{other}")
    assert wrong == []


def test_plotting_knows_tables_only():
    for file in (PACKAGE / "plotting").glob("*.py"):
        assert imported_parts(file) <= {"plotting", "errors"}, file


def test_models_never_know_analyses():
    for file in (PACKAGE / "models").rglob("*.py"):
        assert "analysis" not in imported_parts(file), file
