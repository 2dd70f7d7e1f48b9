"""Tasks with their data: from local files, the hub or, for associative recall, made here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from satlens.errors import AnalysisError, DataError
from satlens.tasks.mqar import recall_rows
from satlens.tasks.prompts import passage
from satlens.tasks.rows import check_row
from satlens.tasks.sources import hub_rows, local_rows
from satlens.tasks.suite import TaskSpec, task_names, task_spec

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

BUILT_IN = "built in"

# Fields that hold the passage itself and not a name of it.
PASSAGES = ("context", "passage", "support")

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class LoadedTask:
    """A task and the questions it will put.

    Attributes:
        spec: what the task is.
        task: lm-eval's object, which makes requests of documents and scores of responses.
        clusters: for each document of ``task.eval_docs``, the name of its passage: questions on one
            passage are not independent.
        source: ``built in``, a path, or the id of a data set on the hub.
        data_sha256: of the rows that are scored (and those that examples come from): their fields
            as canonical JSON, so that the same rows in another file format have the same hash.
        version: of the task: lm-eval's, or ours for tasks defined here.
    """

    spec: TaskSpec
    task: ConfigurableTask
    clusters: list[str]
    source: str
    data_sha256: str
    version: str

    @property
    def name(self) -> str:
        """What users type."""
        return self.spec.name

    def chance(self, metric: str, left_out: Collection[int] = ()) -> float:
        """The score of guessing on these documents but some; NaN for metrics that have none.

        For multiple choice it is the mean of 1 / (number of answers), which differs between the
        questions of ARC.
        """
        if self.spec.chance is None or metric not in self.spec.chance_metrics:
            return float("nan")
        if self.task.OUTPUT_TYPE != "multiple_choice":
            return self.spec.chance
        parts = [
            1 / len(self.task.doc_to_choice(doc))
            for number, doc in enumerate(self.task.eval_docs)
            if number not in left_out
        ]
        return sum(parts) / len(parts) if parts else float("nan")


def load_tasks(
    names: Sequence[str],
    *,
    data_dir: str | Path | None = None,
    hub: bool = False,
    limit: int | None = None,
    seed: int = 0,
    num_fewshot: int = 0,
) -> list[LoadedTask]:
    """Tasks ready for :mod:`lm_eval`.

    Args:
        names: tasks, or groups of them (:data:`satlens.tasks.suite.GROUPS`).
        data_dir: folder with a file a task (:func:`satlens.tasks.sources.local_rows`).
        hub: download what ``data_dir`` is not given for; without it nothing is downloaded.
        limit: the first so many questions of each task.
        seed: of associative recall, and of the choice of examples.
        num_fewshot: examples in each prompt. Tasks with a training split take them from there
            (``<name>/train.jsonl``), others from the other documents of the split that is scored.

    Raises:
        AnalysisError: a name is unknown, lm-eval is not installed, or its task takes no examples
            (SWDE, FDA and SQuAD completion, read once).
        DataError: data are missing or do not fit the task.
    """
    if limit is not None and limit < 1:
        raise AnalysisError(f"limit {limit}: must be at least 1")
    specs = [task_spec(name) for name in task_names(names)]
    _require_lm_eval()
    return [_load(spec, data_dir, hub, limit, seed, num_fewshot) for spec in specs]


def _require_lm_eval() -> None:
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise AnalysisError("tasks need lm-eval: pip install 'satlens[eval]'")


def _load(
    spec: TaskSpec,
    data_dir: str | Path | None,
    hub: bool,
    limit: int | None,
    seed: int,
    num_fewshot: int,
) -> LoadedTask:
    from satlens.tasks.harness import build_task

    scored, source = _rows(spec, spec.split, data_dir, hub, limit, seed)
    splits = {spec.split: scored}
    pool, place = scored, source
    if num_fewshot and spec.fewshot_split:
        pool, place = _rows(spec, spec.fewshot_split, data_dir, hub, None, seed)
        splits[spec.fewshot_split] = pool
    if num_fewshot and len(pool) <= num_fewshot:  # lm-eval draws one more, to replace a repeat
        raise DataError(f"{place}: {len(pool)} rows are too few for {num_fewshot} examples each")
    task = build_task(spec, splits, num_fewshot, seed)
    clusters = [_passage(spec, row, number) for number, row in enumerate(scored)]
    return LoadedTask(spec, task, clusters, source, _sha256(splits), str(task.VERSION))


def _rows(
    spec: TaskSpec,
    split: str,
    data_dir: str | Path | None,
    hub: bool,
    limit: int | None,
    seed: int,
) -> tuple[Rows, str]:
    """The rows of a split and where they come from."""
    if spec.n_pairs:
        made = recall_rows(spec.n_pairs, seed)[:limit]
        return [check_row(row, spec.row, spec.name) for row in made], BUILT_IN
    if data_dir is not None:
        rows, path = local_rows(data_dir, spec, split, limit)
        return rows, str(path)
    assert spec.hub is not None
    if hub:
        return hub_rows(spec, split, limit), spec.hub[0]
    raise DataError(
        f"task {spec.name!r}: no data; give a folder with {spec.data}.jsonl or .parquet, "
        f"or allow the download of {spec.hub[0]} from the hub"
    )


def _passage(spec: TaskSpec, row: dict[str, Any], number: int) -> str:
    """Name of a row's passage: as the data name it, a hash of its text, or the row's number."""
    value = row.get(spec.cluster) if spec.cluster else None
    if not value:
        return f"row {number}"
    if spec.cluster not in PASSAGES:
        return value
    if spec.cluster == "context":
        value = passage(value, row["question"])
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _sha256(splits: dict[str, Rows]) -> str:
    text = json.dumps(splits, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
