"""Analyses: one command each."""

from __future__ import annotations

from pathlib import Path
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
    deliver_all,
    load,
    slice_options,
    speaks,
)
from satlens.errors import AnalysisError, ConfigError


@app.command()
def analyze(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Zoo name, folder in a known layout or hub id; with --trajectory the folder of a "
            "training run."
        ),
    ],
    data: Data,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable: sparsity, routes, categories, divergence; circuits and evaluation "
            "when named. Default: the first four, as far as the model and the data allow."
        ),
    ] = None,
    trajectory: Annotated[
        bool, typer.Option(help="Every checkpoint that the run kept, from the untrained model on.")
    ] = False,
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
    """Several analyses from one pass over the data: every table is that of the analysis alone.

    Under torchrun the processes share the batches and the first one writes the same tables.
    """
    import satlens
    from satlens.display import progress_bar

    options = slice_options(split, batch_size, max_tokens, max_documents, resume)
    options["analyses"] = only or None
    model = None if trajectory else load(checkpoint, value_residual, device)
    with progress_bar(quiet=as_json or not speaks()) as progress:
        if model is not None:
            results = satlens.analyze(model, data, progress=progress, **options)
        else:
            options["device"] = device
            results = satlens.trajectory(checkpoint, data, progress=progress, **options)
    deliver_all(results, out, as_json)


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
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable: category, upos, tag, dep, entity, subword, frequency, position; "
            "sae (groups of features of a sparse dictionary of V_1). Default: category."
        ),
    ] = None,
    contrast: Annotated[
        tuple[str, str], typer.Option(help="The two names whose difference is tested.")
    ] = ("semantic", "functional"),
    groups: Annotated[
        Path | None,
        typer.Option(help="YAML of categories: each name with its list of universal tags."),
    ] = None,
    drivers: Annotated[
        bool,
        typer.Option(
            help="How much of each gate's variance token, previous token, category and position "
            "predict, fitted on the pool (or the other half of the documents); one more pass."
        ),
    ] = True,
    sae_features: Annotated[
        int | None, typer.Option(help="Size of the dictionary of V_1; default 256.")
    ] = None,
    split: Split = "test",
    tagger: Annotated[
        str, typer.Option(help="auto (an installed spaCy model), its name, or wordlist.")
    ] = "auto",
    adjustment: Annotated[
        str, typer.Option(help="Of the tests over a grid: max_t or benjamini_hochberg.")
    ] = "max_t",
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
    options |= {"tagger": tagger, "adjustment": adjustment}
    options |= {"contrast": contrast, "drivers": drivers}
    if by:
        options["by"] = tuple(by)
    if groups is not None:
        from satlens.data.categories import load_categories

        options["groups"] = load_categories(groups)
    if sae_features is not None:
        from satlens.analysis.tokens.sae import SaeSettings

        options["sae"] = SaeSettings(n_features=sae_features)
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
            help="Repeatable. Gates: zero, mean, mean_position, mean_category, resample, shuffle, "
            "optimal (the best constants), open. Routes: zero (where they are added to a residual "
            "stream), uniform, mean and its like, resample, mask, onehot, tie_v, swap. Reads: "
            "remove. Default: zero, mean, shuffle, uniform, mask, tie_v, as far as the model has "
            "them."
        ),
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable: model, layer, head, role, site, source (families of sources), "
            "component (what one sublayer brings to one read). Default: model, layer, head, source."
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="Also by category of the token that is predicted: category, upos, tag, dep, "
            "entity, subword, frequency, position."
        ),
    ] = None,
    tagger: Annotated[
        str, typer.Option(help="auto (an installed spaCy model), its name, or wordlist.")
    ] = "auto",
    adjustment: Annotated[
        str, typer.Option(help="Of the tests over a grid: max_t or benjamini_hochberg.")
    ] = "max_t",
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
    """What closing gates, changing routes or removing sublayers from reads does to the loss.

    In nats a token, paired by document, with the KL divergence of the next-token distribution and
    the share of changed predictions. Damage is not usefulness: a model trained with a part also
    leans on it.
    """
    options = slice_options(split, batch_size, max_tokens, max_documents, resume)
    options |= {"by": by, "tagger": tagger, "adjustment": adjustment}
    if kind:
        options["kinds"] = tuple(kind)
    if scope:
        options["scope"] = tuple(scope)
    analyse("ablate", checkpoint, data, out, as_json, value_residual, device, options)


@app.command()
def attribute(
    checkpoint: Checkpoint,
    data: Data,
    exact: Annotated[
        str,
        typer.Option(
            help="What is removed one by one beside the first-order screen: all, deciles (those "
            "that it puts first and last) or none."
        ),
    ] = "all",
    adjustment: Annotated[
        str, typer.Option(help="Of the tests over a grid: max_t or benjamini_hochberg.")
    ] = "max_t",
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
    """Mass versus cause: the weight of every head and source beside what removing it costs."""
    options = slice_options(split, batch_size, max_tokens, max_documents, resume)
    options |= {"exact": exact, "adjustment": adjustment}
    analyse("attribute", checkpoint, data, out, as_json, value_residual, device, options)


@app.command()
def circuits(
    checkpoint: Checkpoint,
    data: Data,
    n_induction: Annotated[
        int, typer.Option(help="Random repeated sequences for the induction scores.")
    ] = 64,
    top_k: Annotated[int, typer.Option(help="Tokens and pairs named of each head.")] = 5,
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
    """What each head takes from V_1: direct logit attribution, OV circuit, induction.

    Models with a value residual, on any depth stream.
    """
    options = slice_options(split, batch_size, max_tokens, max_documents, resume)
    options |= {"n_induction": n_induction, "top_k": top_k}
    analyse("circuits", checkpoint, data, out, as_json, value_residual, device, options)


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
    """Paired differences between trained arms: per seed, their mean, and every interval of it.

    Student's t over seeds always; from five seeds on, bootstraps over seeds, and over seeds and
    documents. A sign test, the noise floor, and the difference along training.
    """
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


@app.command()
def controls(
    full: Annotated[
        bool, typer.Option(help="Several minutes: more draws, and models that learn recall.")
    ] = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Whether the analyses return what was planted in models whose numbers are known.

    Needs no checkpoint and no data; about a minute. The exit status is 1 if any number is missed.
    """
    import satlens
    from satlens.display import progress_bar

    with progress_bar(quiet=as_json) as progress:
        result = satlens.controls(full=full, progress=progress)
    deliver(result, out, as_json)
    failed = result.summary["failed"]
    if failed:
        raise AnalysisError(
            f"controls: {len(failed)} of {len(result.table)} checks failed: {failed[0]}"
        )
