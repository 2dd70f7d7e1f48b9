"""Our rows in lm-eval's tasks. Importing this module imports lm_eval.

A task that lm-eval defines keeps its prompt, metric and version; only its ``download`` is replaced,
and what its specification names as a difference.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask

# lm-eval's public way to a task's definition (TaskManager) also downloads its data.
from lm_eval.tasks._yaml_loader import load_yaml

from satlens.errors import AnalysisError
from satlens.tasks import mqar, prompts
from satlens.tasks.suite import TaskSpec

Rows = list[dict[str, Any]]

RETRIEVAL_VERSION = "1"
RETRIEVAL_ANSWER = {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}
"""Greedy, to the end of the line, 48 tokens at most."""


class _GivenRows:
    """Takes rows that are at hand where a task of lm-eval would download its own."""

    def __init__(self, given: datasets.DatasetDict, **options: Any) -> None:
        self._given = given
        super().__init__(**options)

    def download(self, dataset_kwargs: Any = None, **kwargs: Any) -> None:
        self.dataset = self._given


class _GivenTask(_GivenRows, ConfigurableTask):
    """A task that a configuration defines whole, on given rows."""


def build_task(
    spec: TaskSpec, splits: Mapping[str, Rows], num_fewshot: int, seed: int
) -> ConfigurableTask:
    """A task of lm-eval on these rows.

    Args:
        spec: the task.
        splits: rows of the split that is scored and, for examples, of the training split.
        num_fewshot: examples in each prompt.
        seed: of the choice of examples.

    Raises:
        AnalysisError: examples are asked for a task whose class in lm-eval cannot add them.
    """
    config = _upstream(spec.base) if spec.base else _own(spec)
    config["task"] = spec.name
    _keep_splits(config, spec, splits)
    with _quiet():
        given = datasets.DatasetDict({n: datasets.Dataset.from_list(r) for n, r in splits.items()})
        process = config.pop("process_docs", None)
        if process:  # once for all, where lm-eval would each time that it asks for documents
            given = datasets.DatasetDict({n: process(table) for n, table in given.items()})
        kind = config.pop("class", None)
        if kind is None:
            task = _GivenTask(given, config=config)
        else:  # written as a class, which makes its own configuration
            if num_fewshot:  # its doc_to_text lacks the argument that lm-eval passes for examples
                raise AnalysisError(f"task {spec.name!r}: lm-eval has it without examples only")
            task = type(f"Given{kind.__name__}", (_GivenRows, kind), {})(given)
            task.config.task = spec.name
            if spec.difference:  # SQuAD completion means these, and gets the harness' own instead
                task.set_config("generation_kwargs", dict(RETRIEVAL_ANSWER))
    task.set_config("num_fewshot", num_fewshot)
    task.set_fewshot_seed(seed)
    return task


def _keep_splits(config: dict[str, Any], spec: TaskSpec, splits: Mapping[str, Rows]) -> None:
    """Forget splits that there are no rows of; examples then come from the split that is scored."""
    for key, name in (("training", "train"), ("validation", "validation"), ("test", "test")):
        if name not in splits:
            config.pop(f"{key}_split", None)
    if len(splits) == 1 and spec.split == "test":
        # Only where both are named alike does lm-eval leave a question out of its own examples.
        config["fewshot_split"] = "test"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, and lm-eval's remarks on what its own definitions leave out."""
    log = logging.getLogger("lm_eval")
    level, bars = log.level, datasets.are_progress_bars_disabled()
    log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        log.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


def _upstream(base: str) -> dict[str, Any]:
    """lm-eval's definition of a task."""
    config = deepcopy(load_yaml(Path(lm_eval.tasks.__file__).parent / base))
    for key in ("tag", "group", "task_list"):  # about its place in lm-eval, not the task
        config.pop(key, None)
    return config


def _own(spec: TaskSpec) -> dict[str, Any]:
    return _recall() if spec.n_pairs else _in_context_qa(spec.name)


def _recall() -> dict[str, Any]:
    return {
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{context}} {{query}}:",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": mqar.VERSION},
    }


def _in_context_qa(name: str) -> dict[str, Any]:
    """Right if what is generated contains an answer."""
    return {
        "output_type": "generate_until",
        "validation_split": "validation",
        "doc_to_text": prompts.PROMPTS[name],
        "doc_to_target": _first_answer,
        "process_results": _score,
        "generation_kwargs": dict(RETRIEVAL_ANSWER),
        "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": RETRIEVAL_VERSION},
    }


def _first_answer(doc: prompts.Doc) -> str:
    return prompts.answers(doc)[0]


def _score(doc: prompts.Doc, results: list[str]) -> dict[str, float]:
    return {"contains": prompts.contains(results[0], prompts.answers(doc))}
