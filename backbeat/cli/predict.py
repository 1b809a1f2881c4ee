"""`backbeat predict`: how a job scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backbeat.cli.common import (
    AcrossOption,
    EpochOption,
    JsonOption,
    NetworkArgument,
    PriceOption,
    ProfileArgument,
    ReduceOption,
    StrategyOption,
)

if TYPE_CHECKING:
    from rich.console import Console

    from backbeat.model import Network, Plan, Prediction, Profile
    from backbeat.report.device_memory import DeviceFit

STOCK = "ddp"
COMPARED = (STOCK, "best")
DEFAULT_STRATEGIES = (STOCK, "mg-wfbp", "optimal", "best")
"""For --wide and --json."""
_MOST_COLUMNS = 4
"""Strategies that fit beside each other in 80 columns."""
_MOST_NAME = 12


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says beside profile and network."""

    communicators: int | None = None
    bucket_bytes: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    reduce_dtype: str | None = None
    price: float | None = None
    epoch_samples: int | None = None
    samples: int = 1_000_000
    plan_words: tuple[str, ...] = ()
    """The command that makes the plan, without the number of workers."""
    plan_files: dict[str, str] = field(default_factory=dict)
    """Plans that are there already, by the name of their row."""


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
    reduce_dtype: ReduceOption = None,
    price: PriceOption = None,
    epoch_samples: EpochOption = None,
    samples: Annotated[int, typer.Option(help="GPU-hours are given for this many samples.", min=1)] = 1_000_000,
    across: AcrossOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve: scaling.png, .svg, .pdf or .html.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Every strategy in a row, with every figure.")] = False,
    json: JsonOption = False,
) -> None:
    """Predict how the job scales, what limits it and what it costs, and say what to do."""
    from backbeat.cli.common import console, load_network, print_json, size, split
    from backbeat.model import Plan, Profile
    from backbeat.simulate import strong_scaling
    from backbeat.units import parse_price, parse_workers

    one, cluster = Profile.load(profile), load_network(network, across)
    counts = parse_workers(workers) if workers else [cluster.workers]
    files = split(plan)
    every = wide or json
    names = list(dict.fromkeys(split(strategy))) or (
        [] if files and every else list(DEFAULT_STRATEGIES if every else (STOCK,) if files else COMPARED)
    )
    if not every and STOCK not in names:
        names.insert(0, STOCK)
    plans = _named_apart([Plan.load(path) for path in files], files, names)
    schedules: list[str | Plan] = [*names, *plans]
    asked = Asked(
        communicators=communicators,
        bucket_bytes=size("--bucket", bucket) if bucket else None,
        accumulation=accumulation,
        global_batch=global_batch,
        reduce_dtype=reduce_dtype,
        price=parse_price(price) if price is not None else None,
        epoch_samples=epoch_samples,
        samples=samples,
        plan_words=_plan_words(profile, network, across, reduce_dtype),
        plan_files={made.strategy: file for made, file in zip(plans, files, strict=True)},
    )
    if plot is not None:
        from backbeat.report.plot import check

        check(plot)
    other = Profile.load(other_batch) if other_batch and global_batch is not None else None
    # Refused before anything is planned: the largest number of workers is where a network ends.
    clusters = {count: cluster.at(workers=count) for count in counts}
    rows = []
    for count, there in clusters.items():
        here = one
        if global_batch is not None:
            here = strong_scaling(one, global_batch, count, accumulation=accumulation, other=other)
        for schedule in schedules:
            row = _predict(here, there, schedule, asked)
            rows.append(row if here is one else _at_another_batch(row, here.notes[-1]))
    if plot is not None:
        _plot(rows, plot, one, cluster)
    if json:
        print_json(content(one, cluster, rows, asked))
        return
    out = console()
    if wide or len(schedules) > _MOST_COLUMNS or any(len(row.strategy) > _MOST_NAME for row in rows):
        _show_wide(out, one, cluster, rows, schedules, asked)
    else:
        _show(out, one, cluster, rows, schedules, asked)


