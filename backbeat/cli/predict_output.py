"""What `backbeat predict` prints: one screen that ends in a decision, every figure, or data. Where parameters are
sharded the screen says what fits, how fast it is, and the lines to write."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from backbeat.api import predict as predict_sent
from backbeat.cli.common import console, print_answer
from backbeat.cost.accelerators import accelerator
from backbeat.model import Network, Plan, Prediction, Profile, Reduction
from backbeat.planners import BUDGETED
from backbeat.report.study import PLANNED, STOCK
from backbeat.report.tables import scaling_tables as tables
from backbeat.report.tables.sharding_tables import strategies_table
from backbeat.report.tables.terminal_table import natural_width
from backbeat.report.words.answer import unmeasured
from backbeat.report.words.device_memory import DeviceFit, device_fit
from backbeat.report.words.limits import above_linear, knee_sentence, limit
from backbeat.report.words.numbers import (
    costs,
    describe,
    format_money,
    gpu_hours,
    per_billion,
    tokens_per_s,
    unit,
    units_line,
    utilisation,
)
from backbeat.report.words.renting import decision, frontier, judged, partly, stock_name, worth_it
from backbeat.report.words.ways import Way, chosen_way, way_decision, way_sentences, work_headline
from backbeat.simulate.predict import knee
from backbeat.units import SCREEN, counted, format_bytes

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
    memory_bytes: int | None = None
    """What takes the place of the device's memory."""
    torch_version: str | None = None
    price: float | None = None
    epoch_samples: int | None = None
    samples: int = 1_000_000
    frameworks: tuple[str, ...] = ()
    """What the job runs today, by the name of its rows."""
    plan_words: tuple[str, ...] = ()
    """The command that makes the plan, without the number of workers."""
    budget_words: tuple[str, ...] = ()
    """What it needs more for strategies that choose within a budget."""
    plan_files: dict[str, str] = field(default_factory=dict)
    """Plans that are there already, by the name of their row."""

    @property
    def baseline(self) -> str:
        """What everything else is compared with."""
        return self.frameworks[0] if self.frameworks else STOCK


@dataclass(frozen=True)
class Predicted:
    """What was asked, and every row that answers it."""

    profile: Profile
    network: Network
    asked: Asked
    schedules: Sequence[Schedule]
    rows: Sequence[Prediction]

    @cached_property
    def curves(self) -> dict[str, list[Prediction]]:
        """By strategy, the rows of all numbers of workers."""
        curves: dict[str, list[Prediction]] = {}
        for row in self.rows:
            curves.setdefault(row.strategy, []).append(row)
        return curves

    @cached_property
    def fits(self) -> dict[str, DeviceFit]:
        """By row, whether it fits the device on the most workers: with everything kept, unless a plan says what is. At
        another batch than the profile's nobody knows."""
        if self.asked.global_batch is not None:
            return {}
        top = max(row.workers for row in self.rows)
        found: dict[str, DeviceFit] = {}
        for schedule, row in zip(self.schedules, (row for row in self.rows if row.workers == top), strict=True):
            if isinstance(schedule, Reduction):
                # It may hold its share of the optimizer's state alone, or a second buffer of gradients.
                fit = device_fit(schedule.on_device(self.profile, top), budget_bytes=self.asked.memory_bytes)
            else:
                kept = schedule if isinstance(schedule, Plan) else None
                fit = device_fit(self.sent, kept, budget_bytes=self.asked.memory_bytes)
            if fit is not None:
                known = row.peak_bytes if isinstance(schedule, str) else None
                found[row.strategy] = fit if known is None else replace(fit, peak_bytes=known)
        return found

    @cached_property
    def too_big(self) -> Set[str]:
        """Rows that do not fit the device; empty where none does, or nothing could be chosen."""
        found = {name for name, fit in self.fits.items() if not fit.fits}
        return found if not found >= set(self.curves) else set()

    @cached_property
    def best(self) -> Prediction:
        """The fastest that can be chosen, on the most workers."""
        return frontier(self.curves, self.too_big)[-1]

    @property
    def sent(self) -> Profile:
        """The profile with its gradients as they are sent."""
        dtype = self.asked.reduce_dtype
        return self.profile if dtype is None else self.profile.with_reduce_dtype(dtype)

    @property
    def headline(self) -> str:
        fit = self.fits.get(self.best.strategy)
        return judged(self.curves, fit, stock=self.asked.baseline, too_big=self.too_big)[1]

    @cached_property
    def ways(self) -> list[Way]:
        """Every row with what it takes of the device's memory; under DDP that does not depend on the workers."""
        device, budget = accelerator(self.profile.device), self.asked.memory_bytes
        plans = {schedule.strategy: schedule for schedule in self.schedules if isinstance(schedule, Plan)}

        def way(row: Prediction) -> Way:
            fit = self.fits.get(row.strategy)
            if device is not None and row.peak_bytes is not None:
                fit = DeviceFit.of(row.peak_bytes, device, budget)
            return Way(label=row.strategy, plan=plans.get(row.strategy), prediction=row, fit=fit)

        return [way(row) for row in self.rows]

    @property
    def sharded(self) -> bool:
        """Some of what is compared shards parameters."""
        return any(way.sharded for way in self.ways)

    def title(self) -> str:
        asked = self.asked
        sized = "" if asked.bucket_bytes is None else f"; DDP with buckets of {format_bytes(asked.bucket_bytes)}"
        described = describe(
            self.profile,
            self.network,
            accumulation=asked.accumulation,
            reduce_dtype=None if asked.frameworks else asked.reduce_dtype,
            global_batch=asked.global_batch,
        )
        differ = asked.frameworks and asked.reduce_dtype is not None
        both = f"; plans send {asked.reduce_dtype}, a framework its own dtype" if differ else ""
        return described + sized + both

    def figures(self, row: Prediction, which: str) -> str:
        """Speed, utilisation and money of a row."""
        asked = self.asked
        figures = units_line(row, self.profile, price=asked.price, epoch_samples=asked.epoch_samples)
        return f"At {counted(row.workers, 'GPU')}{which}: {figures}."

    def limit(self, row: Prediction) -> str:
        return f"Limit: {limit(row, self.sent, reduce_dtype=self.asked.reduce_dtype)}"

    def command_for(self, chosen: Prediction) -> str:
        """What makes or runs the plan that was predicted; nothing does for what a framework does."""
        asked, profile = self.asked, self.profile
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
        budget = asked.budget_words if chosen.strategy in BUDGETED else ()
        return shlex.join((*words, "--workers", str(chosen.workers), *strategy, *budget, "-o", "plan.json"))


