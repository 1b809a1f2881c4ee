"""`backbeat demo`: the whole story on bundled data, with no torch and no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from backbeat.cli import options
from backbeat.cli.output import check_page, console, print_json, say
from backbeat.cli.plan import plan
from backbeat.cli.predict import content, predict
from backbeat.cli.report import report
from backbeat.model import Network, Profile
from backbeat.planners.planned import planned
from backbeat.show.study import PLANNED, STOCK, by_name, compare
from backbeat.show.study_row import Question
from backbeat.show.words.commands import Settings
from backbeat.units import parse_workers

MODEL, NETWORK, WORKERS = "resnet50-b64-bf16-h200", "100gbe", "4..2048"
QUESTIONS = (
    (MODEL, NETWORK, WORKERS),
    # The GPUs that the profile was measured on, in a cloud: how busy it is shows in the answer.
    ("llama-1b-b4-bf16-adamw-h200", "aws-p5en", "8..512"),
)


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan is written.")] = Path("plan.json"),
    page: Annotated[Path, typer.Option("--report", help="Where the report is written.")] = Path("report.html"),
    json: options.Json = False,
) -> None:
    """Predict how ResNet-50 scales to 2048 GPUs and a Llama on AWS to 512, plan the best schedule, and report on it."""
    check_page(page)
    if json:
        _as_data(output, page)
        return
    out = console()
    for model, network, workers in QUESTIONS:
        out.print(f"$ backbeat predict {model} {network} --workers {workers}", style="bold")
        predict(model, network, workers=workers)
        out.print()
    out.print(f"$ backbeat plan {MODEL} {NETWORK} --workers 64 -o {output}", style="bold")
    plan(MODEL, NETWORK, workers="64", output=output)
    out.print()
    out.print(f"$ backbeat report {MODEL} {NETWORK} --workers 64 -o {page}", style="bold")
    report(MODEL, NETWORK, workers="64", output=page)
    out.print(f"The whole answer with figures is in {page}: open it in a browser. It needs no network.")


def _as_data(output: Path, page: Path) -> None:
    """The same predictions, plan and files, with one JSON object in place of the tables."""
    tables = []
    for model, cluster, counts in QUESTIONS:
        question = Question(given=Profile.load(model), network=Network.load(cluster))
        found = compare(question, parse_workers(counts), by_name((STOCK, PLANNED)))
        tables.append(content(found, Settings()))
    made = planned(Profile.load(MODEL), Network.load(NETWORK).at(workers=64))
    made.save(output)
    say(f"wrote {output}")
    report(MODEL, NETWORK, workers="64", output=page)
    print_json({"predict": tables, "plan": {"schema": made.schema, **msgspec.to_builtins(made)}})
