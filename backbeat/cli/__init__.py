"""The command line: one thin module per verb, each a typed function that imports what it needs when it runs.

Nothing here may import numpy, torch or rich at module level: `backbeat --help` must cost no more than typer itself.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from backbeat.cli.verbs import Verbs
from backbeat.errors import BackbeatError

app = typer.Typer(
    name="backbeat",
    cls=Verbs,
    help="Predict how data-parallel training scales, and plan the gradient communication that makes it fastest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        from backbeat import __version__

        typer.echo(f"backbeat {__version__}")
        raise typer.Exit


@app.callback()
def _backbeat(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; what the user can mend is one line on stderr and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or log that knows ASCII only still gets its table, with ? for what it cannot show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="backbeat")
    except BackbeatError as error:
        from backbeat.units import printable

        lines = [printable(line) for line in str(error).split("\n")]
        print("backbeat: " + "\n".join(lines), file=sys.stderr)
        sys.exit(error.exit_code)
