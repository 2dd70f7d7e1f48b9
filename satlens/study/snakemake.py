"""Export of a study to Snakemake: the same steps, on many processes or machines.

    plan.json + steps -> Snakefile; every rule calls ``satlens step RUN ID``

A rule a kind of step. What a rule writes for Snakemake is a mark, an empty file; what the files of
a step hold is recorded by satlens as in its own runner. So a step that is up to date returns at
once, whoever ran it, and one that was ended early continues from its partial files, which Snakemake
would delete were they declared as the outputs of a failed job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from satlens.runner import RECORDS, Step, stale_steps
from satlens.study.recipe import Recipe
from satlens.study.steps import study_steps

SNAKEFILE = "Snakefile"
MARKS = f"{RECORDS}/done"

_TRAINING = re.compile(r"train/(?P<arm>.+)/seed(?P<seed>\d+)")
_RESULT = re.compile(r"results/(?P<arm>.+)-seed(?P<seed>\d+)/(?P<kind>\w+)")
_TRAINED, _RESULTS = "TRAINED", "RESULTS"
# Memory in MB and minutes after which a scheduler may end a job; such a job, submitted again,
# continues. Generous at the scale of the shipped recipes.
_MEMORY, _MINUTES = 4000, {"train": 1440, "data": 240, "tags": 240}
_USUAL_MINUTES = 480
_NO_GPU = ("data", "tags", "curves", "figures", "report")

_HEADER = '''\
# {title}
#
# The steps of this study for Snakemake, written by `satlens reproduce --snakefile`; everything is
# relative to this folder. In it, on one machine, 8 steps at a time:
#
#   snakemake --cores 8
#
# On SLURM, at most 100 jobs at a time, with the resources of a kind of step as they should be:
#
#   snakemake --executor slurm --jobs 100 \\
#       --default-resources slurm_account=ACCOUNT slurm_partition=PARTITION \\
#       --set-resources train:mem_mb=16000 train:runtime=2880
#
# A mark in {marks} says that a step is done. satlens keeps a record of what each step read and
# wrote, so a step that is up to date returns at once and an interrupted one continues. Afterwards
# `satlens reproduce` finds everything up to date.

import shlex
import shutil
import sys
from pathlib import Path

workdir: workflow.basedir

# satlens as it is found here; another: snakemake --config satlens="apptainer run satlens.sif"
found = shutil.which("satlens") or Path(sys.executable).with_name("satlens")
STEP = f"{{config.get('satlens') or shlex.quote(str(found))}} step . "


def done(*steps):
    """Marks of these steps."""
    return [f"{marks}/{{step}}" for step in steps]


wildcard_constraints:
    seed=r"\\d+",
'''


def export_snakefile(recipe: Recipe, root: Path) -> tuple[Path, int]:
    """Write ``Snakefile`` into a study's folder and bring its marks up to date.

    Marks of steps that are up to date are set and those of others are removed, so that Snakemake
    runs what :func:`satlens.study.run_study` would.

    Returns:
        the file, and how many steps are left to run.
    """
    steps = study_steps(recipe)
    todo = stale_steps(root, steps)
    path = root / SNAKEFILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(snakefile(recipe, steps), encoding="utf-8")
    os.replace(temporary, path)
    for step in steps:  # each after what it needs: marks are compared by age
        mark = root / MARKS / step.id
        if step.id in todo:
            mark.unlink(missing_ok=True)
        else:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return path, len(todo)


def snakefile(recipe: Recipe, steps: Sequence[Step]) -> str:
    """The text of a study's Snakefile."""
    kinds: dict[str, list[Step]] = {}
    for step in steps:
        kinds.setdefault(_kind(step), []).append(step)
    groups = {_TRAINED: [step.id for step in kinds["train"]], _RESULTS: list(_results(steps))}
    title = " ".join(f"{recipe.name}: {recipe.title}".split())
    parts = [_HEADER.format(title=title, marks=MARKS)]
    parts += [_listed(name, ids) for name, ids in groups.items()]
    parts.append(_rule("all", [_input([steps[-1].id], groups)]))
    gpu = recipe.device.startswith("cuda")
    parts += [
        _step_rule(kind, members, groups, gpu and kind not in _NO_GPU)
        for kind, members in kinds.items()
    ]
    return "\n\n".join(parts) + "\n"


def _results(steps: Sequence[Step]) -> tuple[str, ...]:
    """What the figures are drawn from."""
    return next(step.needs for step in steps if step.id == "figures")


def _kind(step: Step) -> str:
    """Name of the rule that a step belongs to."""
    if _TRAINING.fullmatch(step.id):
        return "train"
    found = _RESULT.fullmatch(step.id)
    return found["kind"] if found else step.id.split("/")[0]


def _step_rule(kind: str, steps: Sequence[Step], groups: dict[str, list[str]], gpu: bool) -> str:
    """The rule of all steps of one kind, with an arm and a seed as wildcards where they have one.

    Where steps differ in what they need beside their own training, each waits for what any needs.
    """
    pattern, needs = "", {}
    for step in steps:
        found = _TRAINING.fullmatch(step.id) or _RESULT.fullmatch(step.id)
        arm, seed = (found["arm"], found["seed"]) if found else ("", "")
        own = f"train/{arm}/seed{seed}"
        pattern = _pattern(step.id, found)
        needs |= {("train/{arm}/seed{seed}" if n == own else n): None for n in step.needs}
    lines = [_input(list(needs), groups)] if needs else []
    lines.append(f'output: touch(done("{pattern}"))')
    lines.append("threads: 1")
    resources = {"mem_mb": _MEMORY, "runtime": _MINUTES.get(kind, _USUAL_MINUTES)}
    if gpu:
        resources["gpu"] = 1
    lines.append("resources: " + ", ".join(f"{name}={value}" for name, value in resources.items()))
    if kind == "train":
        lines.append("retries: 3  # one that its time limit ended continues")
    shell = pattern.replace("{", "{wildcards.")
    lines.append(f'shell: STEP + "{shell}"')
    return _rule(kind, lines)


def _pattern(step_id: str, found: re.Match[str] | None) -> str:
    """The id with wildcards for arm and seed, and for the way of tagging."""
    if found is None:
        folder, _, name = step_id.partition("/")
        return f"{folder}/{{tagger}}" if name else step_id
    if "kind" in found.groupdict():
        return f"results/{{arm}}-seed{{seed}}/{found['kind']}"
    return "train/{arm}/seed{seed}"


def _input(needs: list[str], groups: dict[str, list[str]]) -> str:
    """The marks that a rule waits for, with the lists by their names."""
    lists = []
    for name, ids in groups.items():
        if len(ids) > 1 and set(ids) <= set(needs):
            needs = [need for need in needs if need not in ids]
            lists.append(f"*{name}")
    return f"input: done({', '.join([*map(_quoted, needs), *lists])})"


def _listed(name: str, ids: Sequence[str]) -> str:
    return "\n".join([f"{name} = [", *(f"    {_quoted(each)}," for each in ids), "]"])


def _quoted(text: str) -> str:
    return f'"{text}"'


def _rule(name: str, lines: Sequence[str]) -> str:
    return "\n".join([f"rule {name}:", *(f"    {line}" for line in lines)])
