"""Text from a checkpoint, on a terminal."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from satlens.cli.options import AsJson, Checkpoint, Device, Intervene, Values, app, load
from satlens.errors import DataError


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 50,
    sample: Annotated[
        bool, typer.Option("--sample/--greedy", help="Draw tokens, or take the likeliest.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sampling: divides the logits.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Sampling: keep this many tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sampling: keep the likeliest of this much probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    intervene: Intervene = None,
    value_residual: Values = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Continue a text; --intervene shows what an early-layer access contributes to it."""
    import satlens
    from satlens.analysis.interventions.spec import interventions_label, parse_interventions
    from satlens.display import progress_bar

    interventions = parse_interventions(intervene)
    model = load(checkpoint, value_residual, device)
    if model.tokenizer is None:
        raise DataError(f"{checkpoint}: no tokenizer.json, which a text to continue needs")
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    with progress_bar(quiet=as_json) as progress, satlens.intervene(model, *interventions):
        text = model.generate(prompt, progress=progress, **settings)
    if as_json:
        checkpoint_facts = {k: model.provenance.get(k) for k in ("checkpoint", "sha256")}
        label = interventions_label(interventions) or None
        facts = {**checkpoint_facts, **settings, "intervention": label}
        facts |= {"prompt": prompt, "text": text}
        print(json.dumps(facts, indent=1))
    else:
        print(text)
