"""`backbeat predict`: how a job scales."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backbeat.cli.common import JsonOption, NetworkArgument, ProfileArgument, StrategyOption

if TYPE_CHECKING:
    from backbeat.model import Network, Plan, Prediction, Profile

DEFAULT_STRATEGIES = ("ddp", "mg-wfbp", "optimal", "best")


def predict(
    profile: ProfileArgument,
    network: NetworkArgument,
    workers: Annotated[
        str | None,
        typer.Option("--workers", "-n", help="64, 4..2048 (doubling) or 8,16,48. Default: the network's own."),
    ] = None,
    strategy: StrategyOption = None,
    plan: Annotated[list[str] | None, typer.Option("--plan", help="Plan files to predict, comma-separated.")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches per iteration.")] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Strong scaling: this many samples per iteration over all workers.")
    ] = None,
    other_batch: Annotated[
        str | None, typer.Option(help="With --global-batch: a second profile of the model, at another batch size.")
    ] = None,
    communicators: Annotated[int | None, typer.Option(help="Communicators to use (for best: at most).")] = None,
    bucket: Annotated[
        str | None, typer.Option(help="Bucket or fusion buffer size for ddp and horovod, like 25MB.")
    ] = None,
    samples: Annotated[int, typer.Option(help="GPU-hours are given for this many samples.", min=1)] = 1_000_000,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve: scaling.png, .svg, .pdf or .html.")] = None,
    json: JsonOption = False,
) -> None:
    """Predict iteration time, scaling factor, throughput and GPU-hours for each number of workers and strategy."""
    from backbeat.cli.common import console, print_json, split
    from backbeat.model import Network, Plan, Profile
    from backbeat.report import tables
    from backbeat.simulate import strong_scaling
    from backbeat.units import parse_bytes, parse_workers, printable

    one, cluster = Profile.load(profile), Network.load(network)
    counts = parse_workers(workers) if workers else [cluster.workers]
    files = split(plan)
    names = list(dict.fromkeys(split(strategy))) or ([] if files else list(DEFAULT_STRATEGIES))
    schedules: list[str | Plan] = [*names, *_named_apart([Plan.load(path) for path in files], files, names)]
    bucket_bytes = parse_bytes(bucket) if bucket else None
    if plot is not None:
        from backbeat.report.plot import check

        check(plot)
    other = Profile.load(other_batch) if other_batch and global_batch is not None else None
    rows = []
    for count in counts:
        here, there = one, cluster.at(workers=count)
        if global_batch is not None:
            here = strong_scaling(one, global_batch, count, accumulation=accumulation, other=other)
        for schedule in schedules:
            row = _predict(here, there, schedule, communicators, bucket_bytes, accumulation)
            rows.append(row if here is one else _at_another_batch(row, here.notes[-1]))
    if plot is not None:
        _plot(rows, plot, one, cluster)
    if json:
        print_json(content(one, cluster, rows, samples, "weak" if global_batch is None else "strong"))
        return
    out = console()
    title = tables.describe(one, cluster) if global_batch is None else _strong_title(one, cluster, global_batch)
    out.print(printable(title), soft_wrap=True)
    out.print()
    out.print(tables.scaling_table(rows, samples=samples, title=""))
    for line in (*_peaks(rows, schedules), *_remarks(rows, _knees(rows))):
        out.print(printable(line), soft_wrap=True)


def content(profile: Profile, network: Network, rows: list[Prediction], samples: int, scaling: str) -> dict[str, Any]:
    """The table as data."""
    from backbeat.report import tables

    return {
        "profile": profile.name,
        "network": network.name,
        "scaling": scaling,
        "samples": samples,
        "rows": [tables.row(row, samples) for row in rows],
        "knee": _knees(rows),
    }


def _named_apart(plans: list[Plan], files: list[str], names: list[str]) -> list[Plan]:
    """Plans of the same strategy as another row carry their file's name, or nobody could tell them apart."""
    import msgspec

    strategies = [*names, *(plan.strategy for plan in plans)]
    return [
        msgspec.structs.replace(plan, strategy=f"{plan.strategy} ({file})")
        if strategies.count(plan.strategy) > 1
        else plan
        for plan, file in zip(plans, files, strict=True)
    ]


