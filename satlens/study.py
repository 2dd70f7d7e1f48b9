"""Studies: a recipe (YAML) says which arms are trained and what is measured on them.

    recipe + options -> plan.json (frozen) -> steps -> tables, figures, report under one folder

The folder of a study::

    plan.json                       what runs: corpus, arms, seeds, tokens, recipe
    data/                           the prepared corpus
    train/<arm>/seed<k>/            metrics.jsonl, final/ (the checkpoint), milestones/
    results/<arm>-seed<k>/          one table an analysis (CSV, JSON with provenance, figure)
    results/comparison.*            paired differences between arms
    report.html                     what was found, in words, figures and tables
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic.dataclasses import dataclass

from satlens.config import STRICT, ModelConfig, TrainConfig, make, to_dict
from satlens.errors import ConfigError
from satlens.runner import Display, Step, hash_path, run_steps, stale_steps

Analysis = Literal["evaluation", "sparsity", "routes", "categories", "divergence", "ablation"]
PLAN = "plan.json"
# Relative cost of a step, for the order of work and the estimate of what is left: seconds on one
# core at the tiny scale.
COSTS = {
    "evaluation": 8,
    "sparsity": 12,
    "routes": 25,
    "categories": 10,
    "divergence": 10,
    "ablation": 60,
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Arm:
    """One architecture of a study."""

    variant: str
    """Variant or preset name, as in ``satlens.build``."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields that differ from the variant and from the recipe's model."""
    analyses: tuple[Analysis, ...] = ("evaluation",)
    """What is measured on each trained seed."""
    options: dict[Analysis, dict[str, Any]] = field(default_factory=dict)
    """Further arguments of an analysis, by its name."""
    optional: bool = False
    """Whether the arm is left out unless it is asked for (``--arch``)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """What a study trains and measures."""

    name: str
    """Folder name of the study under ``runs/``."""
    title: str
    """Title of the report."""
    corpus: str = "sotu"
    """Embedded corpus or a path: text, folder, JSONL."""
    cluster_field: str = "cluster"
    """JSONL field of the larger work a document belongs to; ``id-prefix``: the id up to its last
    hyphen."""
    vocab_size: int = 2048
    """Tokens of the BPE trained on the training split."""
    seeds: int = 2
    """Paired seeds, 0 to seeds - 1."""
    device: str = "cpu"
    """Where models train and are measured: cpu, or cuda (then one process at a time is wise)."""
    model: dict[str, Any] = field(default_factory=dict)
    """Model fields common to all arms."""
    train: dict[str, Any] = field(default_factory=dict)
    """Fields of TrainConfig common to all arms."""
    arms: dict[str, Arm] = field(default_factory=dict)
    """Arms by name, in order."""
    contrasts: tuple[tuple[str, str], ...] = ()
    """Pairs of arms compared, first minus second; by default every arm with the first."""
    max_documents: int | None = None
    """Test documents that every analysis covers, a fixed sample; all where null."""
    slices: dict[Analysis, int] = field(default_factory=dict)
    """First tokens of every test document that each analysis covers; all where absent."""

    def __post_init__(self) -> None:
        for pair in self.contrasts:
            for arm in pair:
                if arm not in self.arms:
                    raise ValueError(f"contrasts: no arm {arm!r} among {', '.join(self.arms)}")
        if not self.arms:
            raise ValueError("arms: a study needs at least one")
        if self.seeds < 1:
            raise ValueError(f"seeds: must be positive, got {self.seeds}")


def load_recipe(name: str) -> Recipe:
    """A shipped recipe by name, or one from a YAML file.

    Raises:
        ConfigError: no such recipe or file, not YAML, an unknown or impossible field.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = recipes_folder() / f"{name}.yaml"
        if not path.exists():
            known = ", ".join(sorted(p.stem for p in recipes_folder().glob("*.yaml")))
            raise ConfigError(f"{name}: no such recipe; there are {known}, or give a YAML file")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of fields")
    return make(Recipe, values, str(path))


def recipes_folder() -> Path:
    """Where the shipped recipes are: in the package, or beside it in a source tree."""
    installed = Path(str(files("satlens"))) / "analyses"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "analyses"


