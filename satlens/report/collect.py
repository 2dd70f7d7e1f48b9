"""What a run directory holds, and what it should hold and does not."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from satlens.analysis.result import Result
from satlens.errors import AnalysisError, DataError

PLAN = "plan.json"
CHECKPOINT_ANALYSES = (
    "evaluation",
    "sparsity",
    "routes",
    "categories",
    "divergence",
    "ablation",
    "attribution",
    "circuits",
    *(f"trajectory_{name}" for name in ("sparsity", "routes", "categories", "divergence")),
)
STUDY_RESULTS = ("comparison", "curves", "bench")


class _Along(TypedDict, total=False):
    analyses: list[str]


class _Options(TypedDict, total=False):
    trajectory: _Along


class _Arm(TypedDict, total=False):
    variant: str
    fields: dict[str, Any] | None
    analyses: list[str]
    options: _Options
    seeds: int | None


class _Recipe(TypedDict, total=False):
    """What a report reads of the recipe in a plan."""

    name: str
    seeds: int
    model: dict[str, Any]
    train: dict[str, Any]
    arms: dict[str, _Arm]
    analysis_seeds: dict[str, int]
    slices: dict[str, int]


class Missing(NamedTuple):
    """A result that is not there, and why."""

    name: str
    arm: str | None
    seed: int | None
    reason: str


@dataclass
class Run:
    """Everything that a report is made of."""

    root: Path
    recipe: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe of ``plan.json``; empty without one."""
    arms: list[str] = field(default_factory=list)
    seeds: dict[str, list[int]] = field(default_factory=dict)
    results: dict[tuple[str, int, str], Result] = field(default_factory=dict)
    """By (arm, seed, analysis)."""
    study: dict[str, Result] = field(default_factory=dict)
    """Results about all arms together: comparison, curves."""
    training: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """``run.json`` of each (arm, seed)."""
    missing: list[Missing] = field(default_factory=list)

    def of(self, analysis: str) -> dict[str, dict[int, Result]]:
        """Results of one analysis: arm -> seed -> result, arms in the order of the plan."""
        found: dict[str, dict[int, Result]] = {}
        for arm in self.arms:
            seeds = {
                seed: self.results[arm, seed, analysis]
                for seed in self.seeds.get(arm, [])
                if (arm, seed, analysis) in self.results
            }
            if seeds:
                found[arm] = seeds
        return found

    @property
    def name(self) -> str:
        """Name of the study; of its folder where it has no plan."""
        return str(self.recipe.get("name") or self.root.resolve().name)

    def place(self, result: Result) -> str:
        """Where the table of one of these results is, relative to the run."""
        folders = [(f"results/{arm}-seed{k}", each) for (arm, k, _), each in self.results.items()]
        folders += [("results", each) for each in self.study.values()]
        for folder, each in folders:
            if any(found is result for found in (each, *each.parts)):
                return f"{folder}/{result.name}.csv"
        raise ValueError(f"{result.name}: no result of this run")

    def variant(self, arm: str) -> str:
        """Variant name of an arm."""
        return str(self.recipe.get("arms", {}).get(arm, {}).get("variant", arm))

    def n_parameters(self, arm: str) -> int | None:
        """Parameters of an arm, from the header of its checkpoint; None without one."""
        for seed in self.seeds.get(arm, []):
            path = self.root / "train" / arm / f"seed{seed}" / "final" / "model.safetensors"
            if path.exists():
                return _stored_numbers(path)
        return None


def collect(root: str | Path) -> Run:
    """Load every result under a run directory; what is missing or damaged is listed, not raised.

    Raises:
        DataError: no such folder, or one with neither a plan nor results; an unreadable plan.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root}: no such run directory")
    run = Run(root, recipe=_recipe(root / PLAN))
    found = _on_disk(root)
    if not run.recipe and not found:
        raise DataError(f"{root}: holds neither {PLAN} nor results/")
    planned = run.recipe.get("arms", {})
    run.arms = [*planned, *sorted({arm for arm, _ in found if arm not in planned})]
    for arm in run.arms:
        n_seeds = _planned_seeds(run.recipe, arm) if arm in planned else 0
        run.seeds[arm] = sorted({*range(n_seeds), *(k for name, k in found if name == arm)})
        for seed in run.seeds[arm]:
            _load_checkpoint_results(run, arm, seed)
    for name in STUDY_RESULTS:
        expected = bool(run.recipe.get("bench")) if name == "bench" else bool(planned)
        _load(run, root / "results", name, None, None, expected=expected)
    return run


def _planned_seeds(recipe: dict[str, Any], arm: str) -> int:
    """Seeds that the plan gives an arm."""
    every, own = recipe.get("seeds", 0), recipe["arms"][arm].get("seeds")
    return every if own is None else min(every, own)


def _stored_numbers(path: Path) -> int | None:
    """Numbers in a safetensors file: the shapes are in its JSON header."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None  # the loader of checkpoints says what is wrong with the file
    return sum(math.prod(shape) for shape in shapes)


def _recipe(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not JSON ({str(error).splitlines()[0]})") from None
    recipe = plan.get("recipe") if isinstance(plan, dict) else None
    if not isinstance(recipe, dict):
        raise DataError(f"{path}: field recipe is missing")
    try:
        TypeAdapter(_Recipe).validate_python(recipe, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, ("recipe", *fault["loc"])))
        raise DataError(f"{path}: {field}: {fault['msg']}") from None
    return recipe


def _on_disk(root: Path) -> list[tuple[str, int]]:
    """(arm, seed) of every folder ``results/<arm>-seed<k>``."""
    pairs = []
    for folder in sorted((root / "results").glob("*-seed*")):
        arm, _, seed = folder.name.rpartition("-seed")
        if folder.is_dir() and arm and seed.isdecimal():
            pairs.append((arm, int(seed)))
    return pairs


def _load_checkpoint_results(run: Run, arm: str, seed: int) -> None:
    spec = run.recipe.get("arms", {}).get(arm, {})
    limits = run.recipe.get("analysis_seeds", {})
    expected = {name for name in spec.get("analyses", ()) if seed < limits.get(name, seed + 1)}
    along = spec.get("options", {}).get("trajectory", {}).get("analyses", ())
    expected |= {f"trajectory_{name}" for name in along if "trajectory" in expected}
    folder = run.root / "results" / f"{arm}-seed{seed}"
    for name in CHECKPOINT_ANALYSES:
        _load(run, folder, name, arm, seed, expected=name in expected)
    path = run.root / "train" / arm / f"seed{seed}" / "run.json"
    if path.exists():
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            run.missing.append(Missing("run.json", arm, seed, "not readable"))
        else:
            run.training[arm, seed] = facts if isinstance(facts, dict) else {}


def _load(
    run: Run, folder: Path, name: str, arm: str | None, seed: int | None, *, expected: bool
) -> None:
    there = (folder / f"{name}.csv").exists() or (folder / f"{name}.json").exists()
    if not there:
        if expected:
            run.missing.append(Missing(name, arm, seed, "planned and not run"))
        return
    try:
        result = Result.load(folder, name)
    except AnalysisError as error:
        where = str(run.root) + "/"
        run.missing.append(Missing(name, arm, seed, f"not readable ({error})".replace(where, "")))
        return
    if arm is None or seed is None:
        run.study[name] = result
    else:
        run.results[arm, seed, name] = result
