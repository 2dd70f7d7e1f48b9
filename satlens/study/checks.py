"""What a plan is checked for before anything is trained: what would fail hours later."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

from satlens.config import ModelConfig
from satlens.errors import ConfigError, SatlensError
from satlens.study.recipe import Analysis, Arm, Recipe, model_config

_log = logging.getLogger(__name__)

_GIVEN = {"model", "models", "data", "run", "device", "progress", "resume_dir", "cache_dir"}
"""Arguments of analyses that a study gives itself."""


def without_absent_extras(recipe: Recipe) -> Recipe:
    """The recipe without scores on tasks where lm-eval is not installed; a line says so."""
    if find_spec("lm_eval") is not None:
        return recipe
    arms = {
        name: replace(arm, analyses=tuple(each for each in arm.analyses if each != "tasks"))
        for name, arm in recipe.arms.items()
    }
    if arms != recipe.arms:
        _log.warning(
            "left out: tasks: lm-eval is not installed (pip install 'satlens[eval]'; the same "
            "command then adds them)"
        )
    return replace(recipe, arms=arms)


def check_measurable(recipe: Recipe) -> None:
    """Refuse, before anything is trained, what would fail after it.

    Raises:
        ConfigError: an analysis of an arm without such a site, an option it does not have, a task
            or an intervention that cannot be.
    """
    for name, arm in recipe.arms.items():
        _check_arm(recipe, name, arm)
    if recipe.bench is not None:
        _check_bench(recipe)


def _check_arm(recipe: Recipe, name: str, arm: Arm) -> None:
    from inspect import signature

    from satlens.actions import analysis_function
    from satlens.analysis.analyze import DESCRIPTIVE, OTHERS
    from satlens.models.decoder import model_sites

    cfg = model_config(recipe, name)
    sites = model_sites(cfg)
    for analysis in arm.analyses:
        if not _has_sites(analysis, sites, arm.options.get(analysis, {})):
            raise ConfigError(f"arms.{name}.analyses: {analysis}: this arm has no such site")
    for analysis, options in arm.options.items():
        known = {*signature(analysis_function(analysis)).parameters} - _GIVEN
        where = f"arms.{name}.options.{analysis}"
        for option in options:
            if option not in known:
                raise ConfigError(f"{where}: no option {option!r}")
        if "interventions" in options:
            _check_interventions(f"{where}.interventions", options["interventions"], cfg)
    if "tasks" in arm.analyses:
        _check_tasks(f"arms.{name}.options.tasks", arm.options.get("tasks", {}))
    along = arm.options.get("trajectory", {}).get("analyses", ())
    if "trajectory" in arm.analyses and not (along and set(along) <= {*DESCRIPTIVE, *OTHERS}):
        raise ConfigError(
            f"arms.{name}.options.trajectory.analyses: name the analyses to follow, "
            f"got {list(along)}"
        )


def _check_interventions(where: str, given: Any, cfg: ModelConfig) -> None:
    """That interventions can be read, and that a model of this configuration has their places."""
    import torch

    from satlens.analysis.interventions.running import Running
    from satlens.analysis.interventions.spec import parse_interventions
    from satlens.models.decoder import Decoder

    with torch.device("meta"):  # its shape alone: nothing is computed
        model = Decoder(cfg)
    try:
        for intervention in parse_interventions(given):
            intervention.hooks(model, Running(model))
    except SatlensError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_tasks(where: str, options: dict[str, Any]) -> None:
    """That every task has a name that is known, and data that begins as it should."""
    from satlens.tasks.sources import local_rows
    from satlens.tasks.suite import task_names, task_spec

    names = options.get("tasks", "mqar")
    try:
        for spec in map(task_spec, task_names([names] if isinstance(names, str) else names)):
            if spec.n_pairs or options.get("hub"):
                continue
            if options.get("data_dir") is None:
                raise ConfigError(f"{where}: task {spec.name}: needs data_dir, or hub: true")
            local_rows(options["data_dir"], spec, spec.split, 1)
    except SatlensError as error:
        place = "" if isinstance(error, ConfigError) else f"{where}: "
        raise ConfigError(f"{place}{error}") from None


def _check_bench(recipe: Recipe) -> None:
    from inspect import signature

    import satlens

    known = {*signature(satlens.bench).parameters, *(f.name for f in fields(ModelConfig))}
    for option in recipe.bench or {}:
        if option not in known - {"progress", "fields"}:
            raise ConfigError(f"bench: no option {option!r}")
    if (recipe.bench or {}).get("steps", 2) < 2:
        raise ConfigError("bench: steps: quartiles need at least 2 rounds")


def _has_sites(analysis: Analysis, sites: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether a model with these access sites has what an analysis is about."""
    from satlens.analysis.categories import with_categories

    match analysis:
        case "evaluation" | "routes" | "tasks" | "token_view":
            return True
        case "circuits":
            return any(site.kind == "gate" for site in sites)
        case "categories":
            return bool(with_categories(sites))
        case "divergence" if options.get("over") != "sublayers":
            reads = [(s.layer, s.sublayer, s.sources) for s in sites if s.kind == "route"]
            return len(set(reads)) < len(reads)
        case "divergence":
            return True
    return bool(sites)
