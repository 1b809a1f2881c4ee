"""A gradient schedule together with a memory plan.

Each depends on the other: recomputing and offloading delay when gradients are ready, and buckets and residuals take
device memory from activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Profile
from backbeat.model.blocks import MemoryPlan
from backbeat.planners.memory_plan import memory_plan, reserve_for, usable
from backbeat.simulate.memory_timeline import memory_timeline
from backbeat.simulate.predict import predict


def within(
    profile: Profile,
    network: Network,
    schedule: Callable[[Profile], Plan],
    memory_bytes: int | None,
    residuals: Literal["device", "host"] | None,
    reserve: float | None = None,
) -> Plan:
    """The schedule with a memory plan that fits the budget.

    First a schedule for the profile as it is, then a memory plan beside it, then a second schedule for the later ready
    times. Of the two schedules the faster that fits is taken. Residuals go to the host where asked for, or where
    nothing fits otherwise.
    """
    reserve = reserve_for(profile, reserve)
    first = schedule(profile)
    if memory_bytes is None:
        return _with(first, MemoryPlan(residuals=residuals or "device"))
    memory = _fitting(profile, first, memory_bytes, residuals, network.workers, reserve)
    plans = [_with(first, memory)]
    if memory.segments:
        changed = memory_timeline(profile, memory, first, workers=network.workers).profile
        plans.append(_with(schedule(changed), memory))
    fitting = []
    for place, plan in enumerate(plans):
        peak = memory_timeline(profile, memory, plan, workers=network.workers).peak_bytes
        if peak <= usable(memory_bytes, reserve):
            made = _with(plan, msgspec.structs.replace(memory, peak_bytes=peak))
            fitting.append((predict(profile, network, made).iteration_s, place, made))
    return min(fitting)[2]


def _fitting(
    profile: Profile,
    plan: Plan,
    budget: int,
    residuals: Literal["device", "host"] | None,
    workers: int,
    reserve: float | None,
) -> MemoryPlan:
    try:
        return memory_plan(profile, budget, plan, residuals=residuals or "device", workers=workers, reserve=reserve)
    except InputError:
        if residuals is not None or not plan.compressed or profile.host_link is None:
            raise
    return memory_plan(profile, budget, plan, residuals="host", workers=workers, reserve=reserve)


def _with(plan: Plan, memory: MemoryPlan) -> Plan:
    return msgspec.structs.replace(plan, memory=memory)
