"""Analyses: one command each."""

from __future__ import annotations

from typing import Annotated

import typer

from satlens.cli.options import (
    AsJson,
    BatchSize,
    Checkpoint,
    Data,
    Device,
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
)
from satlens.errors import ConfigError


@app.command("eval")
def evaluate(
    checkpoint: Checkpoint,
    data: Data,
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
    """Negative log-likelihood (nats a token) and perplexity, with intervals over documents."""
    options = slice_options(split, batch_size, max_tokens, max_documents, resume)
    analyse("evaluate", checkpoint, data, out, as_json, value_residual, device, options)


@app.command()
def sparsity(
    checkpoint: Checkpoint,
    data: Data,
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
    """How often gates are closed and how spread routes are, per layer and head.

    Each figure stands beside the same at initialisation: an untrained ReLU gate is zero half of
    the time.
    """
    options = slice_options(split, batch_size, max_tokens, max_documents, resume)
    analyse("sparsity", checkpoint, data, out, as_json, value_residual, device, options)


@app.command()
def categories(
    checkpoint: Checkpoint,
    data: Data,
    split: Split = "test",
    tagger: Annotated[
        str, typer.Option(help="auto (an installed spaCy model), its name, or wordlist.")
    ] = "auto",
    out: Out = None,
    batch_size: BatchSize = 8,
    max_tokens: MaxTokens = None,
    max_documents: MaxDocuments = None,
    value_residual: Values = None,
    device: Device = "cpu",
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """For which tokens gates open: semantic, functional and structural ones, from spaCy tags.

    The contrast is given raw and with token frequency and position held fixed.
    """
    options = slice_options(split, batch_size, max_tokens, max_documents, resume)
    options["tagger"] = tagger
    analyse("categories", checkpoint, data, out, as_json, value_residual, device, options)


@app.command()
def divergence(
    checkpoint: Checkpoint,
    data: Data,
    other: Annotated[
        str | None, typer.Option(help="Compare the same routes with this checkpoint's instead.")
    ] = None,
    over: Annotated[
        str,
        typer.Option(
            help="sources: routes over the same sources. sublayers: effective routes, by which any "
            "two reads compare."
        ),
    ] = "sources",
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
    """Jensen-Shannon divergence, in nats, between the routes of queries/keys and of values."""
    options = slice_options(split, batch_size, max_tokens, max_documents, resume)
    options["over"] = over
    if other is not None:
        options["other"] = load(other, value_residual, device)
    analyse("divergence", checkpoint, data, out, as_json, value_residual, device, options)


@app.command()
def routes(
    checkpoint: Checkpoint,
    data: Data,
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
    """Effective routes: what of each sublayer's own output every read receives.

    The exact coefficient of each in each read, its share of the read by norm, and the untrained
    model's. Any model; refused where components do not add up to the reads. Batches hold fewer
    windows than --batch-size where what they capture would exceed 2 GiB (at 24 layers of 1024 a
    window of 2048 tokens is 0.8 GB, 1.4 GB for MUDDFormer).
    """
    options = slice_options(split, batch_size, max_tokens, max_documents, resume)
    analyse("routes", checkpoint, data, out, as_json, value_residual, device, options)


@app.command()
def ablate(
    checkpoint: Checkpoint,
    data: Data,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable. Gates: zero, mean, shuffle. Routes: uniform, mean, tie_v, and zero "
            "where they are added to a residual stream. Default: all that the model has."
        ),
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(help="Repeatable: model, layer, head, role, site. Default: the first three."),
    ] = None,
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
    """What closing gates or flattening routes costs, in nats a token, paired by document.

    Damage is not usefulness: a model trained with a part also leans on it.
    """
    options = slice_options(split, batch_size, max_tokens, max_documents, resume)
    if kind:
        options["kinds"] = tuple(kind)
    if scope:
        options["scope"] = tuple(scope)
    analyse("ablate", checkpoint, data, out, as_json, value_residual, device, options)


@app.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(help="Runs by arm: ARM=FOLDER[,FOLDER...], a training folder a seed."),
    ],
    data: Data,
    baseline: Annotated[str | None, typer.Option(help="Arm to compare with; default: first.")] = (
        None
    ),
    split: Split = "test",
    allow: Annotated[
        list[str] | None, typer.Option(help="Repeatable: a field in which arms may differ.")
    ] = None,
    out: Out = None,
    batch_size: BatchSize = 8,
    max_tokens: MaxTokens = None,
    max_documents: MaxDocuments = None,
    device: Device = "cpu",
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """Paired differences between trained arms: per seed, their mean and a t interval."""
    import satlens
    from satlens.display import progress_bar

    arms: dict[str, list[str]] = {}
    for entry in runs:
        arm, separator, folders = entry.partition("=")
        if not separator or not folders:
            raise ConfigError(f"{entry}: expected ARM=FOLDER[,FOLDER...]")
        arms[arm] = folders.split(",")
    with progress_bar(quiet=as_json) as progress:
        result = satlens.compare(
            arms,
            data,
            baseline=baseline or next(iter(arms)),
            allow=tuple(allow or ()),
            device=device,
            progress=progress,
            **slice_options(split, batch_size, max_tokens, max_documents, resume),
        )
    deliver(result, out, as_json)
