"""Scores on tasks: zero-shot, retrieval and recall, with paired differences between models.

Questions are put by lm-evaluation-harness through :mod:`satlens.interop.lm_eval`; its prompts and
metrics are kept. What is added here: intervals and tests over passages, and what a model loses when
its gates or routes are changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from satlens.analysis.engine.inputs import interval_protocol
from satlens.analysis.engine.stream import Progress
from satlens.analysis.interventions.gates import Intervention
from satlens.analysis.interventions.spec import interventions_label, parse_interventions
from satlens.analysis.result import Result
from satlens.analysis.scoring.answers import Answers
from satlens.analysis.scoring.arms import (
    Arm,
    Model,
    arms_of,
    changed_label,
    check_contrasts,
    named_models,
)
from satlens.analysis.scoring.asking import ask
from satlens.analysis.scoring.estimates import Pair, Scored
from satlens.analysis.scoring.tables import (
    Mean,
    answer_table,
    difference_table,
    means_of,
    protocol_table,
    score_table,
)
from satlens.analysis.statistics.resampling import check_draws
from satlens.analysis.stats import N_RESAMPLES, Interval
from satlens.data.tokenizers import fingerprint
from satlens.errors import AnalysisError
from satlens.models.attention import chosen_attention
from satlens.provenance import provenance
from satlens.tasks.load import LoadedTask, load_tasks
from satlens.tasks.suite import GROUPS

DEFAULT_TASKS = ("mqar",)


def evaluate_tasks(
    models: Model | Sequence[Model] | Mapping[str, Model],
    tasks: Sequence[str] | str = DEFAULT_TASKS,
    *,
    data_dir: str | Path | None = None,
    hub: bool = False,
    interventions: str | Intervention | Sequence[str | Intervention] = (),
    contrasts: Sequence[Pair] | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    truncation: Literal["error", "skip", "truncate"] = "error",
    batch_size: int = 8,
    padding_side: Literal["left", "right"] = "right",
    device: str = "cpu",
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> Result:
    """Score models on tasks, with paired differences between them and under interventions.

    Args:
        models: one or several: models, checkpoint paths or zoo names, or a dict that names them.
        tasks: names of tasks or groups of them: ``mqar`` (needs no data), ``zero-shot``,
            ``retrieval``, ``retrieval-twice`` or their members.
        data_dir: folder of local data, a file or folder a task
            (:func:`satlens.tasks.load.load_tasks`).
        hub: whether data that is not local may be downloaded; nothing is otherwise.
        interventions: texts or objects. Models are then scored twice, by themselves and with all
            of them applied together; the difference is what they cost. The first model has to have
            what they name; others that do not are scored once, with a note.
        contrasts: (model, baseline) pairs of labels instead of every model against the first.
        limit: first questions of each task only.
        num_fewshot: examples before each question; None is 0.
        truncation: a prompt longer than the context: an ``error``, or ``skip`` the question, or
            ``truncate`` the prompt from its beginning. Both are counted.
        batch_size, padding_side: change no score beyond 1e-5.
        n_resamples, seed: of the bootstrap and the sign flips over passages; the seed also draws
            the sequences of mqar and the few-shot examples.
        resume_dir: where answers are kept; a killed evaluation continues from them.

    Returns:
        ``tasks``: a row a model, task and metric with ``score`` (95 % interval over passages),
        ``chance``, and how many questions were scored, truncated and skipped; a mean over the tasks
        of a group, where two or more were run, each with equal weight. Parts:
        ``task_differences`` (``delta``, model minus baseline on the questions that both answered,
        with p of sign flips of passages, adjusted over the rows of a pair), ``task_protocol``
        (versions, prompt hashes, data) and ``task_answers`` (every question: the weighted mean of
        its values is the score, after exp for perplexities).

    Raises:
        AnalysisError: no lm-eval; unknown task or model names; two models with one name.
        ConfigError: an intervention that is not understood.
        HookError: one that the first model has no place for.
        DataError: data that is missing or does not fit; a prompt that is too long.
    """
    check_draws(n_resamples, seed)
    if num_fewshot is not None and num_fewshot < 0:
        raise AnalysisError(f"num_fewshot: must not be negative, got {num_fewshot}")
    applied = parse_interventions(interventions)
    named = named_models(models)
    pairs = check_contrasts(list(named), contrasts)
    loaded = load_tasks(
        [tasks] if isinstance(tasks, str) else list(tasks),
        data_dir=data_dir,
        hub=hub,
        limit=limit,
        seed=seed,
        num_fewshot=num_fewshot or 0,
    )
    asked = {"truncation": truncation, "batch_size": batch_size, "padding_side": padding_side}
    given = {"seed": seed, "responses": resume_dir, "progress": progress}
    run = _asked(arms_of(named, applied, device), loaded, {**given, **asked})
    changed = {label: changed_label(label, applied) for label in named} if applied else {}
    pairs += [(new, label) for label, new in changed.items() if new in run.arms]
    scored = [_scored(task, run.answers[task.name], data_dir) for task in loaded]

    options = {"n_resamples": n_resamples, "seed": seed}
    means = means_of(GROUPS, scored)
    table, interval = score_table(scored, means, options)
    protocol = {**asked, "limit": limit, "num_fewshot": num_fewshot or 0}
    summary = {
        **_headlines(table, scored, means),
        "models": run.arms,
        "interventions": interventions_label(applied) or None,
        "not_intervened": [label for label, new in changed.items() if new not in run.arms],
        "contrasts": [list(pair) for pair in pairs],
        **protocol,
        "interval": _interval_protocol(interval, max(one.n_passages for one in scored)),
    }
    origin = _provenance(run, scored, protocol, seed)
    parts = [
        Result("task_protocol", protocol_table(scored), origin, {}, [_HASHES]),
        Result("task_answers", answer_table(scored), origin, {}, [_ANSWERS]),
    ]
    flags = set(table["flags"])
    if pairs:
        differences, tests = difference_table(scored, means, pairs, options)
        flags |= set(differences["flags"])
        summary["tests"] = tests
        parts.insert(0, Result("task_differences", differences, origin, tests, [*_DIFFERENCES]))
    notes = _notes(scored, run.arms, means, summary["not_intervened"])
    if any("constant" in each for each in flags):
        notes.append(_CONSTANT)
    return Result("tasks", table, origin, summary, notes, parts=tuple(parts))


class _Run(NamedTuple):
    """What all arms answered."""

    answers: dict[str, dict[str, Answers]]
    """By task and arm."""
    arms: dict[str, dict[str, Any]]
    """Facts of each."""
    setup: dict[str, Any]
    """What provenance says of how the first of them ran."""


def _asked(arms: Iterable[Arm], tasks: Sequence[LoadedTask], options: Mapping[str, Any]) -> _Run:
    run = _Run({task.name: {} for task in tasks}, {}, {})
    for arm in arms:
        for task, found in ask(arm, tasks, **options):
            run.answers[task.name][arm.label] = found
        if not run.arms:
            tokenizer = arm.model.tokenizer
            run.setup["tokenizer"] = None if tokenizer is None else fingerprint(tokenizer)
            run.setup["dtype"] = arm.model.dtype
            run.setup["attention"] = chosen_attention()
        run.arms[arm.label] = arm.facts
    return run


# -- putting together ------------------------------------------------------------------------------


def _scored(task: LoadedTask, answers: Mapping[str, Answers], data_dir: Any) -> Scored:
    metrics = next(iter(answers.values())).metrics
    # Guessing is asked what every model was; arms of one context length skip the same questions.
    left_out = {int(n) for each in answers.values() for n in np.flatnonzero(each.skipped)}
    spec = task.spec
    upstream = f"lm-eval {version('lm-eval')}: {spec.base}"
    if spec.difference:
        upstream += f", but {spec.difference}"
    return Scored(
        task=task.name,
        passages=task.clusters,
        answers=answers,
        chance={metric.name: task.chance(metric.name, left_out) for metric in metrics},
        facts={
            "version": task.version,
            "data": _data_name(task.source, data_dir),
            "data_sha256": task.data_sha256,
            "output_type": task.task.OUTPUT_TYPE,
            "source": upstream if spec.base else "satlens",
            "num_fewshot": int(task.task.config.num_fewshot or 0),
        },
    )


def _data_name(source: str, data_dir: Any) -> str:
    """Where data came from, without the place of the folder on this machine."""
    if data_dir is not None and Path(source).is_relative_to(data_dir):
        return Path(source).relative_to(data_dir).as_posix()
    return source


def _headlines(
    table: pd.DataFrame, scored: Sequence[Scored], means: Sequence[Mean]
) -> dict[str, Any]:
    """Scores, and what was asked, for a summary."""
    columns = ["model", "task", "metric", "score"]
    return {
        "tasks": [one.task for one in scored],
        "scores": [dict(zip(columns, row, strict=True)) for row in table[columns].to_numpy()],
        "versions": {one.task: one.facts["version"] for one in scored},
        "prompt_hashes": {one.task: one.prompt_hash for one in scored},
        "means": {mean.label: [one.task for one in mean.tasks] for mean in means},
    }


def _provenance(
    run: _Run, scored: Sequence[Scored], protocol: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Provenance of all tables: of the first model and of every other, of data and protocol."""
    known = {one.task: one.facts["data_sha256"] for one in scored}
    text = json.dumps(known, sort_keys=True)
    first, *others = run.arms.values()
    made = provenance(
        checkpoint={**first, **({"others": others} if others else {})},
        data={"sha256": hashlib.sha256(text.encode()).hexdigest(), "tasks": known, **protocol},
        seed=seed,
        n_documents=sum(one.n_passages for one in scored),
        n_tokens=sum(next(iter(one.answers.values())).n_tokens for one in scored),
        **run.setup,
    )
    return {**made, "packages": {**made["packages"], "lm-eval": version("lm-eval")}}