# -- the plan --------------------------------------------------------------------------------------


def make_plan(
    recipe: Recipe,
    root: Path,
    *,
    arch: Sequence[str] = (),
    seeds: int | None = None,
    tokens: int | None = None,
    minutes: float | None = None,
    corpus: str | None = None,
    cluster_field: str | None = None,
    device: str | None = None,
    workers: int,
) -> Recipe:
    """The recipe with the options applied, frozen in ``plan.json``; a rerun uses the plan.

    More arms and seeds extend a plan; anything else that differs is refused, so nothing trained is
    lost.

    Args:
        arch: arms to run, ``all`` for every one; by default those that are not optional.
        minutes: time for training, turned once into equal token budgets for all runs by timing a
            few steps of every arm.
        workers: processes that will train side by side.

    Raises:
        ConfigError: the folder holds a plan for something else.
    """
    if tokens is not None and minutes is not None:
        raise ConfigError("--minutes: give either --tokens or --minutes")
    asked = {
        "recipe": to_dict(recipe),
        "tokens": tokens,
        "minutes": minutes,
        "corpus": corpus,
        "cluster_field": cluster_field,
        "device": device,
    }
    asked = json.loads(json.dumps(asked))
    path = root / PLAN
    if path.exists():
        plan = _read_plan(path)
        _require_same(path, plan["asked"], asked)
        resolved = dict(plan["recipe"])
    else:
        resolved = json.loads(json.dumps(to_dict(recipe)))
        if corpus is not None:
            resolved["corpus"] = corpus if corpus == "sotu" else str(Path(corpus).resolve())
        if cluster_field is not None:
            resolved["cluster_field"] = cluster_field
        if device is not None:
            resolved["device"] = device
        resolved["seeds"] = recipe.seeds if seeds is None else seeds
        _check_analyses(recipe)
        chosen = _arms(recipe, arch or [n for n, arm in recipe.arms.items() if not arm.optional])
        resolved |= _restricted(recipe, chosen)
        if minutes is not None:
            tokens = _calibrated(recipe, chosen, resolved["seeds"], minutes, workers)
        if tokens is not None:
            resolved["train"]["tokens"] = tokens
    if seeds is not None:
        resolved["seeds"] = max(seeds, resolved["seeds"])
    resolved |= _restricted(recipe, _arms(recipe, [*resolved["arms"], *arch]))
    made = make(Recipe, resolved, str(path))
    text = json.dumps({"asked": asked, "recipe": to_dict(made)}, indent=1)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        root.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    return made


def _arms(recipe: Recipe, names: Sequence[str]) -> list[str]:
    """Arms by name, in the recipe's order."""
    for name in names:
        if name != "all" and name not in recipe.arms:
            raise ConfigError(f"--arch {name}: {recipe.name} has {', '.join(recipe.arms)}, or all")
    return [name for name in recipe.arms if name in names or "all" in names]


def _restricted(recipe: Recipe, arms: Sequence[str]) -> dict[str, Any]:
    """The recipe's arms and contrasts, of these arms only."""
    contrasts = [pair for pair in recipe.contrasts if set(pair) <= set(arms)]
    kept = {name: to_dict(recipe.arms[name]) for name in arms}
    return json.loads(json.dumps({"arms": kept, "contrasts": contrasts}))