def content(profile: Profile, network: Network, rows: list[Prediction], asked: Asked) -> dict[str, Any]:
    """The answer as data."""
    from backbeat.report import tables
    from backbeat.report.running_cost import costs, tokens_per_s, utilisation
    from backbeat.simulate.sweep import knee

    fit = _fit(profile, asked)
    data = []
    for row in rows:
        share = utilisation(row, profile)
        found = tables.row(row, asked.samples)
        found["tokens_per_s"] = tokens_per_s(row, profile)
        found["mfu"] = share if isinstance(share, float) else None
        if asked.price is not None:
            found["cost"] = costs(row, profile, asked.price, asked.epoch_samples)
        data.append(found)
    return {
        "profile": profile.name,
        "network": network.name,
        "scaling": "weak" if asked.global_batch is None else "strong",
        "samples": asked.samples,
        "rows": data,
        "knee": {name: knee(curve) for name, curve in _curves(rows).items()},
        "memory": None
        if fit is None
        else {"peak_bytes": fit.peak_bytes, "device_bytes": fit.device_bytes, "fits": fit.fits},
    }


def _plan_words(profile: str, network: str, across: str | None, reduce_dtype: str | None) -> tuple[str, ...]:
    joined = ("--across", across) if across else ()
    sent = ("--reduce-dtype", reduce_dtype) if reduce_dtype else ()
    return ("backbeat", "plan", profile, network, *joined, *sent)


def _command(profile: Profile, asked: Asked, chosen: Prediction) -> str:
    """What makes or runs the plan that was predicted."""
    import shlex

    if chosen.strategy in asked.plan_files:
        return f"DistributedDataParallel(model, plan={asked.plan_files[chosen.strategy]!r})   # of backbeat.runtime"
    words = list(asked.plan_words)
    if asked.global_batch is not None:
        batch = asked.global_batch // chosen.workers // (asked.accumulation or profile.accumulation)
        if batch != profile.batch_size:
            words[2] = f"PROFILE_AT_BATCH_{batch}"
    strategy = () if chosen.strategy == "best" else ("--strategy", chosen.strategy)
    return shlex.join((*words, "--workers", str(chosen.workers), *strategy, "-o", "plan.json"))


def _show(
    out: Console,
    profile: Profile,
    network: Network,
    rows: list[Prediction],
    schedules: list[str | Plan],
    asked: Asked,
) -> None:
    """The answer in 80 columns, which ends in a decision."""
    from functools import partial

    from backbeat.cli.common import prose
    from backbeat.report.answer import decision, frontier, judged
    from backbeat.report.limits import limit
    from backbeat.report.running_cost import format_money, per_billion, unit, units_line
    from backbeat.report.tables import answer_table

    curves = _curves(rows)
    best = frontier(curves)[-1]
    fit = _fit(profile, asked)
    prose(out, _title(profile, network, asked))
    out.print()
    prose(out, judged(curves, fit)[1])
    out.print()
    price = asked.price
    cost = None
    if price is not None:
        cost = (f"$/B {unit(profile)}", lambda row: format_money(per_billion(row, profile, price)).removeprefix("$"))
    out.print(answer_table(curves, stock=STOCK, cost=cost))
    out.print()
    figures = units_line(best, profile, price=price, epoch_samples=asked.epoch_samples)
    prose(out, f"At {best.workers} GPU{'s' if best.workers > 1 else ''}: {figures}.")
    if best.workers > 1:
        prose(out, f"Limit: {limit(best, _sent(profile, asked), reduce_dtype=asked.reduce_dtype)}")
    if fit is not None and fit.fits:
        prose(out, f"Memory: {fit}.")
    for line in _peaks(rows, schedules):
        prose(out, line)
    for line in doubts(best, network, profile):
        prose(out, line)
    out.print()
    prose(out, decision(curves, fit, partial(_command, profile, asked), halved=_halved(profile, network, best, asked)))


