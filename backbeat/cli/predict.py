"""`backbeat predict`: how should this model be trained on this cluster? One screen that ends in a decision, or data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backbeat.answer.answer import Answer
from backbeat.answer.requirement import Requirement
from backbeat.cli import options
from backbeat.cli.job import Job, of_a_job
from backbeat.cli.output import print_answer, print_json, say
from backbeat.errors import NothingFitsError, RequirementError
from backbeat.show.answer_data import answer_data, save_answer
from backbeat.show.answer_screen import screen


@of_a_job
def predict(
    job: Job,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the answer: .json, or a page: .html.")
    ] = None,
    require: Annotated[
        list[str] | None, typer.Option(help="End with exit code 4 unless it holds: 'fits', 'tokens/s>400000'.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Weigh every way to train the model on the cluster, and say which, how fast, whether it fits and what it costs."""
    required = [Requirement.of(text) for text in require or ()]
    found = job.answer()
    if output is not None:
        save_answer(found, output)
        say(f"wrote {output}")
    if json:
        print_json(answer_data(found))
    else:
        print_answer(*screen(found, job.words))
    ends(found, required)


def ends(found: Answer, required: list[Requirement]) -> None:
    """The exit code: 3 where nothing fits, 4 where the decision's row does not meet what is required."""
    if found.best is None:
        raise NothingFitsError("nothing fits: see the answer")
    for one in required:
        if (why := one.unmet(found.best)) is not None:
            raise RequirementError(f"--require {one.text}: {why}")
        if one.name == "fits" and found.best.prediction.fits == "tight":
            say("warning: it is tight: within the error of predicted memory of what the GPU has")