def _interval_protocol(interval: Interval, n_passages: int) -> dict[str, Any]:
    """How intervals were made."""
    made = interval_protocol(interval, n_passages)
    units = made["units"].replace("documents", "passages")
    return {**made, "units": f"{units}, with all of their questions"}


# -- notes -----------------------------------------------------------------------------------------

_DIFFERENCES = (
    "delta is the score of model minus that of baseline, on the questions that both answered.",
    "p is of sign flips of whole passages; p_adjusted bounds the chance of any false positive "
    "among the rows of a pair (max-T).",
)
_CONSTANT = (
    "Flag constant: all passages gave the same, so resampling them gives an interval without "
    "width. Other passages may differ: of n alike, up to about 3 / n of all (95 %)."
)
_HASHES = (
    "prompt_hash covers every request as text, before any tokenizer, with its whitespace and "
    "settings of generation."
)
_ANSWERS = (
    "The mean of value by weight is the score; after exp where the protocol says so, since values "
    "of perplexities are nats."
)


def _notes(
    scored: Sequence[Scored],
    arms: Mapping[str, Mapping[str, Any]],
    means: Sequence[Mean],
    not_intervened: Sequence[str],
) -> list[str]:
    notes = [
        "Intervals and tests resample passages with all of their questions, of these checkpoints: "
        "they say nothing about other training seeds."
    ]
    if means:
        notes.append("A mean over tasks gives each equal weight and takes the tasks as given.")
    notes += [f"{label}: has nothing for the interventions." for label in not_intervened]
    for label in arms:
        for what, becomes in (("truncated", "lost their beginning"), ("skipped", "were left out")):
            found = {one.task: int(getattr(one.answers[label], what).sum()) for one in scored}
            if any(found.values()):
                listed = ", ".join(f"{task} {n}" for task, n in found.items() if n)
                notes.append(f"{label}: questions that {becomes} (prompt too long): {listed}.")
    return notes
