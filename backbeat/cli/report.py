"""`backbeat report`: the whole answer in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backbeat.cli import options
from backbeat.cli.arguments import split
from backbeat.cli.job import Job, of_a_job
from backbeat.cli.output import check_page, write_page
from backbeat.show.measured import read_measured
from backbeat.show.pages.report_page import report as page_of


@of_a_job
def report(
    job: Job,
    lab: options.LabFiles = None,
    trace: options.TraceFiles = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML file that says how to train the model there, how fast it is, what limits it and what it costs."""
    check_page(output)
    asked = job.asked()
    measured = read_measured(split(lab), split(trace), asked.profile)
    write_page(output, page_of(job.answer(asked), job.words, measured))
