"""`backbeat trace`: one iteration for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backbeat.cli.common import (
    NetworkArgument,
    OneCountOption,
    PlanFilesOption,
    ProfileArgument,
    StrategyOption,
    TraceFilesOption,
    one_count,
    say,
    split,
)
from backbeat.cli.report import LabOption, RedactOption, gather
from backbeat.model import files
from backbeat.report import perfetto
from backbeat.report.study import STOCK


def trace(
    profile: ProfileArgument,
    network: NetworkArgument,
    workers: OneCountOption = None,
    strategy: StrategyOption = None,
    plan: PlanFilesOption = None,
    lab: LabOption = None,
    kineto: TraceFilesOption = None,
    redact: RedactOption = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("trace.json"),
) -> None:
    """Write predicted iterations, and measured ones beside them, as a trace for ui.perfetto.dev or chrome://tracing."""
    strategies, plans = split(strategy), split(plan)
    chosen = strategies or ([] if plans else [STOCK, "best"])
    made = gather(
        profile,
        network,
        str(one_count(workers)) if workers is not None else None,
        chosen,
        plans,
        split(lab),
        split(kineto),
        redact=redact,
        curve=False,
    )
    # The study adds stock DDP to compare with; a trace holds what was asked for.
    iterations = made.iterations(label for label in made.curves if label != STOCK or STOCK in chosen)
    files.write(output, perfetto.encode(perfetto.trace(iterations)))
    say(f"wrote {output} ({len(iterations)} iterations): open it at ui.perfetto.dev")