def content(found: Predicted) -> dict[str, Any]:
    """The answer as data."""
    profile, asked = found.profile, found.asked
    data = []
    for row in found.rows:
        share, fit = utilisation(row, profile), found.fits.get(row.strategy)
        fields: dict[str, Any] = msgspec.to_builtins(row)
        del fields["timeline"]
        fields |= {
            "gap": row.gap,
            "gpu_hours": gpu_hours(row, asked.samples),
            "tokens_per_s": tokens_per_s(row, profile),
            "mfu": share if isinstance(share, float) else None,
            "memory": None
            if fit is None
            else {"peak_bytes": fit.peak_bytes, "device_bytes": fit.device_bytes, "fits": fit.fits},
        }
        if asked.price is not None:
            fields["cost"] = costs(row, profile, asked.price, asked.epoch_samples)
        data.append(fields)
    return {
        "profile": profile.name,
        "network": found.network.name,
        "scaling": "weak" if asked.global_batch is None else "strong",
        "samples": asked.samples,
        "rows": data,
        "headline": sharded_headline(found) if found.sharded else found.headline,
        "not_measured": unmeasured(profile, found.network),
        "knee": {name: knee(curve) for name, curve in found.curves.items()},
    }


def show(found: Predicted, *, wide: bool) -> None:
    """The answer in 80 columns, which ends in a decision. With `wide`, or where strategies beside each other take more
    columns, each has a row of its own with every figure."""
    profile, asked, curves, too_big, best = found.profile, found.asked, found.curves, found.too_big, found.best
    fit, stock = found.fits.get(best.strategy), asked.baseline
    cost = cost_column(profile, asked.price)
    shown = [tables.answer_table(curves, stock=stock, cost=cost, too_big=too_big)] if not wide else []
    if wide or natural_width(shown[0]) > SCREEN:
        wide = True
        shown = tables.scaling_tables(found.rows, samples=asked.samples, width=console().width)
    large = {name: "the plan" if name == PLANNED else stock_name(name) for name in sorted(too_big)}
    print_answer(
        found.title(),
        "",
        found.headline,
        "",
        *(part for table in shown for part in (table, "")),
        found.figures(best, f" with {best.strategy}" if wide and len(curves) > 1 else ""),
        found.limit(best) if best.workers > 1 else None,
        knee_sentence(curves[best.strategy]) if wide else None,
        f"Memory: {fit}." if fit is not None and fit.fits else None,
        *(f"Too big: {words}, {format_bytes(found.fits[name].peak_bytes)}." for name, words in large.items()),
        *_peaks(found),
        *caveats(best, found.network, profile, every=wide),
        "",
        decision(curves, fit, found.command_for, stock_bf16=_stock_bf16(found), stock=stock, too_big=too_big),
    )


