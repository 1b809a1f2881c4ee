"""`backbeat trace`: one iteration for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from backbeat.cli import options
from backbeat.cli.arguments import one_count, split
from backbeat.cli.output import say
from backbeat.cli.report import gather
from backbeat.model import Network, Profile, files
from backbeat.show.chrome_trace import chrome_trace
from backbeat.show.study import STOCK


def trace(
    profile: options.Profile,
    network: options.Network,
    workers: options.OneCount = None,
    strategy: options.Strategies = None,
    plan: options.PlanFiles = None,
    lab: options.LabFiles = None,
    kineto: options.TraceFiles = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("trace.json"),
) -> None:
    """Write predicted iterations, and measured ones beside them, as a trace for ui.perfetto.dev or chrome://tracing."""
    plans = split(plan)
    chosen = split(strategy) or ([] if plans else [STOCK, "best"])
    made = gather(
        Profile.load(profile),
        Network.load(network),
        str(one_count(workers)) if workers is not None else None,
        plans=plans,
        labs=split(lab),
        traces=split(kineto),
        curve=False,
        strategies=chosen,
    )
    # The study adds stock DDP to compare with; a trace holds what was asked for.
    iterations = made.iterations(label for label in made.curves if label != STOCK or STOCK in chosen)
    files.write(output, msgspec.json.encode(chrome_trace(iterations)) + b"\n")
    say(f"wrote {output} ({len(iterations)} iterations): open it at ui.perfetto.dev")
