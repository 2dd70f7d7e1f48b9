"""What a run directory holds, and what it should hold and does not."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from satlens.analysis.result import Result
from satlens.errors import AnalysisError, DataError
from satlens.report.effects import NO_SEED

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
    "tasks",
    "token_view",
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


def _listed(seeds: Any) -> Any:
    """Seeds of a recipe, which says how many from 0 or which."""
    return list(range(seeds)) if isinstance(seeds, int) else seeds


class _Recipe(TypedDict, total=False):
    """What a report reads of the recipe in a plan."""

    name: str
    seeds: Annotated[list[int], BeforeValidator(_listed)]
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
    """Everything that a report is made of: a study, results of one command, or several of both."""

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
    others: dict[str, Result] = field(default_factory=dict)
    """Results of a plain folder that no section is about, by what they are called."""
    folders: dict[tuple[str, int], Path] = field(default_factory=dict)
    """Where the results of an (arm, seed) are; a study's are in ``results/<arm>-seed<k>``."""
    variants: dict[str, str] = field(default_factory=dict)
    """Variant of an arm that no recipe plans, from the checkpoint that it was measured on."""
    page: Path | None = None
    """Folder of the page, whose links lead to files beside it."""
    runs: dict[str, Run] = field(default_factory=dict)
    """By label, what a comparison is made of; empty for a single run."""
    origins: dict[str, tuple[Run, str]] = field(default_factory=dict)
    """In a comparison: the run and the arm there of every arm."""

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
        planned = self.recipe.get("arms", {}).get(arm, {}).get("variant")
        return str(planned or self.variants.get(arm, arm))

    @property
    def is_plain(self) -> bool:
        """Whether this is a folder that analyses wrote to, no study."""
        return not self.recipe and not self.runs and not (self.root / "results").is_dir()

    def origin(self, arm: str) -> tuple[Run, str]:
        """The run that an arm is from, and its name there."""
        return self.origins.get(arm, (self, arm))

    def folder(self, arm: str, seed: int) -> Path:
        """Folder of the results of one checkpoint."""
        return self.folders.get((arm, seed), self.root / "results" / f"{arm}-seed{seed}")

    def n_parameters(self, arm: str) -> int | None:
        """Parameters of an arm, from the header of its checkpoint; None without one."""
        if arm in self.origins:
            run, name = self.origins[arm]
            return run.n_parameters(name)
        for seed in self.seeds.get(arm, []):
            path = self.root / "train" / arm / f"seed{seed}" / "final" / "model.safetensors"
            if path.exists():
                return _stored_numbers(path)
        return None


def collect(root: str | Path, name: str | None = None) -> Run:
    """Load every result under a run directory; what is missing or damaged is listed, not raised.

    A folder that an analysis wrote its table to (its ``--out``) is a run too: one arm a
    checkpoint, named after the folder, without seeds.

    Args:
        name: of the arm of such a folder, in place of the folder's.

    Raises:
        DataError: no such folder, or one with no plan and no results; an unreadable plan.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root}: no such run directory")
    run = Run(root, recipe=_recipe(root / PLAN))
    found = _on_disk(root)
    if not run.recipe and not found:
        _load_plain(run, name or root.resolve().name)
        if run.results or run.study or run.others:
            return run
        raise DataError(f"{root}: holds neither {PLAN} nor results/ nor the table of an analysis")
    planned = run.recipe.get("arms", {})
    run.arms = [*planned, *sorted({arm for arm, _ in found if arm not in planned})]
    for arm in run.arms:
        seeds = _planned_seeds(run.recipe, arm) if arm in planned else []
        run.seeds[arm] = sorted({*seeds, *(k for name, k in found if name == arm)})
        for seed in run.seeds[arm]:
            _load_checkpoint_results(run, arm, seed)
    for name in STUDY_RESULTS:
        expected = bool(run.recipe.get("bench")) if name == "bench" else bool(planned)
        _load(run, root / "results", name, None, None, expected=expected)
    return run


def _planned_seeds(recipe: dict[str, Any], arm: str) -> list[int]:
    """Seeds that the plan gives an arm."""
    return _listed(recipe.get("seeds", 0))[: recipe["arms"][arm].get("seeds")]


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
    limits, seeds = run.recipe.get("analysis_seeds", {}), _listed(run.recipe.get("seeds", 0))
    place = seeds.index(seed) if seed in seeds else len(seeds)
    expected = {name for name in spec.get("analyses", ()) if place < limits.get(name, place + 1)}
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


def _load_plain(run: Run, name: str) -> None:
    """Every table in the folder itself; those of one checkpoint are one arm."""
    tables = sorted(path for path in run.root.glob("*.csv") if path.with_suffix(".json").exists())
    loaded: dict[str, Result] = {}
    for path in tables:
        try:
            loaded[path.stem] = Result.load(path)
        except AnalysisError as error:
            where = f"{run.root}/"
            reason = f"not readable ({error})".replace(where, "")
            run.missing.append(Missing(path.stem, name, NO_SEED, reason))
    if run.missing and not loaded:
        raise DataError(f"{run.root}: {run.missing[0].name}: {run.missing[0].reason}")
    parts = {part.name for result in loaded.values() for part in result.parts}
    whole = {kind: result for kind, result in loaded.items() if kind not in parts}
    arms = _checkpoint_names(whole, name)
    for kind, result in whole.items():
        if kind in STUDY_RESULTS:
            run.study[kind] = result
        elif kind not in CHECKPOINT_ANALYSES:
            run.others[f"{kind} of {name}"] = result
        else:
            arm = arms.get(_checkpoint(result), next(iter(arms.values()), name))
            run.results[arm, NO_SEED, kind] = result
            run.seeds.setdefault(arm, [NO_SEED])
            run.folders[arm, NO_SEED] = run.root
            variant = (result.provenance.get("checkpoint") or {}).get("variant")
            if variant:
                run.variants.setdefault(arm, str(variant))
    run.arms = list(run.seeds)


def _checkpoint(result: Result) -> str | None:
    """What tells the checkpoint of a result from others; None for results about several."""
    return (result.provenance.get("checkpoint") or {}).get("sha256")


def _checkpoint_names(results: dict[str, Result], name: str) -> dict[str | None, str]:
    """A name for every checkpoint: ``name``, with the checkpoint's own where there are several."""
    found = {
        sha256: str(result.provenance["checkpoint"].get("checkpoint") or sha256[:8])
        for result in results.values()
        if (sha256 := _checkpoint(result)) is not None
    }
    if len(found) < 2:
        return dict.fromkeys(found, name)
    own = list(found.values())
    return {
        sha256: f"{name}: {label}" + (f" {sha256[:8]}" if own.count(label) > 1 else "")
        for sha256, label in found.items()
    }


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
