"""Recipes with listed seeds; plans and steps of studies that began before a field came."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from satlens.errors import ConfigError
from satlens.study import load_plan, load_recipe, make_plan, study_steps


def test_seeds_may_be_listed(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "name: a\ntitle: b\nseeds: [123, 7, 2025]\nanalysis_seeds: {evaluation: 1}\n"
        "arms:\n  x: {variant: transformer}\n  y: {variant: satformer, seeds: 2}\n"
    )
    recipe = load_recipe(str(path))
    assert (recipe.seeds_of("x"), recipe.seeds_of("y")) == ((123, 7, 2025), (123, 7))
    plan = make_plan(recipe, tmp_path / "run", seeds=2, workers=1)
    assert load_plan(tmp_path / "run").seed_numbers == plan.seed_numbers == (123, 7)
    assert make_plan(recipe, tmp_path / "run", seeds=1, workers=1) == plan
    grown = make_plan(recipe, tmp_path / "run", seeds=3, workers=1)
    assert grown.seed_numbers == (123, 7, 2025)
    steps = {step.id: step for step in study_steps(grown)}
    assert {name for name in steps if name.startswith("train/")} == {
        *(f"train/x/seed{k}" for k in (123, 7, 2025)),
        *(f"train/y/seed{k}" for k in (123, 7)),
    }
    assert steps["train/x/seed2025"].params["train"]["seed"] == 2025
    assert "results/x-seed123/evaluation" in steps
    assert "results/x-seed7/evaluation" not in steps
    with pytest.raises(ConfigError, match=r"--seeds 4: a has 3: \(123, 7, 2025\)"):
        make_plan(recipe, tmp_path / "run", seeds=4, workers=1)


def test_fields_that_came_later_leave_finished_steps_up_to_date():
    """What these steps were told before there were strategies, data workers and checkpointing."""
    recipe = load_recipe("tiny")
    steps = {step.id: step for step in study_steps(recipe)}
    told = steps["train/satformer/seed1"].params["train"]
    assert set(told) == {
        "tokens", "batch_size", "grad_accum", "lr", "min_lr_ratio", "schedule", "warmup", "betas",
        "weight_decay", "no_decay", "clip", "precision", "compile", "seed", "eval_every",
        "eval_tokens", "log_every", "checkpoint_every", "milestones", "n_threads",
        "deterministic", "on_nonfinite",
    }  # fmt: skip
    assert set(steps["data"].params) == {"corpus", "cluster_field", "vocab_size"}
    shared = replace(recipe, train={**recipe.train, "data_workers": 2})
    other = {step.id: step for step in study_steps(shared)}
    assert other["train/satformer/seed1"].params["train"]["data_workers"] == 2


@pytest.mark.parametrize("name", ["satformer", "rd-attnres"])
def test_plans_of_finished_studies_still_fit_their_recipes(name, tmp_path):
    stored = Path(__file__).parent.parent / "studies" / name / "plan.json"
    (tmp_path / "plan.json").write_text(stored.read_text())
    plan = make_plan(load_recipe(name), tmp_path, workers=1)
    assert plan.seed_numbers == tuple(range(6))
