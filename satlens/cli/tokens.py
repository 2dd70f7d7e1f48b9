"""A text token by token: one command."""

from __future__ import annotations

from typing import Annotated

import typer

from satlens.cli.options import (
    AsJson,
    BatchSize,
    Checkpoint,
    Data,
    Device,
    Intervene,
    MaxDocuments,
    Out,
    Split,
    Values,
    analyse,
    app,
    one_process,
)


@app.command("token-view")
def token_view(
    checkpoint: Checkpoint,
    data: Data,
    intervene: Intervene = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="Repeatable: layers whose gates and routes are shown. Default: all."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens shown at most, of all documents.")] = (
        2000
    ),
    max_documents: MaxDocuments = None,
    tagger: Annotated[
        str, typer.Option(help="auto (an installed spaCy model), its name, or wordlist.")
    ] = "auto",
    split: Split = "test",
    out: Out = None,
    batch_size: BatchSize = 8,
    value_residual: Values = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Every token of a text with its loss, its category, and all gates and routes at it.

    With --intervene also its loss under the intervention. 'satlens report' makes of the folder that
    --out names a page where tokens are coloured by any of these.
    """
    from satlens.analysis.interventions.spec import parse_interventions

    one_process("token-view")
    options = {
        "interventions": parse_interventions(intervene),
        "layers": layer or None,
        "max_tokens": max_tokens,
        "max_documents": max_documents,
        "tagger": tagger,
        "split": split,
        "batch_size": batch_size,
    }
    analyse("token_view", checkpoint, data, out, as_json, value_residual, device, options)
