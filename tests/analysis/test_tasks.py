"""Scores on tasks: against lm-eval's own numbers, under interventions, resumed, from the shell."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from lm_eval.evaluator import evaluate as harness

import satlens
from satlens.analysis import stats
from satlens.analysis.result import Result
from satlens.analysis.tasks import evaluate_tasks
from satlens.cli import main
from satlens.errors import AnalysisError, ConfigError, DataError, HookError
from satlens.interop import lm_eval as interop
from satlens.interop.lm_eval import passes as passes_module
from satlens.tasks.load import load_tasks

SAMPLES = Path(__file__).parents[1] / "tasks" / "samples"
FAST = {"n_resamples": 199}
CLOSED = "tiny/satformer + zero-gate"


@pytest.fixture(scope="module")
def model():
    return satlens.load("tiny/satformer")


@pytest.fixture(scope="module")
def closed(model) -> Result:
    """Recall with and without gates."""
    return evaluate_tasks(model, limit=32, interventions="zero-gate", **FAST)


def score(result: Result, task: str, metric: str, label: str = "tiny/satformer") -> float:
    table = result.table.set_index(["model", "task", "metric"])
    return table.loc[(label, task, metric), "score"]


# -- numbers ---------------------------------------------------------------------------------------


def test_scores_of_every_kind_of_task_are_those_of_lm_eval(model):
    names = ["lambada", "arc-easy", "wikitext", "drop", "mqar"]
    options = {"data_dir": SAMPLES, "limit": 4, "truncation": "truncate"}
    ours = evaluate_tasks(model, names, **options, **FAST)
    lm = interop.SatlensLM(model=model, truncation="truncate", progress=lambda *_: None)
    tasks = load_tasks(names, data_dir=SAMPLES, limit=4)
    given = {"tasks": {task.name: task.task for task in tasks}, "groups": {}}
    theirs = harness(lm, given, bootstrap_iters=0)["results"]
    compared = 0
    for task, metrics in theirs.items():
        for label, value in metrics.items():
            metric, _, name = label.partition(",")
            if name != "none" or metric.endswith("_stderr"):
                continue
            assert score(ours, task, metric) == pytest.approx(value, rel=1e-5), (task, metric)
            compared += 1
    assert compared == len(ours.table[~ours.table["task"].str.contains("mean of")]) >= 9
    assert set(ours.summary["prompt_hashes"]) == set(names)


def test_an_intervention_is_paired_with_the_model_it_changes(model, closed):
    with satlens.intervene(model, satlens.ZeroGate()):
        alone = evaluate_tasks(model, limit=32, **FAST)
    assert score(closed, "mqar", "acc", CLOSED) == score(alone, "mqar", "acc")
    (row,) = closed.part("task_differences").table.to_dict("records")
    assert (row["model"], row["baseline"]) == (CLOSED, "tiny/satformer")
    expected = score(closed, "mqar", "acc", CLOSED) - score(closed, "mqar", "acc")
    assert row["delta"] == pytest.approx(expected)
    assert row["n_documents"] == 8
    assert row["n_questions"] == 32
    assert closed.summary["models"][CLOSED]["interventions"] == "zero-gate"


def test_answers_give_the_scores_and_intervals_back(closed):
    answers = closed.part("task_answers").table
    assert len(answers) == 2 * 32
    mine = answers[answers["model"] == "tiny/satformer"]
    assert mine["value"].mean() == pytest.approx(score(closed, "mqar", "acc"))
    by_passage = mine.groupby("passage")["value"].agg(["sum", "size"])
    assert (by_passage["size"] == 4).all()
    interval = stats.ratio_interval(
        by_passage["sum"].to_numpy(), by_passage["size"].to_numpy(), n_resamples=199
    )
    row = closed.table.iloc[0]
    assert row["score_low"] == pytest.approx(float(interval.low))
    assert row["score_high"] == pytest.approx(float(interval.high))


def test_groups_are_run_whole_and_have_a_mean(model):
    options = {"data_dir": SAMPLES, "truncation": "truncate"}
    result = evaluate_tasks(model, "retrieval-twice", **options, **FAST)
    table = result.table.set_index("task")["score"]
    assert len(table) == 7
    assert table["retrieval-twice (mean of 6)"] == pytest.approx(table.iloc[:6].mean())
    assert len(result.summary["means"]["retrieval-twice (mean of 6)"]) == 6
    protocol = result.part("task_protocol").table.set_index("task")
    assert protocol["data"]["swde-twice"] == "swde.jsonl"
    assert protocol["prompt_hash"].nunique() == 6


def test_models_are_compared_with_the_first_or_as_asked():
    models = {"one": "tiny/satformer", "two": "tiny/transformer"}
    options = {"limit": 4, "interventions": ["zero-gate"], **FAST}
    result = evaluate_tasks(models, **options)
    pairs = result.part("task_differences").table[["model", "baseline"]].to_numpy().tolist()
    assert pairs == [["two", "one"], ["one + zero-gate", "one"]]
    assert result.summary["not_intervened"] == ["two"]
    assert "two: has nothing for the interventions." in result.notes
    result = evaluate_tasks(models, limit=4, contrasts=[("one", "two")], **FAST)
    pairs = result.part("task_differences").table[["model", "baseline"]].to_numpy().tolist()
    assert pairs == [["one", "two"]]


def test_examples_are_the_same_for_every_arm(model):
    options = {"data_dir": SAMPLES, "num_fewshot": 1, "truncation": "truncate", **FAST}
    result = evaluate_tasks({"one": model, "two": model}, "lambada", **options)
    differences = result.part("task_differences").table
    assert (differences["delta"] == 0).all()
    assert (differences["p"] == 1).all()
    assert result.part("task_protocol").table["num_fewshot"].item() == 1
    none = evaluate_tasks(model, "lambada", data_dir=SAMPLES, **FAST)
    assert none.summary["prompt_hashes"] != result.summary["prompt_hashes"]


# -- what does not fit -----------------------------------------------------------------------------


def test_long_prompts_are_an_error_or_counted(model, monkeypatch):
    monkeypatch.setattr(interop.SatlensLM, "loglikelihood", None)  # refused before it is asked
    with pytest.raises(DataError, match=r"mqar-64: question 0: \d+ tokens exceed"):
        evaluate_tasks(model, ["mqar", "mqar-64"], limit=2, **FAST)
    monkeypatch.undo()
    left_out = evaluate_tasks(model, "mqar-64", limit=2, truncation="skip", **FAST)
    assert left_out.table["n_skipped"].item() == 2
    assert left_out.table["n_questions"].item() == 0
    assert np.isnan(left_out.table["score"].item())
    assert any("mqar-64 2" in note for note in left_out.notes)
    cut = evaluate_tasks(model, "mqar-64", limit=2, truncation="truncate", **FAST)
    assert cut.table["n_truncated"].item() == 2
    assert cut.part("task_answers").table["truncated"].all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tasks": "mqarr"}, AnalysisError, "mqarr"),
        ({"tasks": "piqa"}, DataError, "piqa"),
        ({"interventions": "zero-gte"}, ConfigError, "zero-gte"),
        ({"interventions": "zero-gate:layer=40"}, HookError, "layer 40"),
        ({"contrasts": [("tiny/satformer", "other")]}, AnalysisError, "no model 'other'"),
        ({"n_resamples": 0}, AnalysisError, "n_resamples"),
        ({"num_fewshot": -1}, AnalysisError, "num_fewshot"),
        ({"truncation": "cut"}, ConfigError, "truncation"),
    ],
)
def test_what_cannot_be_asked_is_refused(model, options, error, message):
    with pytest.raises(error, match=message):
        evaluate_tasks(model, **{"limit": 8, **options})


def test_models_with_one_name_are_refused(model):
    with pytest.raises(AnalysisError, match="two are called 'tiny/satformer'"):
        evaluate_tasks([model, "tiny/satformer"])


# -- resuming, files, the shell --------------------------------------------------------------------


def test_a_killed_evaluation_continues_to_the_same_answers(model, closed, tmp_path, monkeypatch):
    options = {"limit": 32, "interventions": "zero-gate", "resume_dir": tmp_path, **FAST}
    passes = []

    def stop(stage: str, done: int, total: int) -> None:
        passes.append(stage)
        if stage.startswith(CLOSED) and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_tasks(model, progress=stop, **options)
    assert passes
    scored, score_batch = [], passes_module.score

    def counted(*arguments):
        scored.append(1)
        return score_batch(*arguments)

    monkeypatch.setattr(passes_module, "score", counted)
    again = evaluate_tasks(model, **options)
    n_batches = len(scored)
    assert n_batches > 0
    for part in ("task_answers", "task_differences"):
        assert again.part(part).csv() == closed.part(part).csv()
    assert again.csv() == closed.csv()
    evaluate_tasks(model, **options)
    assert len(scored) == n_batches  # now everything is known


def test_tables_come_back_from_files_with_their_provenance(closed, tmp_path):
    closed.save(tmp_path)
    again = Result.load(tmp_path, "tasks")
    assert again.table.equals(closed.table)
    assert [part.name for part in again.parts] == [
        "task_differences",
        "task_protocol",
        "task_answers",
    ]
    assert again.part("task_answers").table.equals(closed.part("task_answers").table)
    provenance = again.provenance
    assert provenance["checkpoint"]["sha256"]
    assert provenance["data"]["tasks"]["mqar"] == (
        closed.part("task_protocol").table["data_sha256"].item()
    )
    assert provenance["packages"]["lm-eval"]
    assert provenance["tokenizer"]


def run(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["satlens", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    out, err = capsys.readouterr()
    return code, out, err


def test_eval_without_options_scores_recall_and_prints_what_was_asked(
    closed, tmp_path, monkeypatch, capsys
):
    code, out, err = run(
        monkeypatch, capsys, "eval", "tiny/satformer", "--limit", "32",
        "--intervene", "zero-gate", "--out", tmp_path,
    )  # fmt: skip
    assert code == 0, err
    assert closed.summary["prompt_hashes"]["mqar"] in out
    saved = Result.load(tmp_path, "tasks")
    assert saved.table["score"].equals(closed.table["score"])
    assert (tmp_path / "tasks.png").stat().st_size > 5_000


def test_eval_against_another_checkpoint_subtracts_it(tmp_path, monkeypatch, capsys):
    code, out, err = run(
        monkeypatch, capsys, "eval", "tiny/satformer", "--tasks", "lambada,winogrande",
        "--task-data", SAMPLES, "--against", "tiny/transformer", "--json", "--out", tmp_path,
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["contrasts"] == [["tiny/satformer", "tiny/transformer"]]
    assert set(json.loads(out)["versions"]) == {"lambada", "winogrande"}


def test_options_that_do_nothing_are_refused_in_one_line(monkeypatch, capsys):
    for arguments, message in (
        (("--data", "sotu", "--limit", "3"), "--limit: goes with tasks, not with --data"),
        (("--data", "sotu", "--tasks", "mqar"), "--tasks: goes with tasks"),
        (("--data", "sotu", "--intervene", "zero-gate"), "--intervene: goes with tasks"),
        (("--split", "val"), "--split: goes with --data"),
    ):
        code, out, err = run(monkeypatch, capsys, "eval", "tiny/satformer", *arguments)
        assert code == 1
        assert message in err
        assert len(err.strip().splitlines()) == 1
        assert not out


def test_without_lm_eval_one_line_says_what_to_install(monkeypatch, capsys):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a)
    )
    code, _, err = run(monkeypatch, capsys, "eval", "tiny/satformer")
    assert code == 1
    assert "pip install 'satlens[eval]'" in err
    assert len(err.strip().splitlines()) == 1


def test_chance_is_of_the_questions_that_were_scored(tmp_path):
    rows = [
        {
            "question": f"{'long words ' * 300 if k < 3 else 'short'} {k}?",
            "choices": {"text": [f"a{i}" for i in range(n)], "label": list("ABCDE"[:n])},
            "answerKey": "A",
        }
        for k, n in enumerate((2, 2, 2, 5, 5))
    ]
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "arc-easy.jsonl").write_text(text, encoding="utf-8")
    model = satlens.load("tiny/satformer")
    result = satlens.evaluate_tasks(model, ["arc-easy"], data_dir=tmp_path, truncation="skip")
    row = result.table.iloc[0]
    assert (row["n_questions"], row["n_skipped"]) == (2, 3)
    assert row["chance"] == pytest.approx(1 / 5)
