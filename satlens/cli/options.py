"""What commands share: the application, options, and how a result reaches the user."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from satlens.errors import SatlensError

if TYPE_CHECKING:
    from satlens.analysis.result import Result

MAX_PART_ROWS = 100
"""Longer parts of a result are left to the CSV."""

app = typer.Typer(
    name="satlens",
    help="Train, open up and measure Transformers whose late layers read early ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def writable(path: Path | None) -> Path | None:
    """A folder for results, refused before the work where nothing could be written in it."""
    if path is None:
        return None
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise SatlensError(f"--out {path}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SatlensError(f"--out {path}: {there} cannot be written to")
    return path


Checkpoint = Annotated[
    str, typer.Argument(help="Zoo name (tiny/satformer), folder in a known layout, or hub id.")
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
    Path | None,
    typer.Option(help="Folder for the table, its provenance and its figure.", callback=writable),
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
Intervene = Annotated[
    list[str] | None,
    typer.Option(
        help="Repeatable, all applied together: zero-gate, open-gate, scale-gate, shuffle-gate, "
        "zero-route, uniform-route, mask-route, one-hot-route, tie-value-route, swap-routes or "
        "remove-sublayer, with settings after a colon: zero-gate:layer=3+5,head=1, "
        "mask-route:source=embed, remove-sublayer:component=L0.attn."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]


def slice_options(
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


def n_processes() -> int:
    """Processes that torchrun started for this command; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def one_process(verb: str) -> None:
    """Refuse torchrun, whose processes would all do the same work on the same files."""
    if n_processes() > 1:
        raise SatlensError(f"{verb}: runs in one process, not under torchrun")


def speaks() -> bool:
    """Whether this process shows and writes results: the first one under torchrun."""
    return n_processes() == 1 or os.environ.get("RANK", "0") == "0"


def load(checkpoint: str, value_residual: str | None, device: str) -> Any:
    """The checkpoint; on its own GPU in each process of torchrun."""
    import satlens
    from satlens.processes import own_device

    return satlens.load(checkpoint, device=own_device(device), value_residual=value_residual)


def analyse(
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

    model = load(checkpoint, value_residual, device)
    with progress_bar(quiet=as_json or not speaks()) as progress:
        result = getattr(satlens, name)(model, data, progress=progress, **options)
    deliver(result, out, as_json)


def deliver(result: Result, out: Path | None, as_json: bool) -> None:
    """The result as files (when asked for), and its summary or its tables on stdout."""
    if not speaks():
        return
    written = result.save(out) if out is not None else []
    if as_json:
        print(json.dumps(result.summary, indent=1))
        return
    _show(result)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


def deliver_all(results: Mapping[str, Result], out: Path | None, as_json: bool) -> None:
    """Several results: as files, and as one JSON object of summaries or as tables on stdout."""
    if not speaks():
        return
    written = [path for r in results.values() if out is not None for path in r.save(out)]
    if as_json:
        print(json.dumps({name: r.summary for name, r in results.items()}, indent=1))
        return
    for result in results.values():
        _show(result)
        print()
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


def _show(result: Result) -> None:
    """Tables, headline numbers and notes."""
    from satlens.display import headlines, table_text

    for table in (result, *result.parts):
        if table is not result and len(table.table) > MAX_PART_ROWS:
            print(f"{table.name}: {len(table.table)} rows, in the CSV that --out writes\n")
            continue
        print(f"{table.name}\n{table_text(table.to_frame(), table.key_columns)}\n")
    for line in headlines(result.summary):
        print(line)
    for note in result.notes:
        print(f"note: {note}")
