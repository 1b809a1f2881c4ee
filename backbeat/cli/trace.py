"""`backbeat trace`: one step for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from backbeat.cli import options
from backbeat.cli.arguments import split
from backbeat.cli.job import Job, of_a_job
from backbeat.cli.output import say
from backbeat.errors import InputError
from backbeat.model import files
from backbeat.show.chrome_trace import chrome_trace
from backbeat.show.measured import read_measured
from backbeat.show.steps_traced import traced
from backbeat.units import counted


@of_a_job
def trace(
    job: Job,
    lab: options.LabFiles = None,
    kineto: Annotated[
        list[str] | None, typer.Option("--trace", help="Kineto traces of the real job, comma-separated.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("trace.json"),
) -> None:
    """Write predicted steps, and measured ones beside them, as a trace for ui.perfetto.dev or chrome://tracing."""
    asked, gpus = job.asked(), job.one_size()
    if job.ways is None:
        taken = job.answer(asked)
        ways = list(dict.fromkeys(way for way in (taken.decision.way, taken.decision.over) if way is not None))
    else:
        asked.check(*job.ways)
        ways = job.ways
    steps = traced([asked.predict(way, gpus, strict=False) for way in ways], asked.profile)
    steps += [one for each in read_measured(split(lab), split(kineto), asked.profile) for one in each.traced()]
    if not steps:
        raise InputError("no step of these ways has a timeline: name others with --way")
    files.write(output, msgspec.json.encode(chrome_trace(steps)) + b"\n")
    say(f"wrote {output} ({counted(len(steps), 'step')}): open it at ui.perfetto.dev")
