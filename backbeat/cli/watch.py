"""`backbeat watch`: the samples of a running job as a table of 80 columns, with its alerts in words."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from backbeat.cli import options
from backbeat.cli.output import console, print_json
from backbeat.errors import InputError
from backbeat.show.drift import LEARNT, StepSample, slower_words
from backbeat.units import SCREEN, format_seconds, printable

_ROWS, _ALERTS = 12, 6
_HEADING = "    step iteration predicted   exposed predicted overlap  straggler"
_decoder = msgspec.json.Decoder(StepSample)


def watch(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="The file that Watch(model, log=…) writes.")],
    once: Annotated[bool, typer.Option("--once", help="Show what is there, and end.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 2.0,
    json: options.Json = False,
) -> None:
    """Show a training job while it runs: iteration and exposed time beside their predictions, the straggler, alerts.

    Ends with Ctrl-C. Where the output is no terminal, and with --json, what is there is shown once.
    """
    from rich.live import Live
    from rich.text import Text

    if json:
        print_json({"samples": msgspec.to_builtins(read_samples(log))})
        return
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


def read_samples(file: Path) -> list[StepSample]:
    """The lines of a `watch.jsonl`; a last one that is still being written is left for later."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}. Give the file that the job writes: Watch(model, log=…)") from error
    lines = text.split(b"\n")[:-1]
    try:
        return [_decoder.decode(line) for line in lines if line]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is no log of a watched job: {error}. Give the file of Watch(model, log=…)") from error


def watch_table(samples: Sequence[StepSample]) -> str:
    """The newest samples, the last at the bottom, and the newest alerts of all."""
    if not samples:
        return "no sample yet: the first comes after as many steps as Watch(every=…) says"
    shown = samples[-_ROWS:]
    lines = [_HEADING, *map(_row, shown)]
    cut = {one.straggler: _host(one) for one in shown if not _row(one).endswith(_host(one))}
    lines += [f"rank {rank} is on {host}" for rank, host in cut.items()]
    told = [f"step {sample.step}: {alert}" for sample in samples for alert in sample.alerts]
    if len(told) > _ALERTS:
        lines.append(f"{len(told) - _ALERTS} earlier alerts")
    for alert in told[-_ALERTS:]:
        lines += textwrap.wrap(printable(alert), SCREEN - 2, initial_indent="! ", subsequent_indent="  ")
    # Of the last job: one that starts again appends to its log, and counts steps anew.
    starts = [at for at in range(1, len(samples)) if samples[at].step <= samples[at - 1].step]
    learnt = len(samples) - (starts[-1] if starts else 0)
    if learnt < LEARNT:
        lines.append(f"still learning what is usual: {learnt} of {LEARNT} samples")
    elif not told:
        lines.append("no drift")
    return "\n".join(lines)


def _row(sample: StepSample) -> str:
    overlap = "–" if sample.overlap is None else f"{sample.overlap * 100:.0f} %"
    row = (
        f"{sample.step:8d} {_time(sample.iteration_s)} {_time(sample.predicted_iteration_s)} "
        f"{_time(sample.exposed_s)} {_time(sample.predicted_exposed_s)} {overlap:>7s}  "
    )
    if len(sample.own_s) == 1:
        return f"{row}one rank"
    row += f"rank {sample.straggler} {slower_words(sample.behind)} "
    host, room = _host(sample), SCREEN - len(row)
    # Names of machines differ at their ends.
    return (row + (host if len(host) <= room else f"…{host[len(host) - room + 1 :]}"))[:SCREEN].rstrip()


def _host(sample: StepSample) -> str:
    """The straggler's machine, where there are several ranks and the file says."""
    return printable(sample.hosts[sample.straggler]) if sample.hosts and len(sample.own_s) > 1 else ""


def _time(seconds: float | None) -> str:
    return f"{'–' if seconds is None else format_seconds(seconds):>9s}"
