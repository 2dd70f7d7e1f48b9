"""Checkpoints: what one is, and the same model in another layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from satlens.cli.options import Checkpoint, Values, app, load


@app.command()
def info(
    path: Annotated[
        str,
        typer.Argument(help="Checkpoint folder in any known layout, config.json, or a hub id."),
    ],
    value_residual: Values = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """What a checkpoint is: architecture, sizes, sites, hashes, and what is unusual about it."""
    from satlens.checkpoints.info import inspect, summary

    facts = inspect(path, value_residual)
    print(json.dumps(facts, indent=1) if as_json else summary(facts))


@app.command()
def convert(
    source: Checkpoint,
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[
        str,
        typer.Option(
            help="satlens, satformer-repo, fla, hf-llama, hf-qwen3, resformer-release, "
            "muddformer-release or attnres-community."
        ),
    ],
    value_residual: Values = None,
    replace: Annotated[bool, typer.Option(help="Swap a checkpoint that is already there.")] = False,
) -> None:
    """Write a checkpoint in another layout: weights to the bit, or nothing.

    What the layout says of a model that does not change what it computes (how it was initialised
    and trained) may be less; that is listed on stderr.
    """
    from satlens.checkpoints import save
    from satlens.checkpoints.layouts import layout_named
    from satlens.config import to_dict

    layout = layout_named(to)
    model = load(source, value_residual, "cpu")
    training = model.provenance["training"]
    kept = training if layout.has_manifest else None
    print(save(model, destination, layout=layout.name, training=kept, replace=replace))
    identity = "identity" if layout.name == "resformer_release" else None
    before = to_dict(model.cfg)
    after = to_dict(load(str(destination), identity, "cpu").cfg)
    for field in before:
        if before[field] != after[field]:
            print(
                f"{destination}: the {to} layout does not keep {field}: {before[field]!r} reads "
                f"back as {after[field]!r}",
                file=sys.stderr,
            )
    if training != kept:
        print(f"{destination}: the {to} layout has no place for training.json", file=sys.stderr)
    if layout.name == "resformer_release":
        print(f"{destination}: open it with --value-residual identity", file=sys.stderr)
