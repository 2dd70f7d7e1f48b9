"""Tasks in lm-eval, unplugged: an oracle scores 1, guessing scores chance, data keep their name."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import socket
import string
from typing import Any

import pytest

from satlens.errors import AnalysisError, DataError
from satlens.tasks.load import load_tasks
from satlens.tasks.suite import GROUPS, RECALL, RETRIEVAL, ZERO_SHOT, task_spec

pytest.importorskip("lm_eval")

import datasets
import lm_eval.tasks
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks._yaml_loader import load_yaml

ALL = [*(name for group in GROUPS.values() for name in group), *RECALL]
SCORED_BY_ANSWER = ("acc", "acc_norm", "contains")

pytestmark = pytest.mark.usefixtures("unplugged")


def right_answer(name: str, row: dict[str, Any]) -> list[str]:
    """What the sample says is right: read from its fields, not asked of the task."""
    match task_spec(name).data:
        case "lambada":
            return [row["text"].rsplit(" ", 1)[1]]
        case "piqa":
            return [row[f"sol{row['label'] + 1}"]]
        case "hellaswag":
            return [row["endings"][int(row["label"])]]
        case "winogrande":
            return [row[f"option{row['answer']}"]]
        case "arc-easy" | "arc-challenge" | "openbookqa":
            choices = dict(zip(row["choices"]["label"], row["choices"]["text"], strict=True))
            return [choices[row["answerKey"]]]
        case "boolq":
            return ["yes" if row["label"] else "no"]
        case "sciq":
            return [row["correct_answer"]]
        case "swde" | "fda" | "squad-completion":
            return [row["value"]]
        case "nq" | "triviaqa" | "drop":
            return row["answers"][:1]
        case _:
            # Recall is solved from the text that a model sees: the last word with a colon is asked.
            pairs = dict(re.findall(r"(\w+): (\w+)\.", row["context"]))
            return [pairs[row["query"]]]


class Oracle(LM):
    """Knows what is right; certain of it, and of nothing else."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def loglikelihood(self, requests):
        out = []
        for request in requests:
            context, continuation = request.args
            (right,) = right_answer(self.name, request.doc)
            chosen = (
                context.endswith(right)
                if self.name == "winogrande"
                else (continuation == f" {right}")
            )
            out.append((0.0, True) if chosen else (-100.0, False))
        return out

    def loglikelihood_rolling(self, requests):
        return [0.0] * len(requests)

    def generate_until(self, requests):
        return [f" {right_answer(self.name, r.doc)[0].upper()}, it says." for r in requests]


def loaded(name: str, samples, **options: Any):
    (task,) = load_tasks([name], data_dir=samples, **options)
    return task


def test_the_network_is_off():
    with pytest.raises(AssertionError, match="network"), socket.socket() as plug:
        plug.connect(("127.0.0.1", 9))


@pytest.mark.parametrize("name", ALL)
def test_an_oracle_scores_one(name, samples):
    task = loaded(name, samples, limit=24)
    result = evaluate(Oracle(name), {"tasks": {name: task.task}, "groups": {}}, bootstrap_iters=0)
    scores = {key.partition(",")[0]: value for key, value in result["results"][name].items()}
    assert [scores[m] for m in SCORED_BY_ANSWER if m in scores] == [
        1.0 for m in SCORED_BY_ANSWER if m in scores
    ]
    perplexities = [scores[m] for m in scores if m.endswith("perplexity")]
    assert perplexities == [1.0] * len(perplexities)
    assert perplexities or any(m in scores for m in SCORED_BY_ANSWER)


def guess(request, dice: random.Random) -> Any:
    if request.request_type == "generate_until":
        return "".join(dice.choices(string.ascii_lowercase + " ", k=48))
    return dice.gauss(-9, 3), False


