"""The steps of a study, each after what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from satlens.config import ModelConfig, TrainConfig, make, to_dict
from satlens.errors import ConfigError
from satlens.runner import Display, Step, hash_path, run_steps, stale_steps
from satlens.shipped import shipped_folder
from satlens.study.recipe import Analysis, Recipe, is_local, model_config, train_config

# Relative cost of a step, for the order of work and the estimate of what is left: seconds on one
# core at the tiny scale.
COSTS = {
    "evaluation": 8,
    "sparsity": 12,
    "routes": 25,
    "categories": 10,
    "divergence": 10,
    "ablation": 60,
    "attribution": 80,
    "circuits": 25,
    "trajectory": 60,
    "tasks": 10,
    "token_view": 10,
}


def study_steps(recipe: Recipe) -> list[Step]:
    """Every step of a study, each after what it needs."""
    steps = _data_steps(recipe)
    for seed in recipe.seed_numbers:
        for arm in recipe.arms:
            if seed in recipe.seeds_of(arm):
                steps += _arm_steps(recipe, arm, seed)
    steps += _comparing_steps(recipe)
    results = tuple(s.id for s in steps if s.outputs[0].startswith("results/"))
    scripts = {path.stem: hash_path(path) for path in figure_scripts()}
    steps.append(_step("figures", {"scripts": scripts}, results, ("figures",), 20))
    page = ("report.html", "results/claims.csv", "results/claims.json")
    steps.append(_step("report", {"title": recipe.title}, (*results, "figures"), page, 10))
    return steps


def figure_scripts() -> list[Path]:
    """The scripts that draw figures; their text is part of the key of the ``figures`` step."""
    return sorted(shipped_folder("figures").glob("*.py"))


def _data_steps(recipe: Recipe) -> list[Step]:
    """Prepare the corpus, and tag it in every way that some arm's categories ask for."""
    corpus: dict[str, Any] = {
        "corpus": recipe.corpus,
        "cluster_field": recipe.cluster_field,
        "vocab_size": recipe.vocab_size,
    }
    # Steps of recipes without these fields are what they were before there were any.
    given = {"tokenizer": recipe.tokenizer, "tokenizer_sample": recipe.tokenizer_sample}
    corpus |= {name: value for name, value in given.items() if value is not None}
    if recipe.tokenizer is not None:
        corpus["tokenizer_sha256"] = _file_hash(recipe.tokenizer, "tokenizer")
    if is_local(recipe.corpus):
        path = Path(recipe.corpus)
        if not path.exists():
            raise ConfigError(f"{path}: corpus: no such file or folder")
        corpus["sha256"] = hash_path(path)
    steps = [_step("data", corpus, (), ("data",), 40)]
    for folder, tagger in _taggers(recipe).items():
        params = {**tagger, "folder": folder, "slice": _slice(recipe, "categories")}
        steps.append(_step("tags", params, ("data",), (folder,), 40, step_id=folder))
    return steps


def _file_hash(file: str, field: str) -> str:
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{path}: {field}: no such file")
    return hash_path(path)


def _comparing_steps(recipe: Recipe) -> list[Step]:
    """Tables over all runs: paired differences where there are two arms, training curves."""
    runs = {arm: [f"train/{arm}/seed{k}" for k in recipe.seeds_of(arm)] for arm in recipe.arms}
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
        files = _files("comparison", ["comparison_milestones"])
        outputs = tuple(f"results/{name}" for name in files)
        steps.append(_step("comparison", params, ("data", *needs), outputs, 60))
    if recipe.bench is not None:
        outputs = tuple(f"results/{name}" for name in _files("bench"))
        steps.append(_step("bench", _timed(recipe), (), outputs, 120))
    return steps


def _timed(recipe: Recipe) -> dict[str, Any]:
    """Arguments of the timing: every variant among the arms, at the recipe's size."""
    plain = [arm.variant for arm in recipe.arms.values() if not arm.fields]
    sizes = {"d_vocab": recipe.vocab_size, **recipe.model}
    train = train_config(recipe, 0)
    settings = {"batch_size": train.batch_size, "precision": train.precision}
    return {"variants": plain, **sizes, **settings, **(recipe.bench or {})}


