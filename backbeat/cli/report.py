"""`backbeat report`: everything in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backbeat.cli.common import (
    AcrossOption,
    EpochOption,
    LinksOption,
    NetworkArgument,
    PlanFilesOption,
    PriceOption,
    ProfileArgument,
    ReduceOption,
    StrategyOption,
    TraceFilesOption,
    check_page,
    load_network,
    plan_options,
    say,
    size,
    split,
)
from backbeat.model import Plan, Profile, files
from backbeat.report import redact as redact_names
from backbeat.report.measured import read_lab, read_trace
from backbeat.report.page import MOST_BYTES, PageSettings
from backbeat.report.page import report as make_page
from backbeat.report.study import Study, curve_workers, study
from backbeat.units import format_bytes, parse_price, parse_workers

LabOption = Annotated[
    list[str] | None, typer.Option("--lab", help="Results that `backbeat lab -o` wrote, comma-separated.")
]
RedactOption = Annotated[bool, typer.Option("--redact", help="Leave out model, parameter, file and host names.")]


def report(
    profile: ProfileArgument,
    network: NetworkArgument,
    workers: Annotated[
        str | None,
        typer.Option("--workers", "-n", help="64 (a curve from 4 to it), 4..2048 or 8,16,48. Default: the network's."),
    ] = None,
    strategy: StrategyOption = None,
    plan: PlanFilesOption = None,
    lab: LabOption = None,
    trace: TraceFilesOption = None,
    reduce_dtype: ReduceOption = None,
    price: PriceOption = None,
    epoch_samples: EpochOption = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples of the run to price. Default: what stock DDP does in a day.", min=1)
    ] = None,
    across: AcrossOption = None,
    nics_per_node: LinksOption = 1,
    memory_budget: Annotated[str | None, typer.Option(help="Device memory to stay within, like 80GB.")] = None,
    redact: RedactOption = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML file that says how the job scales, what limits it, what to do and what that is worth."""
    check_page(output)
    budget = size("--memory-budget", memory_budget) if memory_budget is not None else None
    made = gather(
        profile,
        network,
        workers,
        split(strategy),
        split(plan),
        split(lab),
        split(trace),
        redact=redact,
        across=across,
        nics_per_node=nics_per_node,
        reduce_dtype=reduce_dtype,
        memory_budget=budget,
    )
    settings = PageSettings(
        samples=samples,
        price=parse_price(price) if price is not None else None,
        epoch_samples=epoch_samples,
        memory_budget=budget,
        profile_argument="PROFILE" if redact else profile,
        network_argument="NETWORK" if redact else network,
        plan_options=() if redact else tuple(plan_options(across, nics_per_node, reduce_dtype)),
        plan_files={} if redact else {plan_label(path, Plan.load(path)): path for path in split(plan)},
    )
    page = make_page(made, settings).encode()
    if len(page) > MOST_BYTES:
        say(f"note: the report is {format_bytes(len(page))}; fewer strategies or plans make it smaller")
    files.write(output, page)
    say(f"wrote {output} ({format_bytes(len(page))})")


def gather(
    profile: str,
    network: str,
    workers: str | None,
    strategies: list[str],
    plans: list[str],
    labs: list[str],
    traces: list[str],
    *,
    redact: bool = False,
    curve: bool = True,
    across: str | None = None,
    nics_per_node: int = 1,
    reduce_dtype: str | None = None,
    memory_budget: int | None = None,
) -> Study:
    """Read everything that was named, and predict; without `curve` at the last number of workers only."""
    one, cluster = Profile.load(profile), load_network(network, across, nics_per_node)
    asked = parse_workers(workers) if workers is not None else [cluster.workers]
    counts = curve_workers(asked) if curve else [asked[-1]]
    loaded = {plan_label(path, made): made for path in plans for made in [Plan.load(path)]}
    measured = [row for path in labs for row in read_lab(path, one)]
    measured += [row for path in traces for row in read_trace(path)]
    if redact:
        loaded, measured = redact_names.redacted_plans(loaded, one), redact_names.redacted_measured(measured, one)
        one, cluster = redact_names.redacted_profile(one), redact_names.redacted_network(cluster)
    chosen = strategies or ([] if plans and not curve else None)
    return study(
        one,
        cluster,
        counts,
        strategies=chosen,
        plans=loaded,
        measured=measured,
        sweep=curve,
        memory_budget=memory_budget,
        reduce_dtype=reduce_dtype,
    )


def plan_label(path: str, plan: Plan) -> str:
    return f"{plan.strategy} ({Path(path).name})"