@pytest.mark.parametrize("name", [name for name in ALL if name != "wikitext"])
def test_guessing_scores_chance(name, samples):
    task = loaded(name, samples)
    metric = "contains" if "contains" in task.task.aggregation() else "acc"
    task.task.build_all_requests()
    by_doc: dict[int, list] = {}
    for request in task.task.instances:
        by_doc.setdefault(request.doc_id, []).append(request)
    dice = random.Random(1)
    repeats = 4 if name == "mqar" else 100
    scores = [
        task.task.process_results(requests[0].doc, [guess(r, dice) for r in requests])[metric]
        for requests in by_doc.values()
        for _ in range(repeats)
    ]
    chance = task.chance(metric)
    assert abs(sum(scores) / len(scores) - chance) <= 4 * math.sqrt(
        chance * (1 - chance) / len(scores)
    )
    assert chance == pytest.approx(task.spec.chance, abs=0.03)  # ARC has questions of 3 and 5


def test_a_metric_without_chance_says_so(samples):
    assert math.isnan(loaded("wikitext", samples).chance("word_perplexity"))
    assert math.isnan(loaded("lambada", samples).chance("perplexity"))


def test_chance_is_the_mean_over_questions(samples):
    assert loaded("arc-easy", samples).chance("acc") == pytest.approx(
        (1 / 4 * 2 + 1 / 3 + 1 / 5) / 4
    )


@pytest.mark.parametrize("name", [n for n in ALL if task_spec(n).base])
def test_prompt_metric_and_version_are_those_of_lm_eval(name, samples):
    """Against its definitions: what differs is the name and where the rows come from."""
    spec = task_spec(name)
    base = load_yaml(f"{lm_eval.tasks.__path__[0]}/{spec.base}")
    task = loaded(name, samples).task
    if "class" in base:
        assert isinstance(task, base["class"])
        hub = (base["class"].DATASET_PATH, base["class"].DATASET_NAME)
        assert base["class"].VERSION == task.VERSION
    else:
        hub = (base["dataset_path"], base.get("dataset_name"))
        for key in ("doc_to_text", "doc_to_target", "doc_to_choice", "metric_list", "output_type"):
            assert getattr(task.config, key) == base.get(key)
        assert base["metadata"]["version"] == task.VERSION
        scored = base.get("test_split") or base["validation_split"]
        assert spec.split == scored
        assert spec.fewshot_split == base.get("training_split")
    assert spec.hub == hub


def test_lm_eval_fills_its_prompts_with_our_rows(samples):
    prompts = {n: loaded(n, samples).task for n in ("piqa", "hellaswag", "boolq", "swde")}
    texts = {n: task.doc_to_text(task.eval_docs[0]) for n, task in prompts.items()}
    assert texts["piqa"] == "Question: To keep a drawer from sticking,\nAnswer:"
    assert texts["hellaswag"] == "Flying a kite: A girl stands on a hill with a kite. She"
    assert texts["boolq"].endswith(
        "\nQuestion: is the lighthouse at grey point made of granite?\nAnswer:"
    )
    assert texts["swde"].endswith("granite.\n Summary of information above...\n height:")


@pytest.mark.parametrize("name", [n for n in ALL if task_spec(n).base is None and n != "mqar"])
def test_our_generations_end_at_the_line_or_48_tokens(name, samples):
    task = loaded(name, samples).task
    task.build_all_requests()
    for request in task.instances:
        settings = request.args[1]
        assert (settings["until"], settings["max_gen_toks"]) == (["\n"], 48)
        assert not settings["do_sample"]
        assert request.args[0] == request.args[0].rstrip()


def test_clusters_name_the_passages(samples):
    sizes = {
        name: [task.clusters.count(c) for c in dict.fromkeys(task.clusters)]
        for name in ALL
        for task in [loaded(name, samples, limit=10)]
    }
    assert sizes["swde"] == sizes["fda-twice"] == sizes["boolq"] == [2, 2]
    assert (
        sizes["squad-completion"] == sizes["nq"] == sizes["drop-twice"] == sizes["sciq"] == [2, 1]
    )
    assert sizes["hellaswag"] == [2, 1, 1]
    assert sizes["mqar"] == [4, 4, 2]
    assert sizes["piqa"] == [1] * 4
    assert loaded("nq", samples).clusters == loaded("nq-twice", samples).clusters