def doubts(best: Prediction, network: Network, profile: Profile) -> list[str]:
    """At most three lines on what is not measured; the notes of a calibration were shown when it was made."""
    from backbeat.model import Source

    lines = []
    if isinstance(network.source, Source) and network.source.method in ("assumed", "published"):
        method = "from a publication" if network.source.method == "published" else "assumed"
        lines.append(f"* the network {network.name} is {method}, not measured")
    if profile.source is None:
        lines.append(f"* the profile {profile.name} does not say where its figures come from")
    about = f"network {network.name}: "
    lines += [
        f"* {note.removeprefix(about)}"
        for note in dict.fromkeys(best.notes)
        if not note.startswith(about) or "joined by" in note
    ]
    return lines if len(lines) <= 3 else [*lines[:2], f"* and {len(lines) - 2} more: --wide shows them"]


def _show_wide(
    out: Console,
    profile: Profile,
    network: Network,
    rows: list[Prediction],
    schedules: list[str | Plan],
    asked: Asked,
) -> None:
    """Every strategy in a row of its own, with every figure."""
    from backbeat.report import tables
    from backbeat.report.answer import lowered
    from backbeat.report.limits import knee_sentence, limit
    from backbeat.report.running_cost import units_line
    from backbeat.units import printable

    last = tables.fastest(rows)[max(row.workers for row in rows)]
    place = f"{last.workers} workers" if last.workers > 1 else "1 worker"
    fit = _fit(profile, asked)
    out.print(printable(_title(profile, network, asked)), soft_wrap=True)
    out.print()
    out.print(tables.scaling_table(rows, samples=asked.samples, title=""))
    lines = [
        *_peaks(rows, schedules),
        f"At {place} with {last.strategy}: "
        f"{units_line(last, profile, price=asked.price, epoch_samples=asked.epoch_samples)}.",
        f"What limits scaling: {lowered(limit(last, _sent(profile, asked), reduce_dtype=asked.reduce_dtype))}",
        knee_sentence(_curves(rows)[last.strategy]),
        *([f"Memory: {fit}."] if fit is not None else []),
        *(f"* {note}" for note in dict.fromkeys(last.notes)),
    ]
    for line in lines:
        out.print(printable(line), soft_wrap=True)


def _title(profile: Profile, network: Network, asked: Asked) -> str:
    from backbeat.report.tables import describe

    return describe(
        profile,
        network,
        accumulation=asked.accumulation,
        reduce_dtype=asked.reduce_dtype,
        global_batch=asked.global_batch,
    )


def _fit(profile: Profile, asked: Asked) -> DeviceFit | None:
    """With everything kept; at another batch than the profile's nobody knows."""
    from backbeat.report.device_memory import device_fit

    if asked.global_batch is not None:
        return None
    return device_fit(_sent(profile, asked))


def _sent(profile: Profile, asked: Asked) -> Profile:
    return profile if asked.reduce_dtype is None else profile.with_reduce_dtype(asked.reduce_dtype)


def _halved(profile: Profile, network: Network, best: Prediction, asked: Asked) -> Prediction | None:
    """The same with gradients in bf16, where sending them is what costs."""
    from backbeat.api import predict as predict_sent

    costly = best.workers > 1 and best.bottleneck in ("bandwidth", "waiting")
    if asked.reduce_dtype is not None or asked.global_batch is not None or not costly:
        return None
    return predict_sent(
        profile, network.at(workers=best.workers), STOCK, accumulation=asked.accumulation, reduce_dtype="bf16"
    )


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


def _predict(profile: Profile, network: Network, schedule: str | Plan, asked: Asked) -> Prediction:
    from backbeat.api import predict as predict_sent

    choices: dict[str, Any] = {}
    if isinstance(schedule, str):
        choices = {"communicators": asked.communicators, "bucket_bytes": asked.bucket_bytes}
    return predict_sent(
        profile, network, schedule, accumulation=asked.accumulation, reduce_dtype=asked.reduce_dtype, **choices
    )


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
