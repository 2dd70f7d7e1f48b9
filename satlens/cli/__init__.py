"""The command line: one thin command a verb. Heavy imports happen inside commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

# Importing a module registers its commands, in the order of the help page.
from satlens.cli import analyses, checkpoints, evaluation, generate, models, studies, tokens  # noqa: F401
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
    command = _shared if n_processes() > 1 else app
    if "--debug" in sys.argv:
        command()
        return
    _guarded(command)


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
    print(f"satlens: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)
