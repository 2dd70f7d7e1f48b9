"""Plans: a recipe with its options applied, frozen before anything runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from satlens.config import make, to_dict
from satlens.errors import ConfigError
from satlens.runner import RECORDS
from satlens.study.checks import check_measurable, without_absent_extras
from satlens.study.recipe import Recipe, is_local, model_config, train_config

PLAN = "plan.json"


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
    if minutes is not None and not 0 < minutes < math.inf:
        raise ConfigError(f"--minutes: must be positive, got {minutes:g}")
    asked = {
        "recipe": to_dict(recipe),
        "tokens": tokens,
        "minutes": minutes,
        "corpus": corpus,
        "cluster_field": cluster_field,
        "device": device,
    }
    asked = json.loads(json.dumps(asked))
    recipe = without_absent_extras(recipe)
    path = root / PLAN
    if path.exists():
        _require_records(root)
        plan = _read_plan(path)
        _require_same(path, plan["asked"], asked)
        resolved = dict(plan["recipe"])
    else:
        resolved = json.loads(json.dumps(to_dict(recipe)))
        if corpus is not None:
            resolved["corpus"] = str(Path(corpus).resolve()) if is_local(corpus) else corpus
        if cluster_field is not None:
            resolved["cluster_field"] = cluster_field
        if device is not None:
            resolved["device"] = device
        resolved["seeds"] = recipe.seeds if seeds is None else recipe.first_seeds(seeds)
        check_measurable(recipe)
        chosen = _arms(recipe, arch or [n for n, arm in recipe.arms.items() if not arm.optional])
        resolved |= _restricted(recipe, chosen)
        if minutes is not None:
            tokens = _calibrated(recipe, chosen, resolved["seeds"], minutes, workers)
        if tokens is not None:
            resolved["train"]["tokens"] = tokens
    if seeds is not None and seeds > _number(resolved["seeds"]):
        resolved["seeds"] = recipe.first_seeds(seeds)
    resolved |= _restricted(recipe, _arms(recipe, [*resolved["arms"], *arch]))
    made = make(Recipe, resolved, str(path))
    text = json.dumps({"asked": asked, "recipe": to_dict(made)}, indent=1)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        root.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    return made


def load_plan(root: Path) -> Recipe:
    """The frozen recipe of a study.

    Raises:
        ConfigError: the folder has no plan, or a damaged one.
    """
    path = root / PLAN
    if not path.exists():
        raise ConfigError(f"{path}: no such plan; satlens reproduce writes one")
    return make(Recipe, _read_plan(path)["recipe"], str(path))


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


def _number(seeds: int | Sequence[int]) -> int:
    return seeds if isinstance(seeds, int) else len(seeds)


def _calibrated(
    recipe: Recipe,
    chosen: Sequence[str],
    seeds: int | tuple[int, ...],
    minutes: float,
    workers: int,
) -> int:
    """Equal token budget of every run, in whole steps, that training takes ``minutes`` with."""
    from satlens.actions import tokens_a_minute

    planned = replace(recipe, seeds=seeds)
    arms = [(model_config(recipe, arm), len(planned.seeds_of(arm))) for arm in chosen]
    cfg = train_config(recipe, planned.seed_numbers[0])
    step = cfg.batch_size * cfg.grad_accum * arms[0][0].n_ctx
    tokens = tokens_a_minute(arms, cfg, workers) * minutes
    return max(1, int(tokens) // step) * step


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        return {"asked": plan["asked"], "recipe": plan["recipe"]}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: not a plan; delete it to plan anew") from None


def _require_records(root: Path) -> None:
    """Refuse tables that no record covers: every step would be stale, and its files cleared."""
    if (root / "results").is_dir() and not (root / RECORDS).is_dir():
        raise ConfigError(
            f"{root}: results: tables without the records of the steps that made them, as studies "
            "are shipped; choose another --out"
        )


def _require_same(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    field, had, asked = _first_difference("", old, {**old, **new})
    if field:
        raise ConfigError(
            f"{path}: {field}: this folder's plan has {_short(had)}, "
            f"asked for {_short(asked)}; choose another --out"
        )


def _first_difference(where: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Dotted name of the first field that differs, and both values; no name where none does."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return (where, old, new) if old != new else ("", None, None)
    for name in {**old, **new}:
        field = f"{where}.{name}" if where else name
        found = _first_difference(field, old.get(name), new.get(name))
        if found[0]:
            return found
    return "", None, None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
