"""What an architecture costs."""

from __future__ import annotations

from typing import Annotated

import typer

from satlens.cli.options import AsJson, Out, app, deliver


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
