"""`backbeat demo`: the whole story on bundled data, with no torch and no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODELS = ("resnet50-b64-bf16-h200", "bert-base-b64-bf16-h200")
NETWORK = "100gbe"
STRATEGIES = "ddp,best"


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan is written.")] = Path("plan.json"),
    page: Annotated[Path, typer.Option("--report", help="Where the report is written.")] = Path("report.html"),
) -> None:
    """Predict how ResNet-50 and BERT scale from 4 to 2048 GPUs, plan the best schedule for 64, and report on it."""
    from backbeat.cli.common import console
    from backbeat.cli.plan import plan
    from backbeat.cli.predict import predict
    from backbeat.cli.report import report

    out = console()
    for name in MODELS:
        out.print(f"$ backbeat predict {name} {NETWORK} --workers 4..2048 --strategy {STRATEGIES}", style="bold")
        predict(name, NETWORK, workers="4..2048", strategy=[STRATEGIES])
        out.print()
    out.print(f"$ backbeat plan {MODELS[0]} {NETWORK} --workers 64 -o {output}", style="bold")
    plan(MODELS[0], NETWORK, workers=64, output=output)
    out.print()
    out.print(f"$ backbeat report {MODELS[0]} {NETWORK} --workers 64 -o {page}", style="bold")
    report(MODELS[0], NETWORK, workers="64", output=page)
    out.print(f"The whole answer with figures is in {page}: open it in a browser. It needs no network.")