def cost_column(profile: Profile, price: float | None) -> tuple[str, Callable[[Prediction], str]] | None:
    """The column of costs: its heading, and the cell of a row. None without a price."""
    if price is None:
        return None
    return f"$/B {unit(profile)}", lambda row: format_money(per_billion(row, profile, price)).removeprefix("$")


def caveats(
    best: Prediction, network: Network, profile: Profile, *, every: bool = False, shown_by: str = "--wide"
) -> list[str]:
    """What is not measured, in four lines; or `every` note, those of a calibration too, which were shown when it was
    made. `shown_by` shows the rest."""
    lines = [f"* {line}" for line in unmeasured(profile, network)]
    about = f"network {network.name}: "
    lines += [
        f"* {note.removeprefix(about)}"
        for note in dict.fromkeys(best.notes)
        if every or not note.startswith(about) or "joined by" in note
    ]
    return lines if every or len(lines) <= 4 else [*lines[:3], f"* and {len(lines) - 3} more: {shown_by} shows them"]


def _stock_bf16(found: Predicted) -> Prediction | None:
    """Stock DDP with gradients in bf16 on the most workers, where sending them is what costs."""
    asked, best = found.asked, found.best
    costly = best.workers > 1 and best.bottleneck in ("bandwidth", "waiting")
    if asked.reduce_dtype is not None or asked.global_batch is not None or not costly:
        return None
    there = found.network.at(workers=best.workers)
    return predict_sent(found.profile, there, STOCK, accumulation=asked.accumulation, reduce_dtype="bf16")


def _peaks(found: Predicted) -> list[str]:
    """Device memory of the plans that say what is kept of activations."""
    lines = []
    for plan in found.schedules:
        if not isinstance(plan, Plan) or plan.memory is None:
            continue
        peak = max((row.peak_bytes or 0 for row in found.curves[plan.strategy]), default=0)
        if peak:
            line = f"{plan.strategy}: predicted peak {format_bytes(peak)} of device memory"
            if (budget := plan.memory.budget_bytes) is not None:
                line += f", of a budget of {format_bytes(budget)}" + (": too much" if peak > budget else "")
            lines.append(f"{line}.")
    return lines


def show_sharded(found: Predicted) -> None:
    """The answer in 80 columns, which ends in a decision and the lines to write."""
    ways = _most_workers(found.ways)
    taken = chosen_way(ways)
    why: list[str] = []
    if taken is not None:
        chosen = taken.prediction
        why = [found.figures(chosen, f" with {chosen.strategy}"), found.limit(chosen)]
        why += [*way_sentences(ways), *caveats(chosen, found.network, found.profile), ""]
    print_answer(
        found.title(),
        "",
        sharded_headline(found),
        "",
        strategies_table(found.ways, cost_column(found.profile, found.asked.price)),
        "",
        above_linear(found.rows) or None,
        *why,
        _sharded_decision(found),
    )


def sharded_headline(found: Predicted) -> str:
    """The verdict, and how many GPUs' work the most of them do."""
    curve = _chosen_curve(found.ways)
    several = bool(curve) and curve[-1].workers > 1
    return work_headline(_most_workers(found.ways), worth_it(curve)[1] if several else "")


def _sharded_decision(found: Predicted) -> str:
    """What to do on the most GPUs, or on as many as are worth it."""
    ways, curve, only = _most_workers(found.ways), _chosen_curve(found.ways), ""
    if chosen_way(ways) is not None and curve[-1].workers > 1:
        verdict, bend = worth_it(curve)[0], knee(curve)
        if bend == 1:
            return "Decision: do not spread this job over this network."
        if bend is not None:
            ways = [way for way in found.ways if way.prediction.workers == bend]
            only = f": rent at most {bend} GPUs on this network"
        elif verdict == "partly":
            only = f": {partly(curve)}"
    taken = chosen_way(ways)
    file = found.asked.plan_files.get(taken.prediction.strategy) if taken is not None and taken.sharded else None
    command = found.command_for if file is None else lambda chosen: ""
    return way_decision(ways, command, file or "plan.json", found.profile.optimizer, only)


def _chosen_curve(ways: Sequence[Way]) -> list[Prediction]:
    """The way to take at each number of GPUs where one fits, in their order."""
    counts = sorted({way.prediction.workers for way in ways})
    taken = [chosen_way([way for way in ways if way.prediction.workers == count]) for count in counts]
    return [way.prediction for way in taken if way is not None]


def _most_workers(ways: Sequence[Way]) -> list[Way]:
    most = max(way.prediction.workers for way in ways)
    return [way for way in ways if way.prediction.workers == most]