def _predict(
    profile: Profile,
    network: Network,
    schedule: str | Plan,
    communicators: int | None,
    bucket_bytes: int | None,
    accumulation: int | None,
) -> Prediction:
    from backbeat.planners import propose
    from backbeat.simulate import predict as predict_plan

    if isinstance(schedule, str):
        schedule = propose(profile, network, schedule, communicators=communicators, bucket_bytes=bucket_bytes)
    return predict_plan(profile, network, schedule, accumulation=accumulation)


def _at_another_batch(row: Prediction, note: str) -> Prediction:
    """The prediction with what is to be known of its batch size."""
    import msgspec

    return msgspec.structs.replace(
        row, notes=(*row.notes, note), extrapolated=row.extrapolated or "extrapolated" in note
    )


def _curves(rows: list[Prediction]) -> dict[str, list[Prediction]]:
    curves: dict[str, list[Prediction]] = {}
    for row in rows:
        curves.setdefault(row.strategy, []).append(row)
    return curves


def _knees(rows: list[Prediction]) -> dict[str, int | None]:
    """Per strategy, the number of workers past which added ones bring less than half their worth."""
    from backbeat.simulate.sweep import knee

    bends = {name: knee(curve) for name, curve in _curves(rows).items() if len(curve) > 1}
    return {name: bend.workers if bend else None for name, bend in bends.items()}


def _plot(rows: list[Prediction], path: Path, profile: Profile, network: Network) -> None:
    from backbeat.cli.common import say
    from backbeat.report.figures import scaling
    from backbeat.report.plot import save_scaling

    save_scaling(scaling(_curves(rows)), path, title=f"{profile.name} on {network.name}")
    say(f"wrote {path}")


def _peaks(rows: list[Prediction], schedules: list[str | Plan]) -> list[str]:
    """Device memory of the plans that say what is kept of activations."""
    from backbeat.units import format_bytes

    budgets = {
        schedule.strategy: schedule.memory.budget_bytes
        for schedule in schedules
        if not isinstance(schedule, str) and schedule.memory is not None
    }
    lines = []
    for name, budget in budgets.items():
        peaks = [row.peak_bytes for row in rows if row.strategy == name and row.peak_bytes is not None]
        if peaks:
            line = f"{name}: predicted peak {format_bytes(max(peaks))} of device memory"
            if budget is not None:
                line += f", of a budget of {format_bytes(budget)}" + (": too much" if max(peaks) > budget else "")
            lines.append(f"{line}.")
    return lines


def _remarks(rows: list[Prediction], bends: dict[str, int | None]) -> list[str]:
    from backbeat.report.answer import limit
    from backbeat.report.tables import fastest

    last = fastest(rows)[max(row.workers for row in rows)]
    place = f"{last.workers} workers" if last.workers > 1 else "1 worker"
    lines = [f"At {place} with {last.strategy}, what limits scaling: {limit(last)}"]
    if last.strategy in bends:
        bend = bends[last.strategy]
        top = max(row.workers for row in rows)
        lines.append(
            f"Knee: none up to {top} workers; each added worker still brings more than half of its own throughput."
            if bend is None
            else f"Knee: {bend} workers; beyond, an added worker brings less than half of its own throughput."
        )
    return [*lines, *(f"* {note}" for note in dict.fromkeys(last.notes))]


def _strong_title(profile: Profile, network: Network, global_batch: int) -> str:
    from backbeat.report.tables import named

    return (
        f"{profile.model}, global batch {global_batch} shared by the workers (strong scaling), {profile.precision} on "
        f"{profile.device}; network {named(network)}"
    )
