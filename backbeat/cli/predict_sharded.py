"""What `backbeat predict` prints where parameters are sharded: what fits, how fast, and the lines to write."""

from __future__ import annotations

from backbeat.cli.common import print_answer
from backbeat.cli.predict_output import Predicted, Schedule, caveats, cost_column
from backbeat.cost.accelerators import accelerator
from backbeat.model import Plan, Prediction
from backbeat.planners import SHARDED
from backbeat.report.tables.sharding_tables import strategies_table
from backbeat.report.words.device_memory import DeviceFit
from backbeat.report.words.limits import above_linear
from backbeat.report.words.renting import partly, worth_it
from backbeat.report.words.ways import Way, chosen_way, way_decision, way_sentences, work_headline
from backbeat.simulate.predict import knee


def is_sharded(schedule: Schedule) -> bool:
    if isinstance(schedule, str):
        return schedule.partition(":")[0] in SHARDED
    return isinstance(schedule, Plan) and schedule.sharding is not None


def ways_of(found: Predicted) -> list[Way]:
    """Every row with what it takes of the device's memory; under DDP that does not depend on the workers."""
    device, budget = accelerator(found.profile.device), found.asked.memory_bytes
    plans = {schedule.strategy: schedule for schedule in found.schedules if isinstance(schedule, Plan)}

    def fit(row: Prediction) -> DeviceFit | None:
        if device is None or row.peak_bytes is None:
            return found.fits.get(row.strategy)
        return DeviceFit.of(row.peak_bytes, device, budget)

    return [Way(label=row.strategy, plan=plans.get(row.strategy), prediction=row, fit=fit(row)) for row in found.rows]


def _at_most_workers(ways: list[Way]) -> list[Way]:
    most = max(way.prediction.workers for way in ways)
    return [way for way in ways if way.prediction.workers == most]


def chosen_curve(every: list[Way]) -> list[Prediction]:
    """The way to take at each number of GPUs where one fits, in their order."""
    counts = sorted({way.prediction.workers for way in every})
    taken = [chosen_way([way for way in every if way.prediction.workers == count]) for count in counts]
    return [way.prediction for way in taken if way is not None]


def sharded_headline(every: list[Way]) -> str:
    """The verdict, and how many GPUs' work the most of them do."""
    curve = chosen_curve(every)
    several = bool(curve) and curve[-1].workers > 1
    return work_headline(_at_most_workers(every), worth_it(curve)[1] if several else "")


def show_sharded(found: Predicted) -> None:
    """The answer in 80 columns, which ends in a decision and the lines to write."""
    every = ways_of(found)
    ways = _at_most_workers(every)
    taken = chosen_way(ways)
    why: list[str] = []
    if taken is not None:
        chosen = taken.prediction
        why = [found.figures(chosen, f" with {chosen.strategy}"), found.limit(chosen)]
        why += [*way_sentences(ways), *caveats(chosen, found.network, found.profile), ""]
    print_answer(
        found.title(),
        "",
        sharded_headline(every),
        "",
        strategies_table(every, cost_column(found.profile, found.asked.price)),
        "",
        above_linear(found.rows) or None,
        *why,
        _decision(every, found),
    )


def _decision(every: list[Way], found: Predicted) -> str:
    """What to do on the most GPUs, or on as many as are worth it."""
    ways, curve, only = _at_most_workers(every), chosen_curve(every), ""
    if chosen_way(ways) is not None and curve[-1].workers > 1:
        verdict, bend = worth_it(curve)[0], knee(curve)
        if bend == 1:
            return "Decision: do not spread this job over this network."
        if bend is not None:
            ways = [way for way in every if way.prediction.workers == bend]
            only = f": rent at most {bend} GPUs on this network"
        elif verdict == "partly":
            only = f": {partly(curve)}"
    taken = chosen_way(ways)
    file = found.asked.plan_files.get(taken.prediction.strategy) if taken is not None and taken.sharded else None
    command = found.command_for if file is None else lambda chosen: ""
    return way_decision(ways, command, file or "plan.json", found.profile.optimizer, only)