def _taggers(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Folder of tags -> tagger, of every way in which the arms' categories tag."""
    taggers = {}
    for arm in recipe.arms.values():
        if "categories" in arm.analyses:
            options = arm.options.get("categories", {})
            taggers[_tags_folder(options)] = {
                "tagger": options.get("tagger", "auto"),
                "entities": "entity" in options.get("by", ()),
            }
    return taggers


def _tags_folder(options: dict[str, Any]) -> str:
    suffix = "-entities" if "entity" in options.get("by", ()) else ""
    return f"tags/{options.get('tagger', 'auto')}{suffix}"


def _arm_steps(recipe: Recipe, arm: str, seed: int) -> list[Step]:
    run = f"train/{arm}/seed{seed}"
    model, train = to_dict(model_config(recipe, arm)), _told(train_config(recipe, seed))
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
        if seed not in recipe.seeds_measured(arm, name):
            continue
        folder = f"results/{arm}-seed{seed}"
        options = recipe.arms[arm].options.get(name, {})
        own = _own_params(recipe, name, options, f"{arm} (seed {seed})")
        steps.append(
            Step(
                id=f"{folder}/{name}",
                action=f"satlens.actions:{name if name in _OWN_ACTION else 'analyse'}",
                params={
                    "analysis": name,
                    "checkpoint": run if name == "trajectory" else f"{run}/final",
                    "out": folder,
                    "options": options,
                    "device": recipe.device,
                    **own,
                },
                needs=(run, *_needs(name, own)),
                outputs=tuple(f"{folder}/{file}" for file in _written(name, options, model)),
                weight=COSTS[name],
            )
        )
    return steps


def _told(cfg: TrainConfig) -> dict[str, Any]:
    """Fields of a training configuration that its step is told.

    Those that came later are left out where they are as they were before: steps that are done stay
    up to date.
    """
    defaults, values = TrainConfig(), to_dict(cfg)
    later = [f for f in _LATER_FIELDS if values[f] == getattr(defaults, f)]
    return {name: value for name, value in values.items() if name not in later}


_LATER_FIELDS = ("strategy", "gradient_checkpointing", "data_workers")
_OWN_ACTION = ("trajectory", "tasks", "token_view")


def _own_params(
    recipe: Recipe, name: Analysis, options: dict[str, Any], label: str
) -> dict[str, Any]:
    """What a step of this analysis is given beside what every one is.

    Args:
        label: of the model, where a table names it.

    Raises:
        ConfigError: a folder of tasks that is not there.
    """
    match name:
        case "tasks":
            folder = options.get("data_dir")
            if folder is None:
                return {"label": label}
            if not Path(folder).is_dir():
                raise ConfigError(f"{folder}: data_dir: no such folder")
            return {"label": label, "sha256": hash_path(Path(folder))}
        case "token_view":
            return {}
        case "categories":
            return {"slice": _slice(recipe, name), "tags": _tags_folder(options)}
    return {"slice": _slice(recipe, name)}


def _needs(name: Analysis, own: dict[str, Any]) -> tuple[str, ...]:
    """What a step of this analysis reads beside the checkpoint."""
    if name == "tasks":
        return ()
    return ("data", own["tags"]) if "tags" in own else ("data",)


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


def _files(name: str, parts: Sequence[str] = ()) -> tuple[str, ...]:
    """Files of a result: its table, provenance and figure, and the tables of its parts."""
    own = (f"{name}.{ending}" for ending in ("csv", "json", "png", "pdf"))
    return (*own, *(f"{part}.{ending}" for part in parts for ending in ("csv", "json")))


def _written(name: str, options: dict[str, Any], model: dict[str, Any]) -> tuple[str, ...]:
    """Files that an analysis with these options writes on this model."""
    if name != "trajectory":
        return _files(name, _parts(name, options, model))
    own = options.get("options", {})
    return tuple(
        file
        for each in options.get("analyses", ())
        for file in _files(
            f"trajectory_{each}",
            [f"trajectory_{part}" for part in _parts(each, own.get(each, {}), model)],
        )
    )


def _parts(name: str, options: dict[str, Any], model: dict[str, Any]) -> list[str]:
    """The further tables of an analysis."""
    match name:
        case "sparsity":
            from satlens.models.decoder import model_sites

            sites = model_sites(make(ModelConfig, model, name))
            return ["route_weights"] if any(site.kind == "route" for site in sites) else []
        case "routes":
            return ["routes_reads"]
        case "circuits":
            return ["circuits_lens", "circuits_pairs"]
        case "tasks":
            compared = ["task_differences"] if options.get("interventions") else []
            return [*compared, "task_protocol", "task_answers"]
        case "token_view":
            return ["token_channels", "token_values"]
        case "ablation":
            return ["ablation_categories"] if options.get("by") else []
        case "categories":
            drivers = ["categories_drivers"] if options.get("drivers", True) else []
            return ["categories_contrasts", *drivers]
    return []


def run_study(recipe: Recipe, root: Path, workers: int, display: Callable[[int], Any]) -> list[str]:
    """Bring a study up to date and return the ids of the steps that ran."""
    steps = study_steps(recipe)
    todo = stale_steps(root, steps)
    if not todo:
        return []
    with display(len(todo)) as shown:
        shown_display: Display = shown
        return run_steps(root, steps, workers, shown_display)
