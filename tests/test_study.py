"""Recipes and plans: what a study will do, before it does it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from satlens.errors import ConfigError
from satlens.study import (
    load_plan,
    load_recipe,
    make_plan,
    model_config,
    study_steps,
    train_config,
)


@pytest.fixture
def recipe():
    return load_recipe("tiny")


def test_the_shipped_recipe_builds_and_its_arms_differ_in_architecture_only(recipe):
    configs = {arm: model_config(recipe, arm) for arm in recipe.arms}
    assert {c.variant for c in configs.values()} == {
        "transformer",
        "resformer",
        "satformer",
        "attnres",
        "rd_attnres",
        "denseformer",
        "muddformer",
        "hyperconnections",
        "delta_attnres",
    }
    shared = {
        str(c.with_changes(value_residual={"kind": "none"}, stream={"kind": "residual"}))
        for c in configs.values()
    }
    assert len(shared) == 1
    assert next(iter(configs.values())).n_layers == 8
    assert recipe.seeds >= 2
    assert train_config(recipe, 1).seed == 1


def test_every_step_follows_what_it_needs_and_writes_its_own_files(recipe):
    steps = study_steps(recipe)
    seen, written = set(), set()
    for step in steps:
        assert set(step.needs) <= seen, step.id
        assert not written.intersection(step.outputs), step.id
        seen.add(step.id)
        written.update(step.outputs)
    assert "report" in seen


def test_figures_follow_every_result_and_depend_on_their_scripts(recipe, tmp_path, monkeypatch):
    steps = {step.id: step for step in study_steps(recipe)}
    figures = steps["figures"]
    measured = {name for name in steps if name.startswith("results/")}
    assert {*measured, "comparison", "curves"} == set(figures.needs)
    assert set(steps["report"].needs) == {*figures.needs, "figures"}
    assert "open_gates_by_depth" in figures.params["scripts"]
    (tmp_path / "one.py").write_text("")
    monkeypatch.setattr("satlens.study.steps.shipped_folder", lambda name: tmp_path)
    changed = {step.id: step.params for step in study_steps(recipe)}
    assert list(changed["figures"]["scripts"]) == ["one"]
    assert [name for name in steps if steps[name].params != changed[name]] == ["figures"]


def test_the_plan_of_a_folder_is_read_back(recipe, tmp_path):
    plan = make_plan(recipe, tmp_path, seeds=1, tokens=20_480, workers=1)
    assert load_plan(tmp_path) == plan
    with pytest.raises(ConfigError, match=r"plan\.json: no such plan; satlens reproduce writes"):
        load_plan(tmp_path / "elsewhere")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"plan\.json: not a plan"):
        load_plan(tmp_path)


def test_a_plan_is_frozen_and_grows_by_seeds_only(recipe, tmp_path):
    plan = make_plan(recipe, tmp_path, seeds=1, tokens=20_480, workers=2)
    assert (plan.seeds, plan.train["tokens"]) == (1, 20_480)
    before = (tmp_path / "plan.json").read_text()
    assert make_plan(recipe, tmp_path, seeds=1, tokens=20_480, workers=1) == plan
    assert (tmp_path / "plan.json").read_text() == before

    assert make_plan(recipe, tmp_path, seeds=3, tokens=20_480, workers=2).seeds == 3
    assert make_plan(recipe, tmp_path, tokens=20_480, workers=2).seeds == 3
    with pytest.raises(ConfigError, match=r"plan\.json: tokens: .* choose another --out"):
        make_plan(recipe, tmp_path, tokens=40_960, workers=2)
    with pytest.raises(ConfigError, match=r"plan\.json: corpus"):
        make_plan(recipe, tmp_path, tokens=20_480, corpus="other.txt", workers=2)
    assert json.loads((tmp_path / "plan.json").read_text())["recipe"]["corpus"] == "sotu"


def test_optional_arms_run_when_asked_for_and_extend_a_plan(recipe, tmp_path):
    plan = make_plan(recipe, tmp_path, workers=1)
    assert list(plan.arms) == ["transformer", "resformer", "satformer", "attnres", "rd-attnres"]
    assert ("denseformer", "transformer") not in plan.contrasts
    more = make_plan(recipe, tmp_path, arch=["denseformer"], workers=1)
    assert list(more.arms) == [*plan.arms, "denseformer"]
    assert ("denseformer", "transformer") in more.contrasts
    assert make_plan(recipe, tmp_path, workers=1) == more
    assert make_plan(recipe, tmp_path, arch=["all"], workers=1).arms == recipe.arms
    few = make_plan(recipe, tmp_path / "few", arch=["attnres", "transformer"], workers=1)
    assert list(few.arms) == ["transformer", "attnres"]
    assert few.contrasts == (("attnres", "transformer"),)
    with pytest.raises(ConfigError, match=r"--arch mudd: tiny has transformer, .*, or all"):
        make_plan(recipe, tmp_path / "bad", arch=["mudd"], workers=1)


def test_minutes_become_equal_whole_step_budgets_once(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("satlens.actions.tokens_a_minute", lambda arms, cfg, workers: 10_000.0)
    plan = make_plan(recipe, tmp_path, minutes=2.5, seeds=1, workers=2)
    assert plan.train["tokens"] == 25_000 // 1024 * 1024
    monkeypatch.setattr("satlens.actions.tokens_a_minute", lambda arms, cfg, workers: 1.0)
    assert make_plan(recipe, tmp_path, minutes=2.5, seeds=1, workers=2) == plan
    with pytest.raises(ConfigError, match="--minutes"):
        make_plan(recipe, tmp_path / "x", minutes=1.0, tokens=5, workers=2)


def test_bad_recipes_name_file_and_field(tmp_path):
    with pytest.raises(ConfigError, match=r"no such recipe; there are .*tiny, zoo"):
        load_recipe("tinny")
    path = tmp_path / "bad.yaml"
    for text, message in (
        ("name: a\ntitle: b\nsedes: 3\n", r"unknown field 'sedes' \(did you mean 'seeds'\?\)"),
        ("name: a\ntitle: b\narms: {x: {variant: t}}\nseeds: 0\n", "seeds: must be positive"),
        ("name: a\ntitle: b\narms: {x: {variant: t, seeds: 0}}\n", r"arms\.x\.seeds: must be pos"),
        ("name: a\ntitle: b\n", "arms: a study needs at least one"),
        ("name: a\ntitle: b\nseeds: []\narms: {x: {variant: t}}\n", "seeds: some, each once"),
        ("name: a\ntitle: b\nseeds: [1, 1]\narms: {x: {variant: t}}\n", r"got \[1, 1\]"),
        ("name: a\ntitle: b\ntokenizer_sample: 2\narms: {x: {variant: t}}\n", "tokenizer_sample"),
        (
            "name: a\ntitle: b\nmilestones: [0.5]\ntrain: {milestones: [9]}\n"
            "arms: {x: {variant: t}}\n",
            "milestones: give shares here or tokens in train.milestones",
        ),
        ("name: a\ntitle: b\ncontrasts: [[x, y]]\n", "contrasts: no arm 'x'"),
        ("name: [", "bad.yaml"),
        ("- a\n", "expected a mapping"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_recipe(str(path))


def test_a_missing_corpus_is_one_line(recipe, tmp_path):
    plan = make_plan(recipe, tmp_path, corpus="absent.jsonl", workers=1)
    with pytest.raises(ConfigError, match=r"absent\.jsonl: corpus: no such file"):
        study_steps(plan)


def test_changed_parameters_of_a_step_change_its_key_alone(recipe):
    longer = replace(recipe, slices={**recipe.slices, "ablation": 99})
    old = {s.id: s.params for s in study_steps(recipe)}
    new = {s.id: s.params for s in study_steps(longer)}
    changed = {name for name in old if old[name] != new[name]}
    assert changed
    assert all(name.endswith("/ablation") for name in changed)


def recipe_of(tmp_path, arms: str) -> object:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: a\ntitle: b\nseeds: 1\narms:\n{arms}")
    return load_recipe(str(path))


def test_arms_are_compared_with_the_first_one_and_a_single_arm_with_none(tmp_path):
    two = recipe_of(tmp_path, "  x: {variant: transformer}\n  y: {variant: satformer}\n")
    steps = {s.id: s for s in study_steps(two)}
    assert steps["comparison"].params["contrasts"] == (("y", "x"),)
    one = recipe_of(tmp_path, "  x: {variant: transformer}\n")
    assert "comparison" not in {s.id for s in study_steps(one)}


def test_every_way_of_tagging_has_its_own_folder(tmp_path):
    recipe = recipe_of(
        tmp_path,
        "  x: {variant: satformer, analyses: [categories]}\n"
        "  y: {variant: satformer, analyses: [categories],"
        " options: {categories: {tagger: wordlist}}}\n",
    )
    steps = {s.id: s for s in study_steps(recipe)}
    assert steps["tags/wordlist"].params["tagger"] == "wordlist"
    assert "tags/wordlist" in steps["results/y-seed0/categories"].needs
    assert "tags/auto" in steps["results/x-seed0/categories"].needs


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("{variant: transformer, analyses: [sparsity]}", "sparsity: this arm has no such site"),
        ("{variant: attnres, analyses: [divergence]}", "divergence: this arm has no such site"),
        ("{variant: denseformer, analyses: [categories]}", "categories: this arm has no such"),
        ("{variant: satformer, options: {sparsity: {x: 1}}}", "sparsity: no option 'x'"),
        (
            "{variant: attnres, analyses: [tasks], options: {tasks: {interventions: [zero-gate]}}}",
            r"options\.tasks\.interventions: ZeroGate: this model \(attnres\) has no gates",
        ),
        (
            "{variant: satformer, options: {token_view: {interventions: ['zero-gate:layer=40']}}}",
            r"options\.token_view\.interventions: ZeroGate: layer 40: no gate there",
        ),
        (
            "{variant: satformer, options: {tasks: {interventions: [zero-gates]}}}",
            r"intervention 'zero-gates': unknown kind .* did you mean zero-gate",
        ),
        (
            "{variant: transformer, analyses: [tasks], options: {tasks: {tasks: [mqaar]}}}",
            r"options\.tasks: no task 'mqaar' \(did you mean 'mqar'",
        ),
        (
            "{variant: transformer, analyses: [tasks], options: {tasks: {tasks: [piqa]}}}",
            "task piqa: needs data_dir, or hub: true",
        ),
        (
            "{variant: satformer, analyses: [trajectory],"
            " options: {trajectory: {analyses: [tasks]}}}",
            r"trajectory\.analyses: name the analyses to follow, got \['tasks'\]",
        ),
    ],
)
def test_what_would_fail_after_training_is_refused_before_it(tmp_path, arm, message):
    recipe = recipe_of(tmp_path, f"  x: {arm}\n")
    with pytest.raises(ConfigError, match=message):
        make_plan(recipe, tmp_path / "study", workers=1)
    assert not (tmp_path / "study").exists()


def test_every_arm_writes_the_tables_that_its_analyses_make(tmp_path):
    recipe = recipe_of(
        tmp_path,
        "  x: {variant: transformer, analyses: [routes]}\n"
        "  y: {variant: muddformer, analyses: [sparsity, divergence, routes]}\n"
        "  z: {variant: attnres, analyses: [divergence],"
        " options: {divergence: {over: sublayers}}}\n",
    )
    steps = {s.id: s for s in study_steps(make_plan(recipe, tmp_path / "study", workers=1))}
    written = {path.rpartition("/")[2] for path in steps["results/x-seed0/routes"].outputs}
    assert {"routes.csv", "routes.png", "routes_reads.csv", "routes_reads.json"} <= written
    assert "results/y-seed0/route_weights.csv" in steps["results/y-seed0/sparsity"].outputs


def test_tasks_and_token_views_are_measured_as_the_recipe_says(recipe):
    steps = {s.id: s for s in study_steps(recipe)}
    tasks, view = (steps[f"results/satformer-seed0/{name}"] for name in ("tasks", "token_view"))
    written = {path.rpartition("/")[2] for path in (*tasks.outputs, *view.outputs)}
    assert {"tasks.csv", "task_differences.csv", "task_protocol.json"} <= written
    assert {"token_view.csv", "token_channels.csv", "token_values.json"} <= written
    assert tasks.params["label"] == "satformer (seed 0)"
    assert tasks.needs == ("train/satformer/seed0",)
    assert view.needs == ("train/satformer/seed0", "data")
    assert "results/satformer-seed1/token_view" not in steps
    alone = steps["results/transformer-seed0/tasks"].outputs
    assert not any("task_differences" in path for path in alone)


def test_tasks_are_scored_anew_when_their_data_change(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    file = folder / "sciq.jsonl"
    row = {"question": "Which?", "correct_answer": "a", "support": ""}
    row |= {f"distractor{k}": "b" for k in (1, 2, 3)}
    file.write_text(json.dumps(row) + "\n")
    options = f"options: {{tasks: {{tasks: sciq, data_dir: {folder}}}}}"
    recipe = recipe_of(tmp_path, f"  x: {{variant: transformer, analyses: [tasks], {options}}}\n")

    def keyed():
        return {s.id: s.params for s in study_steps(make_plan(recipe, tmp_path / "run", workers=1))}

    before = keyed()
    file.write_text(json.dumps(row | {"support": "a"}) + "\n")
    changed = keyed()
    assert [name for name in before if before[name] != changed[name]] == ["results/x-seed0/tasks"]
    file.write_text(json.dumps({**row, "question": 1}) + "\n")
    with pytest.raises(ConfigError, match=r"options\.tasks: .*sciq\.jsonl: line 1.*question"):
        make_plan(recipe, tmp_path / "another", workers=1)
    file.unlink()
    folder.rmdir()
    with pytest.raises(ConfigError, match="tasks: data_dir: no such folder"):
        keyed()


def test_without_lm_eval_a_plan_leaves_tasks_out_and_adds_them_later(
    recipe, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("satlens.study.checks.find_spec", lambda name: None)
    plan = make_plan(recipe, tmp_path, workers=1)
    assert not any(step.id.endswith("/tasks") for step in study_steps(plan))
    assert caplog.messages == [
        "left out: tasks: lm-eval is not installed (pip install 'satlens[eval]'; the same command "
        "then adds them)"
    ]
    monkeypatch.undo()
    monkeypatch.setattr("satlens.study.checks.find_spec", lambda name: name)
    more = make_plan(recipe, tmp_path, workers=1)
    assert "results/satformer-seed0/tasks" in {step.id for step in study_steps(more)}


@pytest.mark.parametrize("name", ["satformer", "rd-attnres"])
def test_recipes_of_papers_pair_every_contrast_and_stay_within_their_seeds(name, tmp_path):
    plan = make_plan(load_recipe(name), tmp_path, workers=1)
    steps = {s.id: s for s in study_steps(plan)}
    for first, second in plan.contrasts:
        assert set(plan.seeds_of(first)) & set(plan.seeds_of(second))
    few = next(arm for arm, spec in plan.arms.items() if spec.seeds is not None)
    assert f"train/{few}/seed{plan.arms[few].seeds - 1}" in steps
    assert f"train/{few}/seed{plan.arms[few].seeds}" not in steps
    assert steps["comparison"].params["runs"][few] == [
        f"train/{few}/seed{k}" for k in range(plan.arms[few].seeds)
    ]
    most = plan.analysis_seeds["trajectory"]
    assert f"results/{name}-seed{most - 1}/trajectory" in steps
    assert f"results/{name}-seed{most}/trajectory" not in steps
    assert f"results/{name}-seed{plan.seeds - 1}/sparsity" in steps
    fewer = make_plan(load_recipe(name), tmp_path / "one", seeds=1, workers=1)
    assert list(fewer.seeds_of(few)) == [0]
    assert "results/bench.csv" in steps["bench"].outputs
    assert set(steps["bench"].params["variants"]) <= {arm.variant for arm in plan.arms.values()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: ../out\narms: {x: {variant: transformer}}\n", "name: a name has 1 to 40 letters"),
        ("name: a\narms: {'x; touch y': {variant: transformer}}\n", "arms.x; touch y: a name has"),
        ("name: a\narms: {all: {variant: transformer}}\n", "arms.all: a name has"),
        ("name: a\nmax_documents: 0\narms: {x: {variant: transformer}}\n", "max_documents: must"),
        (
            "name: a\nslices: {tasks: 9}\narms: {x: {variant: transformer}}\n",
            "slices.tasks: its size is arms.*.options.tasks.limit",
        ),
        ("name: a\nslices: {sparsity: -1}\narms: {x: {variant: transformer}}\n", "slices.sparsity"),
        (
            "name: a\narms: {x: {variant: transformer}}\ncontrasts: [[x, x]]\n",
            "contrasts: ['x', 'x']: two different arms",
        ),
        (
            "name: a\narms: {x: {variant: transformer, analyses: [evaluation, evaluation]}}\n",
            "arms.x.analyses: each analysis once",
        ),
    ],
)
def test_what_would_fail_hours_later_is_refused_in_the_recipe(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"title: b\n{text}")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bench": {"nope": 1}}, "bench: no option 'nope'"),
        ({"bench": {"steps": 1}}, "bench: steps: quartiles need at least 2"),
    ],
)
def test_a_plan_checks_what_the_timing_is_given(recipe, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(replace(recipe, **changes), tmp_path, workers=1)
    assert not (tmp_path / "plan.json").exists()


def test_a_plan_checks_options_that_the_study_gives_itself(tmp_path):
    for options, message in (
        ("{sparsity: {model: 1}}", "no option 'model'"),
        ("{}", r"options\.trajectory\.analyses: name the analyses"),
    ):
        recipe = recipe_of(
            tmp_path,
            "  x: {variant: satformer, analyses: [sparsity, trajectory], options: "
            + options
            + "}\n",
        )
        with pytest.raises(ConfigError, match=message):
            make_plan(recipe, tmp_path / "run", workers=1)


@pytest.mark.parametrize("minutes", [0.0, -3.0, float("nan"), float("inf")])
def test_minutes_are_positive(recipe, tmp_path, minutes):
    with pytest.raises(ConfigError, match="--minutes: must be positive"):
        make_plan(recipe, tmp_path, minutes=minutes, workers=1)


def test_a_plan_that_differs_names_the_field(recipe, tmp_path):
    make_plan(recipe, tmp_path, workers=1)
    arms = {**recipe.arms, "attnres": replace(recipe.arms["attnres"], analyses=("evaluation",))}
    with pytest.raises(ConfigError, match=r"recipe\.arms\.attnres\.analyses: this folder's plan"):
        make_plan(replace(recipe, arms=arms), tmp_path, workers=1)


def test_tables_without_records_are_never_cleared(recipe, tmp_path):
    """A study as it is shipped: its tables would all be stale."""
    make_plan(recipe, tmp_path, workers=1)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/curves.csv").write_text("kept")
    with pytest.raises(ConfigError, match="results: tables without the records"):
        make_plan(recipe, tmp_path, workers=1)
    assert (tmp_path / "results/curves.csv").read_text() == "kept"
