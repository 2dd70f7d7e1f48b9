"""Text from a checkpoint, on a terminal."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from satlens.cli.options import AsJson, Checkpoint, Device, Values, app, load
from satlens.errors import ConfigError, DataError


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
    ablate: Annotated[
        str | None,
        typer.Option(
            help="Generate under an intervention on every site: zero (close the gates, and take "
            "nothing by routes that are added to a residual stream), uniform (equal routes) or "
            "tie_v (values read by the route of queries and keys)."
        ),
    ] = None,
    value_residual: Values = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Continue a text; --ablate shows what an early-layer access contributes to it."""
    import satlens
    from satlens.display import progress_bar

    if ablate is not None and ablate not in _ABLATIONS:
        raise ConfigError(f"--ablate: must be one of {', '.join(_ABLATIONS)}, got {ablate!r}")
    model = load(checkpoint, value_residual, device)
    interventions = [] if ablate is None else _interventions(ablate, model)
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
        facts = {**checkpoint_facts, **settings, "ablate": ablate, "prompt": prompt, "text": text}
        print(json.dumps(facts, indent=1))
    else:
        print(text)


_ABLATIONS = {
    "zero": ("ZeroGate", "ZeroRoute"),
    "uniform": ("UniformRoute",),
    "tie_v": ("TieValueRoute",),
}


def _interventions(name: str, model: Any) -> list[Any]:
    """What ``--ablate`` stands for: of several, those that fit; the first says if none does."""
    import satlens

    kinds = [getattr(satlens, kind) for kind in _ABLATIONS[name]]
    fitting = [kind for kind in kinds if any(kind.fits(site) for site in model.sites)]
    return [kind() for kind in fitting or kinds[:1]]
