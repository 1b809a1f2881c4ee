"""`backbeat report`: everything in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from backbeat.cli import options
from backbeat.cli.arguments import load_network, plan_options, size, split
from backbeat.cli.output import check_page, write_page
from backbeat.model import Network, Plan, Profile
from backbeat.planners import whole_groups
from backbeat.show.measured import read_lab, read_trace
from backbeat.show.pages.report_page import report as make_page
from backbeat.show.study import Study, curve_workers, study
from backbeat.show.words.commands import Settings
from backbeat.units import parse_price, parse_workers


def report(
    profile: options.Profile,
    network: options.Network,
    workers: Annotated[
        str | None,
        typer.Option("--workers", "-n", help="64 (a curve from 4 to it), 4..2048 or 8,16,48. Default: the network's."),
    ] = None,
    strategy: options.Strategies = None,
    plan: options.PlanFiles = None,
    lab: options.LabFiles = None,
    trace: options.TraceFiles = None,
    reduce_dtype: options.ReduceDtype = None,
    price: options.Price = None,
    epoch_samples: options.EpochSamples = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples of the run to price. Default: what stock DDP does in a day.", min=1)
    ] = None,
    across: options.Across = None,
    nics_per_node: options.NicsPerNode = 1,
    memory_budget: Annotated[str | None, typer.Option(help="Device memory to stay within, like 80GB.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML file that says how the job scales, what limits it, what to do and what that is worth."""
    check_page(output)
    plans = split(plan)
    made = gather(
        Profile.load(profile),
        load_network(network, across, nics_per_node),
        workers,
        plans=plans,
        labs=split(lab),
        traces=split(trace),
        strategies=split(strategy) or None,
        memory_budget=size("--memory-budget", memory_budget) if memory_budget is not None else None,
        reduce_dtype=reduce_dtype,
    )
    settings = Settings(
        samples=samples,
        price=parse_price(price) if price is not None else None,
        epoch_samples=epoch_samples,
        profile_argument=profile,
        network_argument=network,
        plan_options=tuple(plan_options(across, nics_per_node, reduce_dtype)),
        plan_files={plan_label(path, Plan.load(path)): path for path in plans},
    )
    write_page(output, make_page(made, settings), "fewer strategies or plans")


def gather(
    profile: Profile,
    network: Network,
    workers: str | None,
    *,
    plans: list[str],
    labs: list[str],
    traces: list[str],
    curve: bool = True,
    **chosen: Any,
) -> Study:
    """Read everything that was named, and study it with these options of `study`; without `curve` at the last number
    of workers only."""
    asked = parse_workers(workers) if workers is not None else [network.workers]
    counts = curve_workers(asked) if curve else [asked[-1]]
    if len(asked) == 1:
        # Numbers that lead up to the one asked for are ours to choose.
        names = chosen.get("strategies") or ()
        counts = [one for one in counts if one in asked or all(whole_groups(name, network, one) for name in names)]
    loaded = {plan_label(path, made): made for path in plans for made in [Plan.load(path)]}
    measured = [row for path in labs for row in read_lab(path, profile)]
    measured += [read_trace(path) for path in traces]
    return study(profile, network, counts, plans=loaded, measured=measured, sweep=curve, **chosen)


def plan_label(path: str, plan: Plan) -> str:
    return f"{plan.strategy} ({Path(path).name})"
