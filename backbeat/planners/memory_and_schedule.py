"""A gradient schedule together with a memory plan.

Each depends on the other: recomputing and offloading delay when gradients are ready, and buckets and residuals take
device memory from activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Profile
from backbeat.model.blocks import MemoryPlan
from backbeat.planners.draft import StrategyOptions
from backbeat.planners.memory_plan import memory_plan, reserve_for, usable
from backbeat.simulate.memory_timeline import memory_timeline
from backbeat.simulate.predict import predict


def plan_within_memory(
    profile: Profile, network: Network, schedule: Callable[[Profile], Plan], options: StrategyOptions
) -> Plan:
    """The schedule with a memory plan that fits the budget.

    First a schedule for the profile as it is, then a memory plan beside it, then a second schedule for the later ready
    times. Of the two schedules the faster that fits is taken. Residuals go to the host where asked for, or where
    nothing fits otherwise.
    """
    first = schedule(profile)
    if options.memory_bytes is None:
        return replace(first, memory=MemoryPlan(residuals=options.residuals or "device"))
    memory = _fitting(profile, first, options.memory_bytes, network.workers, options)
    room = usable(options.memory_bytes, reserve_for(profile, options.reserve))
    plans = [replace(first, memory=memory)]
    if memory.segments:
        changed = memory_timeline(profile, memory, first, workers=network.workers).profile
        plans.append(replace(schedule(changed), memory=memory))
    fitting = []
    for index, plan in enumerate(plans):
        peak = memory_timeline(profile, memory, plan, workers=network.workers).peak_bytes
        if peak <= room:
            made = replace(plan, memory=replace(memory, peak_bytes=peak))
            fitting.append((predict(profile, network, made).iteration_s, index, made))
    return min(fitting)[2]


def _fitting(profile: Profile, plan: Plan, budget: int, workers: int, options: StrategyOptions) -> MemoryPlan:
    def planned(residuals: Literal["device", "host"]) -> MemoryPlan:
        return memory_plan(profile, budget, plan, residuals=residuals, workers=workers, reserve=options.reserve)

    try:
        return planned(options.residuals or "device")
    except InputError:
        if options.residuals is not None or not plan.compressed or profile.host_link is None:
            raise
    return planned("host")
