"""The command line: one thin command a verb. Heavy imports happen inside commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

# Importing a module registers its commands, in the order of the help page.
from satlens.cli import (  # noqa: F401
    analyses,
    checkpoints,
    config,
    data,
    evaluation,
    generate,
    models,
    studies,
    tokens,
    training,
)
from satlens.cli.options import app, n_processes
from satlens.errors import SatlensError


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


def main() -> None:
    """Entry point: errors that a user can act on are one line and a non-zero exit."""
    if "--debug" in sys.argv:
        _run()
        return
    _guarded(_run)


def _run() -> None:
    if n_processes() > 1:
        _shared()
    else:
        app()


def _shared() -> None:
    """The command as one of the processes that torchrun started."""
    from satlens.processes import finish, joined

    with joined():
        try:
            app()
        except SystemExit as end:
            if end.code:
                raise
    finish()


def _guarded(command: Callable[[], Any]) -> None:
    try:
        command()
    except SatlensError as error:
        _stop(str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _stop(f"{place}{error.strerror or error}")


def _stop(message: str) -> None:
    line = f"satlens: error: {' '.join(message.split())}"
    if _speaks_first(line):
        print(line, file=sys.stderr, flush=True)
    sys.exit(1)


def _speaks_first(line: str) -> bool:
    """Whether no other process of torchrun has printed the line already."""
    if n_processes() == 1:
        return True
    from satlens.processes import first_to_say

    return first_to_say(line)
