"""`backbeat predict`: how a job scales."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from backbeat.api import predict as predict_sent
from backbeat.cli import options
from backbeat.cli.common import load_network, plan_options, print_json, say, size, split
from backbeat.cli.predict_output import Asked, Predicted, Schedule, content, show, show_sharded
from backbeat.errors import InputError
from backbeat.model import Network, Plan, Prediction, Profile, Reduction
from backbeat.model.reduction import reduction_named
from backbeat.planners import BUCKETED, BUDGETED, whole_groups
from backbeat.report.figures import plot as plots
from backbeat.report.figures.scaling_curve import scaling
from backbeat.report.study import COMPARED, PLANNED, STOCK
from backbeat.report.words.ways import instead_of_ddp
from backbeat.simulate import strong_scaling
from backbeat.units import parse_price, parse_workers


def predict(
    profile: options.Profile,
    network: options.Network,
    workers: Annotated[
        str | None,
        typer.Option("--workers", "-n", help="64, 4..2048 (doubling) or 8,16,48. Default: the network's own."),
    ] = None,
    strategy: options.Strategies = None,
    framework: options.Frameworks = None,
    plan: options.PlanFiles = None,
    accumulation: options.Accumulation = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Strong scaling: this many samples per iteration over all workers.")
    ] = None,
    other_batch: Annotated[
        str | None, typer.Option(help="With --global-batch: a second profile of the model, at another batch size.")
    ] = None,
    communicators: options.Communicators = None,
    bucket: options.Bucket = None,
    reduce_dtype: options.ReduceDtype = None,
    memory: Annotated[
        str | None, typer.Option(help="Device memory that sharding may take, like 40GB. Default: all of the device's.")
    ] = None,
    torch: options.Torch = None,
    price: options.Price = None,
    epoch_samples: options.EpochSamples = None,
    samples: Annotated[int, typer.Option(help="GPU-hours are given for this many samples.", min=1)] = 1_000_000,
    across: options.Across = None,
    nics_per_node: options.Links = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve: scaling.png, .svg, .pdf or .html.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Every strategy in a row, with every figure.")] = False,
    json: options.Json = False,
) -> None:
    """Predict how the job scales, what limits it and what it costs, and say what to do."""
    one, cluster = Profile.load(profile), load_network(network, across, nics_per_node)
    counts = parse_workers(workers) if workers is not None else [cluster.workers]
    files = split(plan)
    every = wide or json
    memory_bytes = size("--memory", memory) if memory is not None else None
    names = named = list(dict.fromkeys(split(strategy)))
    frameworks = [reduction_named(name) for name in split(framework)]
    if not names and not files:
        names = list(COMPARED) if every else [PLANNED]
    offered: list[str] = []
    if not named and not files and not frameworks and global_batch is None:
        # With a job that DDP cannot hold, sharding is compared in place of buckets.
        offered = instead_of_ddp(one, cluster, counts, budget_bytes=memory_bytes)
        names = [*(names if every or not offered else ()), *offered]
    if bucket is not None and named and BUCKETED.isdisjoint(names):
        raise InputError(f"--bucket is for ddp and horovod, not {', '.join(names)}: name one of them, or leave it out")
    if not every and not frameworks and STOCK not in names:
        names.insert(0, STOCK)
    plans = _named_apart([Plan.load(path) for path in files], files, names)
    schedules: list[Schedule] = [*frameworks, *names, *plans]
    asked = Asked(
        communicators=communicators,
        bucket_bytes=size("--bucket", bucket, "MB") if bucket is not None else None,
        accumulation=accumulation,
        global_batch=global_batch,
        reduce_dtype=reduce_dtype,
        memory_bytes=memory_bytes,
        torch_version=torch,
        price=parse_price(price) if price is not None else None,
        epoch_samples=epoch_samples,
        samples=samples,
        frameworks=tuple(one.name for one in frameworks),
        plan_words=(
            *("backbeat", "plan", profile, network, *plan_options(across, nics_per_node, reduce_dtype)),
            *(("--accumulation", str(accumulation)) if accumulation else ()),
        ),
        budget_words=(*(("--memory", memory) if memory else ()), *(("--torch", torch) if torch else ())),
        plan_files={made.strategy: file for made, file in zip(plans, files, strict=True)},
    )
    if plot is not None:
        plots.check(plot)
    if other_batch is not None and global_batch is None:
        raise InputError("--other-batch goes with --global-batch: add it, or leave this out")
    other = Profile.load(other_batch) if other_batch is not None else None
    # Refused before anything is planned: the largest number of workers is where a network ends.
    clusters = {count: cluster.at(workers=count) for count in counts}
    rows: list[Prediction] = []
    for count, there in clusters.items():
        here = one
        if global_batch is not None:
            here = strong_scaling(one, global_batch, count, accumulation=accumulation, other=other)
        for schedule in list(schedules):
            if isinstance(schedule, str) and count != max(counts) and not whole_groups(schedule, cluster, count):
                say(f"note: {schedule} is left out at {count} workers, which are not whole groups of its shards")
                continue
            try:
                row = _predict(here, there, schedule, asked)
            except InputError as error:
                if isinstance(schedule, Plan):
                    raise InputError(f"{asked.plan_files[schedule.strategy]}: {error}") from None
                if schedule not in offered:
                    raise
                # Nothing of it fits the device, and nobody asked for it.
                schedules.remove(schedule)
                rows = [row for row in rows if row.strategy != schedule]
                continue
            rows.append(row if here is one else _at_another_batch(row, here.notes[-1]))
    found = Predicted(one, cluster, asked, schedules, rows)
    if plot is not None:
        plots.save_scaling(scaling(found.curves), plot, title=f"{one.name} on {cluster.name}")
        say(f"wrote {plot}")
    if json:
        print_json(content(found))
    elif found.sharded and not wide and not frameworks:
        show_sharded(found)
    else:
        show(found, wide=wide)


def _named_apart(plans: list[Plan], files: list[str], names: list[str]) -> list[Plan]:
    """Plans of the same strategy as another row carry their file's name, or nobody could tell them apart."""
    strategies = [*names, *(plan.strategy for plan in plans)]
    return [
        replace(plan, strategy=f"{plan.strategy} ({file})") if strategies.count(plan.strategy) > 1 else plan
        for plan, file in zip(plans, files, strict=True)
    ]


def _predict(profile: Profile, network: Network, schedule: Schedule, asked: Asked) -> Prediction:
    choices: dict[str, Any] = {}
    if isinstance(schedule, Reduction):
        return predict_sent(profile, network, framework=schedule, accumulation=asked.accumulation)
    if isinstance(schedule, str):
        choices["communicators"] = asked.communicators
        if schedule in BUCKETED:
            choices["bucket_bytes"] = asked.bucket_bytes
        if schedule in BUDGETED:
            choices |= {"memory_bytes": asked.memory_bytes, "torch_version": asked.torch_version}
    return predict_sent(
        profile, network, schedule, accumulation=asked.accumulation, reduce_dtype=asked.reduce_dtype, **choices
    )


def _at_another_batch(row: Prediction, note: str) -> Prediction:
    """The prediction, with the note on how its batch size was reached."""
    return replace(row, notes=(*row.notes, note), extrapolated=row.extrapolated or "extrapolated" in note)
