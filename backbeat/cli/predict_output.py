"""What `backbeat predict` prints: one screen that ends in a decision, every figure, or data."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rich.console import Console

from backbeat.api import predict as predict_sent
from backbeat.cli.common import prose
from backbeat.model import Network, Plan, Prediction, Profile, Reduction
from backbeat.report import tables
from backbeat.report.answer import unmeasured
from backbeat.report.device_memory import DeviceFit, device_fit
from backbeat.report.limits import knee_sentence, limit
from backbeat.report.renting import decision, frontier, judged, stock_name
from backbeat.report.running_cost import costs, format_money, per_billion, tokens_per_s, unit, units_line, utilisation
from backbeat.report.study import PLANNED, STOCK
from backbeat.simulate.sweep import knee
from backbeat.units import counted, format_bytes

Schedule = str | Plan | Reduction
"""A strategy by name, a plan, or what a framework does."""
_SCREEN = 80


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
    frameworks: tuple[str, ...] = ()
    """What the job runs today, by the name of its rows."""
    plan_words: tuple[str, ...] = ()
    """The command that makes the plan, without the number of workers."""
    plan_files: dict[str, str] = field(default_factory=dict)
    """Plans that are there already, by the name of their row."""

    @property
    def baseline(self) -> str:
        """What everything else is compared with."""
        return self.frameworks[0] if self.frameworks else STOCK


def content(
    profile: Profile,
    network: Network,
    rows: list[Prediction],
    asked: Asked,
    schedules: Sequence[Schedule],
) -> dict[str, Any]:
    """The answer as data."""
    fits = fits_of(profile, asked, schedules, rows)
    data = []
    for row in rows:
        share = utilisation(row, profile)
        found = tables.row(row, asked.samples)
        found["tokens_per_s"] = tokens_per_s(row, profile)
        found["mfu"] = share if isinstance(share, float) else None
        fit = fits.get(row.strategy)
        found["memory"] = (
            None if fit is None else {"peak_bytes": fit.peak_bytes, "device_bytes": fit.device_bytes, "fits": fit.fits}
        )
        if asked.price is not None:
            found["cost"] = costs(row, profile, asked.price, asked.epoch_samples)
        data.append(found)
    curves = curves_of(rows)
    too_big = _too_big(fits, curves)
    best = frontier({name: curve for name, curve in curves.items() if name not in too_big})[-1]
    headline = judged(curves, fits.get(best.strategy), stock=asked.baseline, too_big=too_big)[1]
    return {
        "profile": profile.name,
        "network": network.name,
        "scaling": "weak" if asked.global_batch is None else "strong",
        "samples": asked.samples,
        "rows": data,
        "headline": headline,
        "not_measured": unmeasured(profile, network),
        "knee": {name: knee(curve) for name, curve in curves.items()},
    }


def command_for(profile: Profile, asked: Asked, chosen: Prediction) -> str:
    """What makes or runs the plan that was predicted; nothing does for what a framework does."""
    if chosen.strategy in asked.frameworks:
        return ""
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
    *,
    wide: bool,
) -> None:
    """The answer in 80 columns, which ends in a decision. With `wide`, or where strategies beside each other take more
    columns, each has a row of its own with every figure."""
    curves = curves_of(rows)
    fits = fits_of(profile, asked, schedules, rows)
    too_big = _too_big(fits, curves)
    best = frontier({name: curve for name, curve in curves.items() if name not in too_big})[-1]
    fit = fits.get(best.strategy)
    stock = asked.baseline
    prose(out, title_of(profile, network, asked))
    out.print()
    prose(out, judged(curves, fit, stock=stock, too_big=too_big)[1])
    out.print()
    price = asked.price
    shown = (
        None if wide else tables.answer_table(curves, stock=stock, cost=cost_column(profile, price), too_big=too_big)
    )
    if shown is not None and tables.natural_width(shown) <= _SCREEN:
        out.print(shown)
    else:
        wide = True
        several = tables.scaling_tables(rows, samples=asked.samples, width=out.width)
        for index, table in enumerate(several):
            out.print(*([""] if index else []), table, sep="\n")
    out.print()
    figures = units_line(best, profile, price=price, epoch_samples=asked.epoch_samples)
    chosen = f" with {best.strategy}" if wide and len(curves) > 1 else ""
    prose(out, f"At {counted(best.workers, 'GPU')}{chosen}: {figures}.")
    if best.workers > 1:
        prose(out, f"Limit: {limit(best, sent_by(profile, asked), reduce_dtype=asked.reduce_dtype)}")
    if wide:
        prose(out, knee_sentence(curves[best.strategy]))
    if fit is not None and fit.fits:
        prose(out, f"Memory: {fit}.")
    for name in sorted(too_big):
        prose(
            out,
            f"Too big: {'the plan' if name == PLANNED else stock_name(name)}, {format_bytes(fits[name].peak_bytes)}.",
        )
    for line in _peaks(rows, schedules):
        prose(out, line)
    for line in caveats(best, network, profile, every=wide):
        prose(out, line)
    out.print()
    halved = _halved(profile, network, best, asked)
    command = partial(command_for, profile, asked)
    prose(out, decision(curves, fit, command, halved=halved, stock=stock, too_big=too_big))


def cost_column(profile: Profile, price: float | None) -> tuple[str, Callable[[Prediction], str]] | None:
    """Of a table, where a price is given: its heading, and what a row says."""
    if price is None:
        return None
    return f"$/B {unit(profile)}", lambda row: format_money(per_billion(row, profile, price)).removeprefix("$")


def caveats(best: Prediction, network: Network, profile: Profile, *, every: bool = False) -> list[str]:
    """What is not measured, in four lines; or `every` note, those of a calibration too, which were shown when it was
    made."""
    lines = [f"* {line}" for line in unmeasured(profile, network)]
    about = f"network {network.name}: "
    lines += [
        f"* {note.removeprefix(about)}"
        for note in dict.fromkeys(best.notes)
        if every or not note.startswith(about) or "joined by" in note
    ]
    return lines if every or len(lines) <= 4 else [*lines[:3], f"* and {len(lines) - 3} more: --wide shows them"]


def title_of(profile: Profile, network: Network, asked: Asked) -> str:
    sized = "" if asked.bucket_bytes is None else f"; DDP with buckets of {format_bytes(asked.bucket_bytes)}"
    described = tables.describe(
        profile,
        network,
        accumulation=asked.accumulation,
        reduce_dtype=None if asked.frameworks else asked.reduce_dtype,
        global_batch=asked.global_batch,
    )
    differ = asked.frameworks and asked.reduce_dtype is not None
    both = f"; plans send {asked.reduce_dtype}, a framework its own dtype" if differ else ""
    return described + sized + both


def fits_of(
    profile: Profile, asked: Asked, schedules: Sequence[Schedule], rows: Sequence[Prediction]
) -> dict[str, DeviceFit]:
    """By row, whether it fits the device on the most workers: with everything kept, unless a plan says what is. At
    another batch than the profile's nobody knows."""
    if asked.global_batch is not None:
        return {}
    top = max(row.workers for row in rows)
    found: dict[str, DeviceFit] = {}
    for schedule, row in zip(schedules, (row for row in rows if row.workers == top), strict=True):
        if isinstance(schedule, Reduction):
            # It may hold its share of the optimizer's state alone, or a second buffer of gradients.
            fit = device_fit(schedule.on_device(profile, top))
        else:
            fit = device_fit(sent_by(profile, asked), schedule if isinstance(schedule, Plan) else None)
        if fit is not None:
            known = row.peak_bytes if isinstance(schedule, str) else None
            found[row.strategy] = fit if known is None else replace(fit, peak_bytes=known)
    return found


def _too_big(fits: Mapping[str, DeviceFit], curves: Mapping[str, object]) -> Set[str]:
    """What nobody can choose, unless nothing is left."""
    found = {name for name, fit in fits.items() if not fit.fits}
    return found if not found >= set(curves) else set()


def sent_by(profile: Profile, asked: Asked) -> Profile:
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