def test_data_are_named_by_their_rows_not_their_file(samples, tmp_path):
    (tmp_path / "nq").mkdir()
    rows = [json.loads(line) for line in (samples / "nq.jsonl").read_text().splitlines()]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "nq" / "validation.parquet")
    here, there = loaded("nq", samples), loaded("nq", tmp_path)
    assert here.data_sha256 == there.data_sha256
    assert (here.source, there.source) == (
        str(samples / "nq.jsonl"),
        str(tmp_path / "nq" / "validation.parquet"),
    )
    assert here.data_sha256 != loaded("nq", samples, limit=2).data_sha256
    assert load_tasks(["mqar"])[0].source == "built in"
    assert load_tasks(["mqar"])[0].data_sha256 != load_tasks(["mqar"], seed=1)[0].data_sha256


def test_examples_never_hold_the_question_itself(samples):
    for name in ("lambada", "nq", "swde-twice", "mqar"):
        task = loaded(name, samples, limit=3 if name == "nq" else 4, num_fewshot=2).task
        task.build_all_requests()
        for request in task.instances:
            own = task.doc_to_text(request.doc)
            assert request.args[0].count(own) == 1
            assert request.args[0].endswith(f"\n\n{own}")


def test_examples_of_a_task_with_a_training_split_come_from_there(samples, tmp_path):
    folder = tmp_path / "piqa"
    folder.mkdir()
    shutil.copy(samples / "piqa.jsonl", folder / "validation.jsonl")
    with pytest.raises(DataError, match=r"no piqa/train"):
        loaded("piqa", tmp_path, num_fewshot=1)
    train = json.dumps({"goal": "TRAIN", "sol1": "a", "sol2": "b", "label": 1})
    (folder / "train.jsonl").write_text(train)
    with pytest.raises(DataError, match=r"train\.jsonl: 1 rows are too few for 1 examples"):
        loaded("piqa", tmp_path, num_fewshot=1)
    (folder / "train.jsonl").write_text(f"{train}\n{train}")
    task = loaded("piqa", tmp_path, num_fewshot=1)
    task.task.build_all_requests()
    assert task.task.instances[0].args[0].startswith("Question: TRAIN\nAnswer: b\n\nQuestion: To")
    assert task.data_sha256 != loaded("piqa", tmp_path).data_sha256


@pytest.mark.parametrize("name", ["swde", "fda", "squad-completion"])
def test_tasks_that_take_no_examples_say_so(name, samples):
    with pytest.raises(AnalysisError, match=f"task '{name}': .* without examples"):
        loaded(name, samples, num_fewshot=1)


def test_too_few_questions_for_the_examples_are_refused(samples):
    with pytest.raises(DataError, match="3 rows are too few for 3 examples"):
        loaded("nq", samples, num_fewshot=3)


def test_nothing_is_downloaded_unless_asked(samples, sample_rows, monkeypatch):
    asked = []

    def hub(*args, **options):
        asked.append((*args, options["split"]))
        return datasets.Dataset.from_list(sample_rows("nq"))

    monkeypatch.setattr(datasets, "load_dataset", hub)
    with pytest.raises(DataError, match=r"task 'nq': no data; .*nq\.jsonl.*hazyresearch/based_nq"):
        load_tasks(["nq"])
    loaded("nq", samples, hub=True)
    assert asked == []
    (task,) = load_tasks(["nq"], hub=True)
    assert asked == [("hazyresearch/based_nq_1024", None, "validation")]
    assert task.source == "hazyresearch/based_nq_1024"
    assert task.data_sha256 == loaded("nq", samples).data_sha256


def test_a_failing_download_is_one_line(monkeypatch):
    def hub(*args, **options):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", hub)
    with pytest.raises(DataError, match=r"^hazyresearch/based_nq_1024: .*no route\)$"):
        load_tasks(["nq"], hub=True)


def test_without_lm_eval_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AnalysisError, match=r"pip install 'satlens\[eval\]'"):
        load_tasks(["mqar"])


def test_a_limit_below_one_is_refused():
    with pytest.raises(AnalysisError, match="limit 0"):
        load_tasks(["mqar"], limit=0)


def test_only_squad_completion_differs_from_lm_eval_and_says_so():
    different = {name: task_spec(name).difference for name in (*ZERO_SHOT, *RETRIEVAL)}
    assert {name for name, text in different.items() if text} == {"squad-completion"}
