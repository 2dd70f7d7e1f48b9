"""Configurations by name: an arm of a recipe, or the folder of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from satlens.config import ModelConfig, TrainConfig, make, to_dict
from satlens.errors import ConfigError
from satlens.shipped import shipped_folder
from satlens.study.recipe import Recipe, load_recipe, model_config, train_config


class Configured(NamedTuple):
    """What one run is."""

    name: str
    """The arm, or the folder of the run."""
    model: ModelConfig
    train: TrainConfig
    device: str | None
    """Where the recipe trains: cpu or cuda; None where the address says nothing of it."""
    differ: tuple[str, ...]
    """Fields that the recipe's arms are meant to differ in, beside the architecture."""


def configured(
    address: str,
    *,
    seed: int | None = None,
    model: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
) -> Configured:
    """The configuration at one address; see :func:`configurations`.

    Raises:
        ConfigError: as there; a recipe of several arms, none of which is named.
    """
    found = configurations(address, seed=seed, model=model, train=train)
    if len(found) > 1:
        arms = ", ".join(f"{address}/{each.name}" for each in found)
        raise ConfigError(f"{address}: has several arms: {arms}")
    return found[0]


def configurations(
    address: str,
    *,
    seed: int | None = None,
    model: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
) -> list[Configured]:
    """The configurations at an address: all arms of a recipe, one of them, or what a run was.

    Args:
        address: ``RECIPE`` (its arms without the optional ones), ``RECIPE/ARM``, where a recipe is
            a shipped one's name or a YAML file; or the folder of a run.
        seed: by default the recipe's first, or the run's.
        model: fields of the model to change, as in :func:`satlens.models.presets.config_for`.
        train: fields of the training configuration to change.

    Raises:
        ConfigError: no such recipe, arm or run; an unknown field or an impossible value.
    """
    model = model or {}
    train = (train or {}) | ({} if seed is None else {"seed": seed})
    if (Path(address) / "run.json").is_file():
        return [_of_run(address, model, train)]
    recipe, arms = _arms(address)
    made = train_config(recipe, recipe.seed_numbers[0], train)
    differ = recipe.differ or ()
    return [
        Configured(arm, model_config(recipe, arm, model), made, recipe.device, differ)
        for arm in arms
    ]


def _of_run(folder: str, model: dict[str, Any], train: dict[str, Any]) -> Configured:
    from satlens.models.presets import change
    from satlens.training.run_folder import read_run

    record = read_run(folder)
    where = f"{Path(folder) / 'run.json'}"
    for part in ("model", "train"):
        if not isinstance(record.get(part), dict):
            raise ConfigError(f"{where}: {part}: missing or no object")
    cfg = make(ModelConfig, record["model"], f"{where}: model")
    return Configured(
        Path(folder).resolve().name,
        change(cfg, model, f"{where}: model") if model else cfg,
        make(TrainConfig, {**record["train"], **train}, f"{where}: train"),
        record.get("device"),
        (),
    )


def _arms(address: str) -> tuple[Recipe, list[str]]:
    """The recipe at an address, and the arms of it that are meant."""
    if Path(address).suffix in (".yaml", ".yml") or "/" not in address:
        recipe = load_recipe(address)
        return recipe, [name for name, arm in recipe.arms.items() if not arm.optional]
    name, _, arm = address.rpartition("/")
    recipe = load_recipe(name)
    if arm not in recipe.arms:
        raise ConfigError(f"{address}: no arm {arm!r}; {name} has {', '.join(recipe.arms)}")
    return recipe, [arm]


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with satlens."""
    return sorted(path.stem for path in shipped_folder("analyses").glob("*.yaml"))


def config_differences(first: Configured, second: Configured) -> list[tuple[str, Any, Any]]:
    """Dotted fields in which two configurations differ, with both values (None where absent)."""
    fields = [
        dict(_flat("", {"model": to_dict(c.model), "train": to_dict(c.train)}))
        for c in (first, second)
    ]
    names = dict.fromkeys(name for each in fields for name in each)
    pairs = [(name, *(each.get(name) for each in fields)) for name in names]
    return [(name, one, other) for name, one, other in pairs if one != other]


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(f"{name}.{key}" if name else key, inner)
