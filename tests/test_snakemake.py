"""Export to Snakemake: the same steps in the same order, and the same tables to the bit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from satlens.runner import run_step
from satlens.study import export_snakefile, load_recipe, make_plan, run_study, study_steps
from satlens.study.snakemake import MARKS, SNAKEFILE, snakefile

SNAKEMAKE = shutil.which("snakemake") or shutil.which("snakemake", path=Path(sys.executable).parent)
needs_snakemake = pytest.mark.skipif(
    SNAKEMAKE is None, reason="needs snakemake: pip install 'satlens[cluster]'"
)
MICRO = """
name: micro
title: Two arms, as small as they get
corpus: {corpus}
seeds: 1
vocab_size: 300
milestones: [0.5]
model: {{n_layers: 2, d_model: 16, n_heads: 2, n_ctx: 32}}
train: {{tokens: 1024, batch_size: 4, lr: 0.003, eval_every: 4, checkpoint_every: 4}}
arms:
  transformer: {{variant: transformer, analyses: []}}
  rd-attnres: {{variant: rd-attnres, analyses: [sparsity]}}
max_documents: 6
slices: {{evaluation: 65, sparsity: 65}}
"""


@pytest.fixture
def micro(tmp_path):
    """A recipe over two dozen short documents."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    words = "the sea was calm and a ship of oak went out to the far shore in spring".split()
    for k in range(24):
        text = " ".join(words[(k * 7 + i * (k + 3)) % len(words)] for i in range(150))
        (corpus / f"{k:02d}.txt").write_text(text + ".\n")
    path = tmp_path / "micro.yaml"
    path.write_text(MICRO.format(corpus=corpus))
    return load_recipe(str(path))


def rules(text: str) -> dict[str, dict[str, str]]:
    """Name of a rule -> directive -> what it says."""
    found = {}
    for block in re.findall(r"^rule \w+:\n(?:    .+\n)+", text, re.M):
        name = block.split()[1].rstrip(":")
        found[name] = dict(re.findall(r"^    (\w+): (.+)$", block, re.M))
    return found


def inputs(rule: dict[str, str], text: str) -> list[str]:
    """Steps whose marks a rule waits for, its lists written out."""
    lists = dict(re.findall(r"^([A-Z]+) = \[\n((?:    .+\n)+)\]", text, re.M))
    named = re.findall(r'\*([A-Z]+)|"([^"]+)"', rule.get("input", ""))
    return [
        step
        for name, single in named
        for step in ([single] if single else re.findall(r'"(.+)"', lists[name]))
    ]


@pytest.mark.parametrize("name", ["tiny", "satformer", "rd-attnres", "zoo"])
def test_every_step_of_a_recipe_has_a_rule_that_waits_for_what_it_needs(name, tmp_path):
    recipe = make_plan(load_recipe(name), tmp_path, workers=1)
    steps = study_steps(recipe)
    text = snakefile(recipe, steps)
    found = rules(text)
    for step in steps:
        matching = []
        for rule in found.values():
            pattern = re.search(r'done\("(.+?)"\)', rule.get("output", ""))
            wildcards = "(?P<arm>.+)", r"(?P<seed>\\d+)", "(?P<tagger>.+)"
            regex = re.escape(pattern[1] if pattern else "")
            for key, value in zip(("arm", "seed", "tagger"), wildcards, strict=True):
                regex = regex.replace(rf"\{{{key}\}}", value.replace("\\\\", "\\"))
            if pattern and (match := re.fullmatch(regex, step.id)):
                values = match.groupdict()
                waits = {each.format(**values) for each in inputs(rule, text)}
                called = rule["shell"].split('"')[1].replace("wildcards.", "").format(**values)
                matching.append((waits, called))
        ((waits, called),) = matching
        assert set(step.needs) <= waits, step.id
        assert called == step.id


def test_a_gpu_study_asks_for_gpus_where_models_run_and_only_there(micro, tmp_path):
    plan = make_plan(micro, tmp_path / "gpu", device="cuda", workers=1)
    found = rules(snakefile(plan, study_steps(plan)))
    asking = {name for name, rule in found.items() if "gpu=1" in rule.get("resources", "")}
    assert asking == {"train", "sparsity", "comparison"}


def test_marks_follow_the_records_of_satlens(micro, tmp_path):
    root = tmp_path / "study"
    plan = make_plan(micro, root, workers=1)
    steps = study_steps(plan)
    path, n_left = export_snakefile(plan, root)
    assert (path, n_left) == (root / SNAKEFILE, len(steps))
    assert not (root / MARKS).exists()
    run_step(root, steps, "data")
    (root / MARKS).mkdir(parents=True)
    (root / MARKS / "curves").touch()  # a mark that no record bears out
    assert export_snakefile(plan, root)[1] == len(steps) - 1
    assert [p.name for p in (root / MARKS).rglob("*") if p.is_file()] == ["data"]


def snakemake(folder: Path, *arguments: str) -> str:
    """What Snakemake said in a study's folder, after it went well."""
    ran = subprocess.run(
        [str(SNAKEMAKE), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


class Silent:
    """Shows nothing of a run."""

    def __init__(self, n_steps: int) -> None: ...
    def __enter__(self):
        return self

    def __exit__(self, *exception): ...
    def start(self, step): ...
    def progress(self, step, fraction, message): ...
    def finish(self, step, seconds, left): ...


@needs_snakemake
def test_snakemake_makes_the_tables_of_the_built_in_runner_and_continues_its_runs(micro, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run_study(make_plan(micro, ours, workers=1), ours, 1, Silent)

    plan = make_plan(micro, theirs, workers=1)
    shutil.copytree(ours / "data", theirs / "data")  # some steps were run by satlens itself
    (theirs / ".steps").mkdir()
    shutil.copy(ours / ".steps" / "data.json", theirs / ".steps")
    assert export_snakefile(plan, theirs)[1] == len(study_steps(plan)) - 1
    said = snakemake(theirs, "--cores", "2")
    assert "rule data" not in said

    tables = sorted(p.relative_to(ours) for p in ours.rglob("*.csv"))
    assert len(tables) >= 5
    for table in tables:
        assert (ours / table).read_bytes() == (theirs / table).read_bytes(), table
    assert run_study(plan, theirs, 1, Silent) == []
    assert "Nothing to be done" in snakemake(theirs, "--cores", "1")


@needs_snakemake
def test_snakemake_reads_the_export_of_a_whole_study(tmp_path):
    plan = make_plan(load_recipe("satformer"), tmp_path, workers=1)
    _, n_left = export_snakefile(plan, tmp_path)
    said = snakemake(tmp_path, "--cores", "1", "--dry-run")
    assert re.search(rf"^total +{n_left + 1}$", said, re.M)