def _calibrated(
    recipe: Recipe, chosen: Sequence[str], seeds: int, minutes: float, workers: int
) -> int:
    """Equal token budget of every run, in whole steps, that training takes ``minutes`` with."""
    from satlens.actions import tokens_a_minute

    arms = [model_config(recipe, arm) for arm in chosen]
    cfg = train_config(recipe, 0)
    step = cfg.batch_size * cfg.grad_accum * arms[0].n_ctx
    tokens = tokens_a_minute(arms, cfg, workers) / seeds * minutes
    return max(1, int(tokens) // step) * step


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        return {"asked": plan["asked"], "recipe": plan["recipe"]}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: not a plan; delete it to plan anew") from None


def _require_same(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    for name in new:
        if old.get(name) != new[name]:
            raise ConfigError(
                f"{path}: {name}: this folder's plan has {_short(old.get(name))}, "
                f"asked for {_short(new[name])}; choose another --out"
            )


def _check_analyses(recipe: Recipe) -> None:
    """Refuse, before anything is trained, what would fail after it.

    Raises:
        ConfigError: an analysis of an arm without such a site, or an option it does not have.
    """
    from inspect import signature

    from satlens.actions import analysis_function
    from satlens.models.decoder import model_sites

    for name, arm in recipe.arms.items():
        sites = model_sites(model_config(recipe, name))
        for analysis in arm.analyses:
            if not _has_sites(analysis, sites, arm.options.get(analysis, {})):
                raise ConfigError(f"arms.{name}.analyses: {analysis}: this arm has no such site")
        for analysis, options in arm.options.items():
            known = signature(analysis_function(analysis)).parameters
            for option in options:
                if option not in known:
                    raise ConfigError(f"arms.{name}.options.{analysis}: no option {option!r}")


def _has_sites(analysis: Analysis, sites: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether a model with these access sites has what an analysis is about."""
    from satlens.analysis.categories import with_categories

    match analysis:
        case "evaluation" | "routes":
            return True
        case "categories":
            return bool(with_categories(sites))
        case "divergence" if options.get("over") != "sublayers":
            reads = [(s.layer, s.sublayer, s.sources) for s in sites if s.kind == "route"]
            return len(set(reads)) < len(reads)
        case "divergence":
            return True
    return bool(sites)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -- the steps -------------------------------------------------------------------------------------


def model_config(recipe: Recipe, arm: str) -> ModelConfig:
    """Configuration of one arm: the variant, the recipe's model fields, the arm's own."""
    from satlens.models.presets import config_for

    spec = recipe.arms[arm]
    return config_for(spec.variant, **{"d_vocab": recipe.vocab_size, **recipe.model, **spec.fields})


def train_config(recipe: Recipe, seed: int) -> TrainConfig:
    """Training configuration of one seed, the same for every arm."""
    return make(TrainConfig, {**recipe.train, "seed": seed, "n_threads": 1}, recipe.name)


def study_steps(recipe: Recipe) -> list[Step]:
    """Every step of a study, each after what it needs."""
    steps = _data_steps(recipe)
    for seed in range(recipe.seeds):
        for arm in recipe.arms:
            steps += _arm_steps(recipe, arm, seed)
    steps += _comparing_steps(recipe)
    results = tuple(s.id for s in steps if s.outputs[0].startswith("results/"))
    steps.append(_step("report", {"title": recipe.title}, results, ("report.html",), 10))
    return steps


def _data_steps(recipe: Recipe) -> list[Step]:
    """Prepare the corpus, and tag it in every way that some arm's categories ask for."""
    corpus: dict[str, Any] = {
        "corpus": recipe.corpus,
        "cluster_field": recipe.cluster_field,
        "vocab_size": recipe.vocab_size,
    }
    if recipe.corpus != "sotu":
        path = Path(recipe.corpus)
        if not path.exists():
            raise ConfigError(f"{path}: corpus: no such file or folder")
        corpus["sha256"] = hash_path(path)
    steps = [_step("data", corpus, (), ("data",), 40)]
    for folder, tagger in _taggers(recipe).items():
        params = {**tagger, "folder": folder, "slice": _slice(recipe, "categories")}
        steps.append(_step("tags", params, ("data",), (folder,), 40, step_id=folder))
    return steps


def _comparing_steps(recipe: Recipe) -> list[Step]:
    """Tables over all runs: paired differences where there are two arms, training curves."""
    runs = {arm: [f"train/{arm}/seed{k}" for k in range(recipe.seeds)] for arm in recipe.arms}
    needs = tuple(run for arm in runs.values() for run in arm)
    outputs = tuple(f"results/{name}" for name in _files("curves"))
    steps = [_step("curves", {"runs": runs}, needs, outputs, 5)]
    first, *others = recipe.arms
    contrasts = recipe.contrasts or tuple((other, first) for other in others)
    if contrasts:
        params = {
            "runs": runs,
            "contrasts": contrasts,
            "slice": _slice(recipe, "evaluation"),
            "device": recipe.device,
        }
        outputs = tuple(f"results/{name}" for name in _files("comparison"))
        steps.append(_step("comparison", params, ("data", *needs), outputs, 60))
    return steps


def _taggers(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Folder of tags -> tagger, of every way in which the arms' categories tag."""
    taggers = {}
    for arm in recipe.arms.values():
        if "categories" in arm.analyses:
            options = arm.options.get("categories", {})
            taggers[_tags_folder(options)] = {
                "tagger": options.get("tagger", "auto"),
                "entities": options.get("by") == "entity",
            }
    return taggers


def _tags_folder(options: dict[str, Any]) -> str:
    suffix = "-entities" if options.get("by") == "entity" else ""
    return f"tags/{options.get('tagger', 'auto')}{suffix}"


def _arm_steps(recipe: Recipe, arm: str, seed: int) -> list[Step]:
    run = f"train/{arm}/seed{seed}"
    model, train = to_dict(model_config(recipe, arm)), to_dict(train_config(recipe, seed))
    steps = [
        Step(
            id=run,
            action="satlens.actions:train",
            params={"model": model, "train": train, "run": run, "device": recipe.device},
            needs=("data",),
            # The whole folder: of other inputs, nothing of it may be continued from.
            outputs=(run,),
            weight=train["tokens"] / 6000,
        )
    ]
    for name in recipe.arms[arm].analyses:
        folder = f"results/{arm}-seed{seed}"
        options = recipe.arms[arm].options.get(name, {})
        tags = _tags_folder(options) if name == "categories" else None
        steps.append(
            Step(
                id=f"{folder}/{name}",
                action="satlens.actions:analyse",
                params={
                    "analysis": name,
                    "checkpoint": f"{run}/final",
                    "out": folder,
                    "slice": _slice(recipe, name),
                    "options": options,
                    "device": recipe.device,
                    **({} if tags is None else {"tags": tags}),
                },
                needs=(run, "data") if tags is None else (run, "data", tags),
                outputs=tuple(f"{folder}/{file}" for file in _files(name, _part(name, model))),
                weight=COSTS[name],
            )
        )
    return steps


def _slice(recipe: Recipe, name: Analysis) -> dict[str, int | None]:
    """The part of the test split that an analysis covers."""
    return {
        "max_documents": recipe.max_documents,
        "max_tokens_per_document": recipe.slices.get(name),
    }


def _step(
    name: str,
    params: dict[str, Any],
    needs: tuple[str, ...],
    outputs: tuple[str, ...],
    weight: float,
    step_id: str | None = None,
) -> Step:
    return Step(
        id=step_id or name,
        action=f"satlens.actions:{name}",
        params=params,
        needs=needs,
        outputs=outputs,
        weight=weight,
    )


def _files(name: str, part: str | None = None) -> tuple[str, ...]:
    """Files of a result: its table, provenance and figure, and the table of its part."""
    own = tuple(f"{name}.{ending}" for ending in ("csv", "json", "png", "pdf"))
    return own if part is None else (*own, f"{part}.csv", f"{part}.json")


def _part(name: str, model: dict[str, Any]) -> str | None:
    """The second table that an analysis writes on this model."""
    if name == "sparsity":
        from satlens.models.decoder import model_sites

        sites = model_sites(make(ModelConfig, model, name))
        return "route_weights" if any(site.kind == "route" for site in sites) else None
    return {"categories": "categories_contrasts", "routes": "routes_reads"}.get(name)


# -- running ---------------------------------------------------------------------------------------


def run_study(recipe: Recipe, root: Path, workers: int, display: Callable[[int], Any]) -> list[str]:
    """Bring a study up to date and return the ids of the steps that ran."""
    steps = study_steps(recipe)
    todo = stale_steps(root, steps)
    if not todo:
        return []
    with display(len(todo)) as shown:
        shown_display: Display = shown
        return run_steps(root, steps, workers, shown_display)
