"""`backbeat demo`: the whole story on bundled data, with no torch and no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from backbeat.cli import options
from backbeat.cli.job import job_of_flags
from backbeat.cli.output import check_page, console, print_answer, print_json, say, write_page
from backbeat.cli.plan import plan
from backbeat.show.answer_data import answer_data
from backbeat.show.answer_screen import screen

QUESTIONS: tuple[dict[str, Any], ...] = (
    # A Llama on rented GPUs: the ways that shard, and layouts; what 15 billion tokens cost.
    {"model": "llama-3-8b", "cluster": "aws-p5en", "gpus": "16,64,256", "tokens": "15B", "price": "2.5/gpu-h"},
    # A vision model on a slower network: what a plan gains.
    {"model": "resnet50-b64-bf16-h200", "cluster": "100gbe", "gpus": "4..64"},
)
MODEL, CLUSTER, GPUS = "resnet50-b64-bf16-h200", "100gbe", "64"


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan is written.")] = Path("plan.json"),
    page: Annotated[Path, typer.Option("--report", help="Where the report is written.")] = Path("report.html"),
    json: options.Json = False,
) -> None:
    """Ask how to train a Llama on AWS and ResNet-50 on Ethernet, make a plan, and write a report."""
    from backbeat.show.pages.report_page import report  # late: drawings take a moment to import

    check_page(page)
    out, found = console(), []
    for question in QUESTIONS:
        job = job_of_flags(**question)
        answer = job.answer()
        found.append(answer_data(answer))
        if not json:
            flags = " ".join(
                f"--{name} {value}" for name, value in question.items() if name not in ("model", "cluster")
            )
            out.print(f"$ backbeat predict {job.model} {job.cluster} {flags}", style="bold")
            print_answer(*screen(answer, job.words), "")
    taken = answer.decision.way or "best"
    if json:
        made = job.asked().plan(taken, int(GPUS))
        made.save(output)
        say(f"wrote {output}")
    else:
        out.print(f"$ backbeat plan {MODEL} {CLUSTER} --gpus {GPUS} --way {taken} -o {output}", style="bold")
        plan(model=MODEL, cluster=CLUSTER, gpus=GPUS, way=[taken], output=output)
        out.print(f"\n$ backbeat report {MODEL} {CLUSTER} --gpus 4..64 -o {page}", style="bold")
    write_page(page, report(answer, job.words))
    if json:
        print_json({"predict": found, "plan": {"schema": made.schema, **msgspec.to_builtins(made)}})
        return
    print_answer(f"The whole answer with figures is in {page}: open it in a browser. It needs no network.")
