"""`backbeat watch`: a running job in the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from backbeat.cli.common import console


def watch(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="The file that Watch(model, log=…) writes.")],
    once: Annotated[bool, typer.Option("--once", help="Show what is there, and end.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show a training job while it runs: iteration and exposed time beside their predictions, the straggler, alerts.

    Ends with Ctrl-C. Where the output is no terminal, what is there is shown once.
    """
    from rich.live import Live
    from rich.text import Text

    from backbeat.report.tables.watch_table import read_samples, watch_table

    out = console()
    shown = watch_table(read_samples(log))
    if once or not out.is_terminal:
        typer.echo(shown)
        return
    with Live(Text(shown), console=out, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(Text(watch_table(read_samples(log))), refresh=True)
        except KeyboardInterrupt:
            return
