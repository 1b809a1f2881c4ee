"""`memory_budget=` of the wrapper: the memory plan that keeps to it, and a warning where training passes it."""

from __future__ import annotations

import logging
import math
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed import ProcessGroup

from backbeat.errors import InputError
from backbeat.model import MemoryPlan, Network, Plan, Profile
from backbeat.runtime.memory.activations import Handle, apply, check
from backbeat.units import format_bytes, parse_bytes

logger = logging.getLogger("backbeat.runtime")

Named = str | os.PathLike[str]
FIRST_STEPS = 10
EVERY = 200
"""When the peak is looked at: after each of the first steps, and now and then later."""


def within_budget(
    plan: Plan | None,
    strategy: str | None,
    budget: int | str | None,
    profile: Profile | Named | None,
    network: Network | Named | None,
    workers: int,
) -> tuple[Plan | None, MemoryPlan | None]:
    """The plan to run and the memory plan to apply. Raises where the budget is too small, or may be.

    A plan that has a memory plan brings its own. Otherwise the profile gives one: together with the buckets where a
    strategy and a network are named, for the plan's own buckets where they are not.
    """
    if budget is None:
        if profile is not None:
            raise InputError("profile= is there to plan a memory_budget with: give that too, like '6GB', or neither")
        return plan, plan.memory if plan is not None else None
    size = budget_size(budget)
    if plan is not None and plan.memory is not None:
        needed, option = plan.memory.peak_bytes, f"`backbeat plan … --memory {format_bytes(size).replace(' ', '')}`"
        if needed is None:
            raise InputError(
                f"the plan's memory part does not say what peak it was predicted to have: make it again with {option}"
            )
        if needed > size:
            raise InputError(
                f"memory_budget is {format_bytes(size)}, but the plan was predicted to need {format_bytes(needed)}: "
                f"make one with {option}, or raise the budget"
            )
        return plan, plan.memory
    if profile is None:
        raise InputError(
            f"memory_budget is {budget!r}, but nothing says what this model needs: give a plan made with "
            "`backbeat plan … --memory`, or profile= (from `backbeat profile`)"
        )
    from backbeat.planners.memory_plan import memory_plan
    from backbeat.planners.planned import planned as make_plan

    known = profile if isinstance(profile, Profile) else Profile.load(profile)
    if plan is None and strategy not in (None, "auto") and network is not None:
        cluster = network if isinstance(network, Network) else Network.load(network)
        made = make_plan(known, cluster.at(workers=workers), str(strategy), memory_bytes=size)
        return made, made.memory
    memory = memory_plan(known, size, plan, workers=workers)
    return (None if plan is None else replace(plan, memory=memory)), memory


def budget_size(budget: int | float | str, name: str = "memory_budget") -> int:
    """An argument of this name, in bytes."""
    if isinstance(budget, str):
        try:
            size: float = parse_bytes(budget)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    elif isinstance(budget, (int, float)) and not isinstance(budget, bool) and math.isfinite(budget):
        size = budget
    else:
        raise InputError(f"{name} is {budget!r}: it must be a number of bytes, or text like '6GB'")
    if size < 1:
        raise InputError(f"{name} is {budget!r}: it must be above zero, like '6GB'")
    return int(size)


def check_memory(module: Any, memory: MemoryPlan | None) -> None:
    """Raise what `apply_memory` would raise, before anything has been done to the model."""
    if memory is not None and not memory.keeps_all:
        check(module, memory)


def apply_memory(wrapper: Any, module: Any, memory: MemoryPlan | None) -> Handle | None:
    """Apply the memory plan to the model as long as its wrapper lives; None where there is nothing to do."""
    if memory is None or memory.keeps_all:
        return None
    handle = apply(module, memory)
    ends_with(wrapper, handle)
    return handle


def ends_with(wrapper: Any, handle: Handle | None) -> None:
    """Remove the memory plan when the wrapper dies, so that the model can be wrapped again."""
    if handle is not None:
        weakref.finalize(wrapper, handle.remove).atexit = False


def device_peak(device: torch.device) -> int | None:
    """The most that torch's allocator has held on the device since the process began or the user last reset it. The
    host keeps this number, so nothing waits."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class BudgetCheck:
    """Compares the device's peak with a budget, and warns once."""

    def __init__(self, budget_bytes: int, predicted_bytes: int | None, device: torch.device) -> None:
        self._budget = budget_bytes
        self._predicted = predicted_bytes
        self._device = device
        self._before = device_peak(device)
        """A peak that is still this one came before the model was wrapped, and says nothing about training."""
        self._steps = 0
        self._warned = False

    def after_step(self) -> None:
        self._steps += 1
        if self._warned or (self._steps > FIRST_STEPS and self._steps % EVERY):
            return
        peak = device_peak(self._device)
        if peak is None or peak == self._before or peak <= self._budget:
            return
        self._warned = True
        logger.warning(self._said(peak))

    def _said(self, peak: int) -> str:
        text = (
            f"the memory budget of {format_bytes(self._budget)} is passed: training has taken {format_bytes(peak)} "
            "(torch.cuda.max_memory_allocated() since its last reset)"
        )
        text += "" if self._predicted is None else f", {format_bytes(self._predicted)} were predicted"
        text += (
            ". Not in a profile are workspaces of convolutions (torch.backends.cudnn.benchmark tries large ones in the "
            "first steps), and whatever else this process keeps on the device."
        )
        if self._predicted is None or peak <= self._predicted:
            return f"{text} Plan again with a smaller --memory"
        more = peak - self._predicted
        if more >= self._budget:
            return f"{text} These alone take more than the budget: look for what is kept besides the model"
        return f"{text} Plan again with --memory {_typed(self._budget - more)}"


def budget_check_of(
    budget_bytes: int | None, memory: MemoryPlan | None, group: ProcessGroup, device: torch.device
) -> BudgetCheck | None:
    """What watches this budget; None where there is none. All ranks train alike, so rank 0 speaks for them."""
    if budget_bytes is None or dist.get_rank(group) != 0:
        return None
    return BudgetCheck(budget_bytes, memory.peak_bytes if memory is not None else None, device)


def _typed(size: int) -> str:
    """For a command line, to the megabyte."""
    return f"{size // 10**6}MB" if size >= 10**8 else f"{size}B"
