"""`backbeat plan`: the plan of one way, as a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from backbeat.answer.answer import decided
from backbeat.answer.asked import Asked
from backbeat.answer.do import what_to_run
from backbeat.answer.rows import answer_row
from backbeat.cli import options
from backbeat.cli.job import Job, of_a_job
from backbeat.cli.output import console, print_answer, print_json, say
from backbeat.errors import InputError
from backbeat.model import Plan, Prediction
from backbeat.show.answer_screen import commands
from backbeat.show.tables import plan_tables as tables
from backbeat.show.words import caveats
from backbeat.show.words import decision_words as verdict
from backbeat.show.words.notes import worded
from backbeat.units import counted


@of_a_job
def plan(
    job: Job,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan here.")] = None,
    json: options.Json = False,
) -> None:
    """Write down how a way is run: buckets, units or a layout. Without a way, that of the answer's decision."""
    asked, gpus = job.asked(), job.one_size()
    count = asked.network.workers if gpus is None else gpus
    if job.ways is not None and len(job.ways) > 1:
        raise InputError(f"--way {','.join(job.ways)} names several: a plan has one; `backbeat predict` compares them")
    way = job.ways[0] if job.ways else decided(asked, count)
    made = asked.plan(way, gpus, strict=bool(job.ways))
    if output is not None:
        made.save(output)
        say(f"wrote {output}")
    if json:
        print_json({"schema": made.schema, **msgspec.to_builtins(made)})
        return
    _show(
        job,
        asked,
        made,
        asked.predict(made, gpus, strict=False),
        str(output or "plan.json"),
        written=output is not None,
    )


def _show(job: Job, asked: Asked, made: Plan, one: Prediction, file: str, *, written: bool) -> None:
    row, width = answer_row(asked, one), console().width
    shown: list[Table | str] = []
    if made.sharding is not None and asked.profile is not None:
        shown.append(tables.units_table(asked.profile, made))
        sent = f"Parameters travel in {made.sharding.param_dtype}, gradients in {made.sharding.reduce_dtype}."
        shown.append(sent)
    elif made.buckets and one.gpus > 1:
        shown.append(tables.plan_table(made, one, width))
    if made.memory is not None and made.memory.segments and asked.profile is not None:
        shown += ["", tables.segments_table(asked.profile, made.memory, width)]
    if one.memory is not None and one.memory.by_kind:
        shown += [*([""] if shown else []), tables.memory_table(one.memory)]
    by, lines = what_to_run(asked, row, replace(job.words, files={one.way: file}))
    print_answer(
        *shown,
        "",
        f"{verdict.headed(one.way)} on {counted(one.gpus, 'GPU')}: {verdict.figures(row)}.",
        caveats.limit_line(row) if one.gpus > 1 else "One GPU sends nothing.",
        *caveats.changes_lines(row),
        *dict.fromkeys([*(f"* {note}" for note in made.notes), *(f"* {note}" for note in worded(one.notes))]),
        "",
        "It does not fit: `backbeat predict` says what would." if one.fits == "no" else None,
        None if written else "Write it with -o plan.json.",
        verdict.do_heading(by, lines),
        *commands(tuple(lines)),
    )
