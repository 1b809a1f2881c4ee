"""`backbeat demo`: the whole story on bundled data, with no torch and no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backbeat.cli.common import JsonOption

MODELS = ("resnet50-b64-bf16-h200", "bert-base-b64-bf16-h200")
NETWORK = "100gbe"
STRATEGIES = ("ddp", "best")
WORKERS = "4..2048"


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan is written.")] = Path("plan.json"),
    page: Annotated[Path, typer.Option("--report", help="Where the report is written.")] = Path("report.html"),
    json: JsonOption = False,
) -> None:
    """Predict how ResNet-50 and BERT scale from 4 to 2048 GPUs, plan the best schedule for 64, and report on it."""
    if json:
        _as_data(output, page)
        return
    from backbeat.cli.common import console
    from backbeat.cli.plan import plan
    from backbeat.cli.predict import predict
    from backbeat.cli.report import report

    out = console()
    for name in MODELS:
        out.print(f"$ backbeat predict {name} {NETWORK} --workers {WORKERS}", style="bold")
        predict(name, NETWORK, workers=WORKERS)
        out.print()
    out.print(f"$ backbeat plan {MODELS[0]} {NETWORK} --workers 64 -o {output}", style="bold")
    plan(MODELS[0], NETWORK, workers="64", output=output)
    out.print()
    out.print(f"$ backbeat report {MODELS[0]} {NETWORK} --workers 64 -o {page}", style="bold")
    report(MODELS[0], NETWORK, workers="64", output=page)
    out.print(f"The whole answer with figures is in {page}: open it in a browser. It needs no network.")


def _as_data(output: Path, page: Path) -> None:
    """The same predictions, plan and files, with one JSON object in place of the tables."""
    import msgspec

    from backbeat.api import predict
    from backbeat.cli.common import print_json, say
    from backbeat.cli.predict_output import Asked, content
    from backbeat.cli.report import report
    from backbeat.model import Network, Profile
    from backbeat.planners import plan as make_plan
    from backbeat.units import parse_workers

    network = Network.load(NETWORK)
    profiles = [Profile.load(name) for name in MODELS]
    clusters = [network.at(workers=count) for count in parse_workers(WORKERS)]
    tables = []
    for profile in profiles:
        rows = [predict(profile, cluster, strategy) for cluster in clusters for strategy in STRATEGIES]
        tables.append(content(profile, network, rows, Asked()))
    made = make_plan(profiles[0], network.at(workers=64))
    made.save(output)
    say(f"wrote {output}")
    report(MODELS[0], NETWORK, workers="64", output=page)
    print_json({"predict": tables, "plan": {"schema": made.schema, **msgspec.to_builtins(made)}})
