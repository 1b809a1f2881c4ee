"""What `backbeat predict` prints where parameters are sharded: what fits, how fast, and the lines to write."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from backbeat.cli.common import prose
from backbeat.cli.predict_output import command_for, doubts, fits_of, sent_by, title_of
from backbeat.cost.accelerators import accelerator
from backbeat.model import Plan
from backbeat.planners import SHARDED
from backbeat.report.device_memory import device_fit
from backbeat.report.limits import limit
from backbeat.report.running_cost import units_line
from backbeat.report.sharding_answer import ShardingAnswer, at_most_workers
from backbeat.report.sharding_tables import strategies_table

if TYPE_CHECKING:
    from rich.console import Console

    from backbeat.cli.predict_output import Asked, Schedule
    from backbeat.model import Network, Prediction, Profile


def is_sharded(schedule: Schedule) -> bool:
    if isinstance(schedule, str):
        return schedule.partition(":")[0] in SHARDED
    return isinstance(schedule, Plan) and schedule.sharding is not None


def sharded_strategies(profile: Profile, network: Network, counts: list[int]) -> list[str]:
    """What to compare where the job does not fit the device with DDP; nothing where it does."""
    fit = device_fit(profile)
    if fit is None or fit.fits:
        return []
    node = network.topology.gpus_per_node
    groups = node > 1 and all(count % node == 0 and count > node for count in counts)
    return ["fsdp", *([f"hsdp:{node}"] if groups else []), "sharded"]


def with_peaks(profile: Profile, rows: list[Prediction], schedules: list[Schedule], asked: Asked) -> list[Prediction]:
    """Every row with what it takes of the device's memory; under DDP that does not depend on the workers."""
    fits = fits_of(profile, asked, schedules, rows)
    return [
        row
        if row.peak_bytes is not None or row.strategy not in fits
        else msgspec.structs.replace(row, peak_bytes=fits[row.strategy].peak_bytes)
        for row in rows
    ]


def sharding_answer(profile: Profile, rows: list[Prediction]) -> ShardingAnswer:
    """At the largest number of workers."""
    device = accelerator(profile.device)
    return ShardingAnswer(
        rows=at_most_workers(rows),
        device=device.name if device else None,
        device_bytes=device.memory_bytes if device else None,
    )


def show_sharded(
    out: Console,
    profile: Profile,
    network: Network,
    rows: list[Prediction],
    schedules: list[Schedule],
    asked: Asked,
) -> None:
    """The answer in 80 columns, which ends in a decision and the lines to write."""
    rows = with_peaks(profile, rows, schedules, asked)
    answer = sharding_answer(profile, rows)
    chosen = answer.chosen
    prose(out, title_of(profile, network, asked))
    out.print()
    prose(out, answer.headline())
    out.print()
    out.print(strategies_table(rows, answer.fits))
    out.print()
    if chosen is not None:
        figures = units_line(chosen, profile, price=asked.price, epoch_samples=asked.epoch_samples)
        prose(out, f"At {chosen.workers} GPU{'' if chosen.workers == 1 else 's'} with {chosen.strategy}: {figures}.")
        prose(out, f"Limit: {limit(chosen, sent_by(profile, asked), reduce_dtype=asked.reduce_dtype)}")
        for line in (*answer.compared(), *doubts(chosen, network, profile)):
            prose(out, line)
        out.print()
    prose(out, answer.decision(partial(command_for, profile, asked)))
