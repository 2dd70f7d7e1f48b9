from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from satlens import provenance as module
from satlens.provenance import command_line, git_state, package_versions, provenance, source_sha256


@pytest.fixture
def facts() -> dict:
    return {
        "checkpoint": {"sha256": "ab" * 32, "variant": "satformer"},
        "data": {"sha256": "cd" * 32, "split": "test"},
        "tokenizer": "ef" * 32,
        "seed": 0,
        "n_documents": 12,
        "n_tokens": 3456,
        "tagger": {"name": "en_core_web_sm", "version": "3.8.0"},
        "dtype": "torch.float32",
        "attention": "sdpa",
    }


def test_the_record_is_complete_and_the_same_every_time(facts):
    record = provenance(**facts)
    assert json.dumps(record) == json.dumps(provenance(**facts))
    assert record["checkpoint"] == {"sha256": "ab" * 32, "variant": "satformer"}
    assert record["dtype"] == "float32"
    assert record["packages"]["numpy"] == metadata.version("numpy")
    assert set(record) == {
        *facts,
        "command",
        "code",
        "python",
        "packages",
    }


def test_what_is_unknown_is_null(facts):
    empty = provenance(
        checkpoint=None, data=None, tokenizer=None, seed=None, n_documents=0, n_tokens=0
    )
    assert list(empty) == list(provenance(**facts))
    assert empty["checkpoint"] == empty["data"] == {"sha256": None}
    assert empty["tagger"] is empty["dtype"] is empty["attention"] is None


def test_unknown_options_are_refused(facts):
    with pytest.raises(TypeError):
        provenance(**facts, tager="en_core_web_sm")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["/opt/venv/bin/satlens", "sparsity", "my run", "--out", "x"],
            "satlens sparsity 'my run' --out x",
        ),
        (["/opt/venv/lib/satlens/__main__.py", "bench"], "python -m satlens bench"),
        (["figures/fig1.py"], "fig1.py"),
        (["/x/ipykernel_launcher.py", "-f", "/run/kernel-1.json"], "notebook"),
        ([""], "python"),
    ],
)
def test_the_command_is_as_typed_wherever_it_is_installed(argv, line):
    assert command_line(argv) == line


def test_the_command_comes_from_the_process_unless_given(facts, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/satlens", "routes"])
    assert provenance(**facts)["command"] == "satlens routes"
    assert provenance(**facts, command="satlens reproduce")["command"] == "satlens reproduce"


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(module, "PACKAGES", ("numpy", "no-such-package-here"))
    assert package_versions() == {"numpy": metadata.version("numpy"), "no-such-package-here": None}


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", *names, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A repository that tracks one package."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-qm", "start")
    git_state.cache_clear()
    return package


def test_the_commit_of_a_clean_checkout(checkout):
    assert git_state(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}


@pytest.mark.parametrize("name", ["__init__.py", "new.py"])
def test_changed_and_new_code_is_dirty(checkout, name):
    (checkout / name).write_text("changed = True\n")
    state = git_state(checkout)
    assert state is not None
    assert state["dirty"]


def test_sources_are_told_apart_by_what_they_say_and_where(monkeypatch, tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "one.py").write_text("a = 1\n")
    (tmp_path / "part" / "two.py").write_text("b = 1\n")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "provenance.py"))
    found = []
    for change in (None, "b = 2\n", "b = 1\n"):
        if change is not None:
            (tmp_path / "part" / "two.py").write_text(change)
        source_sha256.cache_clear()
        found.append(source_sha256("one.py", "part"))
    source_sha256.cache_clear()
    assert found[0] == found[2] != found[1]
    assert found[0] != source_sha256("one.py")
    source_sha256.cache_clear()


def test_changes_outside_the_package_do_not_count(checkout):
    (checkout.parent / "notes.txt").write_text("results\n")
    state = git_state(checkout)
    assert state is not None
    assert not state["dirty"]


def test_code_installed_inside_another_checkout_has_no_commit(checkout):
    installed = checkout.parent / "venv" / "satlens"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert git_state(installed) is None


def test_no_commit_without_a_repository_or_without_git(tmp_path, checkout, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(checkout) is None
    monkeypatch.undo()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.parent))
    alone = checkout.parent.parent / "alone"
    alone.mkdir(exist_ok=True)
    (alone / "__init__.py").write_text("")
    assert git_state(alone) is None
