"""What `backbeat predict` prints: one screen that ends in a decision, every figure, or data."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from backbeat.api import predict as predict_sent
from backbeat.cli.common import prose
from backbeat.model import Plan, Reduction, Source
from backbeat.report import tables
from backbeat.report.answer import decision, frontier, judged, lowered
from backbeat.report.device_memory import device_fit
from backbeat.report.limits import knee_sentence, limit
from backbeat.report.running_cost import costs, format_money, per_billion, tokens_per_s, unit, units_line, utilisation
from backbeat.report.study import STOCK
from backbeat.report.ways import chosen_way, find_ways, way_code, way_headline, way_labels, way_words
from backbeat.simulate.sweep import knee
from backbeat.units import format_bytes, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from backbeat.model import Network, Prediction, Profile
    from backbeat.report.device_memory import DeviceFit

Schedule = str | Plan | Reduction
"""A strategy by name, a plan, or what a framework does."""


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


def content(
    profile: Profile,
    network: Network,
    rows: list[Prediction],
    asked: Asked,
    schedules: Sequence[Schedule] = (),
) -> dict[str, Any]:
    """The answer as data."""
    fit = _fit(profile, asked, schedules, max(row.workers for row in rows))
    data = []
    for row in rows:
        share = utilisation(row, profile)
        found = tables.row(row, asked.samples)
        found["tokens_per_s"] = tokens_per_s(row, profile)
        found["mfu"] = share if isinstance(share, float) else None
        if asked.price is not None:
            found["cost"] = costs(row, profile, asked.price, asked.epoch_samples)
        data.append(found)
    curves = curves_of(rows)
    return {
        "profile": profile.name,
        "network": network.name,
        "scaling": "weak" if asked.global_batch is None else "strong",
        "samples": asked.samples,
        "rows": data,
        "headline": judged(curves, fit)[1] if STOCK in curves else None,
        "knee": {name: knee(curve) for name, curve in curves.items()},
        "memory": None
        if fit is None
        else {"peak_bytes": fit.peak_bytes, "device_bytes": fit.device_bytes, "fits": fit.fits},
    }


def _command(profile: Profile, asked: Asked, chosen: Prediction) -> str:
    """What makes or runs the plan that was predicted."""
    if chosen.strategy in asked.plan_files:
        return f"DistributedDataParallel(model, plan={asked.plan_files[chosen.strategy]!r})   # of backbeat.runtime"
    words = list(asked.plan_words)
    if asked.global_batch is not None:
        batch = asked.global_batch // chosen.workers // (asked.accumulation or profile.accumulation)
        if batch != profile.batch_size:
            words[2] = f"PROFILE_AT_BATCH_{batch}"
    strategy = () if chosen.strategy == "best" else ("--strategy", chosen.strategy)
    return shlex.join((*words, "--workers", str(chosen.workers), *strategy, "-o", "plan.json"))


def show(
    out: Console,
    profile: Profile,
    network: Network,
    rows: list[Prediction],
    schedules: list[Schedule],
    asked: Asked,
) -> None:
    """The answer in 80 columns, which ends in a decision."""
    curves = curves_of(rows)
    best = frontier(curves)[-1]
    fit = _fit(profile, asked, schedules, best.workers)
    prose(out, _title(profile, network, asked))
    out.print()
    prose(out, judged(curves, fit)[1])
    out.print()
    price = asked.price
    cost = None
    if price is not None:
        cost = (f"$/B {unit(profile)}", lambda row: format_money(per_billion(row, profile, price)).removeprefix("$"))
    out.print(tables.answer_table(curves, stock=STOCK, cost=cost))
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
    if fit is not None and not fit.fits:
        _show_ways(out, profile, network.at(workers=best.workers), asked)


def _show_ways(out: Console, profile: Profile, network: Network, asked: Asked) -> None:
    """What to do where DDP does not fit: which way to hold the model does, how fast it is, and the lines to write."""
    ways = find_ways(profile, network, way_labels(profile, network), accumulation=asked.accumulation)
    taken = chosen_way(ways)
    if not ways:
        return
    prose(out, f"DDP, FSDP or HSDP? {way_headline(ways)} {way_words(ways)}")
    if taken is not None and taken.sharded:
        words = (*asked.plan_words, "--workers", str(network.workers), "--strategy", taken.label, "-o", "plan.json")
        out.print(textwrap.indent(way_code(taken, shlex.join(words)), "  "), soft_wrap=True)


def doubts(best: Prediction, network: Network, profile: Profile) -> list[str]:
    """At most three lines on what is not measured; the notes of a calibration were shown when it was made."""
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


def show_wide(
    out: Console,
    profile: Profile,
    network: Network,
    rows: list[Prediction],
    schedules: list[Schedule],
    asked: Asked,
) -> None:
    """Every strategy in a row of its own, with every figure."""
    last = tables.fastest(rows)[max(row.workers for row in rows)]
    place = f"{last.workers} workers" if last.workers > 1 else "1 worker"
    fit = _fit(profile, asked, schedules, last.workers)
    out.print(printable(_title(profile, network, asked)), soft_wrap=True)
    out.print()
    out.print(tables.scaling_table(rows, samples=asked.samples, title=""))
    lines = [
        *_peaks(rows, schedules),
        f"At {place} with {last.strategy}: "
        f"{units_line(last, profile, price=asked.price, epoch_samples=asked.epoch_samples)}.",
        f"What limits scaling: {lowered(limit(last, _sent(profile, asked), reduce_dtype=asked.reduce_dtype))}",
        knee_sentence(curves_of(rows)[last.strategy]),
        *([f"Memory: {fit}."] if fit is not None else []),
        *(f"* {note}" for note in dict.fromkeys(last.notes)),
    ]
    for line in lines:
        out.print(printable(line), soft_wrap=True)


def _title(profile: Profile, network: Network, asked: Asked) -> str:
    return tables.describe(
        profile,
        network,
        accumulation=asked.accumulation,
        reduce_dtype=asked.reduce_dtype,
        global_batch=asked.global_batch,
    )


def _fit(profile: Profile, asked: Asked, schedules: Sequence[Schedule], workers: int) -> DeviceFit | None:
    """With everything kept, unless a plan says what is; at another batch than the profile's nobody knows. A framework
    may hold its share of the optimizer's state alone, or a second buffer of gradients: the first that is named counts.
    """
    if asked.global_batch is not None:
        return None
    plan = next((one for one in schedules if isinstance(one, Plan) and one.memory is not None), None)
    framework = next((one for one in schedules if isinstance(one, Reduction)), None)
    if framework is not None:
        return device_fit(framework.on_device(profile, workers))
    return device_fit(_sent(profile, asked), plan)


def _sent(profile: Profile, asked: Asked) -> Profile:
    return profile if asked.reduce_dtype is None else profile.with_reduce_dtype(asked.reduce_dtype)


def _halved(profile: Profile, network: Network, best: Prediction, asked: Asked) -> Prediction | None:
    """The same with gradients in bf16, where sending them is what costs."""
    costly = best.workers > 1 and best.bottleneck in ("bandwidth", "waiting")
    if asked.reduce_dtype is not None or asked.global_batch is not None or not costly:
        return None
    return predict_sent(
        profile, network.at(workers=best.workers), STOCK, accumulation=asked.accumulation, reduce_dtype="bf16"
    )


def curves_of(rows: list[Prediction]) -> dict[str, list[Prediction]]:
    curves: dict[str, list[Prediction]] = {}
    for row in rows:
        curves.setdefault(row.strategy, []).append(row)
    return curves


def _peaks(rows: list[Prediction], schedules: list[Schedule]) -> list[str]:
    """Device memory of the plans that say what is kept of activations."""
    budgets = {
        schedule.strategy: schedule.memory.budget_bytes
        for schedule in schedules
        if isinstance(schedule, Plan) and schedule.memory is not None
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
