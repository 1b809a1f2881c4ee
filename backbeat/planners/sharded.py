"""`sharded`: FSDP2's units and settings, chosen together within a memory budget.

It chooses which consecutive blocks form a unit, which units are resharded after forward, how far forward prefetches,
the mesh, and which blocks are recomputed. With torch 2.13 it also chooses how many reduce-scatter inputs are held, and
whether reduce-scatters have a communicator of their own. Every plan runs on stock `fully_shard`. Dtypes are those of
`fsdp`, unless the caller names another: a plan never changes what is computed.

1. On each mesh, with units that are all resharded or all kept, `unit_programme` finds where units end. That is exact
   for its sub-problem: one micro-batch, one communicator, no contention.
2. The engine scores those units, with contention and accumulation, beside `fsdp`, `hsdp` and `zero2`. A choice that
   does not fit keeps fewer units whole after forward, recomputes as few blocks as needed, or both.
3. The fastest are improved by prefetch, by moving boundaries, and by the newer settings where torch has them; where
   memory is short also by keeping and freeing single units, each time with as few blocks recomputed as fit.
4. Of plans within 1 % of the fastest, it takes the one with the fewest changes from `fsdp`, and never one slower than
   an `fsdp` that fits. So no `hsdp` or `zero2` that fits gains more than 1 %.

Where every unit stays whole after forward, reduce-scatters hide behind backward and all-gathers behind the next
forward: the decoupled schedule of DeAR.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Profile
from backbeat.model.accelerator import accelerator
from backbeat.model.blocks import MemoryPlan
from backbeat.model.gpu_memory import device_bytes
from backbeat.model.rule import PLANS
from backbeat.planners.draft import StrategyOptions
from backbeat.planners.memory_plan import needed, reserve_for, usable
from backbeat.planners.shard_problem import Scored, ShardProblem
from backbeat.planners.shard_search import ShardSearch
from backbeat.units import format_bytes

NEWER_TORCH = "2.13"
"""Holds several reduce-scatter inputs, and has a communicator for reduce-scatters."""


def sharded(profile: Profile, network: Network, options: StrategyOptions) -> Plan:
    """The plan with the fewest changes from `fsdp` within 1 % of the fastest found that fits.

    Without a budget it fits the device, where the profile says what memory it takes and its device is known.

    On 8 workers joined by 25 Gbit/s, sending takes longer than computing, and latency is small beside it. So units stay
    whole after forward, which spares a third of the bytes, and they are large.

    >>> from backbeat.model import Network, Profile
    >>> from backbeat.planners.draft import StrategyOptions
    >>> gpt2, slow = Profile.load("gpt2-b8-bf16-h200"), Network.load("25gbe").at(workers=8)
    >>> made = sharded(gpt2, slow, StrategyOptions())
    >>> [(len(unit.modules), unit.reshard) for unit in made.sharding.units]
    [(4, False), (4, False), (3, False), (1, False)]
    """
    problem = ShardProblem(profile, network, options)
    if not problem.names:
        raise InputError(
            f"the profile {profile.name!r} has no modules to make units of: their parameters are named like "
            "layers.0.weight; profile the model again, or use --way fsdp, which shards it as one unit"
        )
    reserve = reserve_for(profile, options.reserve)
    budget = options.memory_bytes
    device = accelerator(profile.device)
    if budget is not None and profile.memory is None:
        raise InputError(
            f"the profile {profile.name!r} has no memory figures, so no plan can be held to {format_bytes(budget)}: "
            "profile it again with `backbeat profile`, or leave the budget out"
        )
    size = budget if budget is not None else device_bytes(device) if profile.memory and device else None
    search = ShardSearch(problem, None if size is None else usable(size, reserve))
    newer = _has_newer_settings(options.torch_version)
    found = search.run()
    if not found:
        least = needed(min(problem.peaks.values()), reserve)
        again, other = "with blocks recomputed", "or a smaller batch"
        if not profile.blocks:
            again = "with all activations kept, as the profile knows no blocks that could be computed again"
            other = "a smaller batch, or a profile with blocks (`backbeat profile`)"
        raise InputError(
            f"a memory budget of {format_bytes(size or 0)} is too small: sharded over {network.workers} workers and "
            f"{again}, the smallest found that fits is {least} bytes ({format_bytes(least)}). Give that much, more "
            f"workers, {other}"
        )
    newer_found = search.with_newer_settings(found)
    best = search.simplest([*found, *newer_found] if newer else found)
    gained = best if newer else search.simplest([*found, *newer_found])
    plan = problem.plan(best.choice)
    notes, memory = (*problem.whole.notes, *_advice(problem, best, gained, options)), plan.memory
    if budget is not None:
        memory = replace(memory or MemoryPlan(), budget_bytes=budget, peak_bytes=best.peak_bytes)
    return replace(plan, memory=memory, notes=notes)


def _advice(problem: ShardProblem, best: Scored, gained: Scored, options: StrategyOptions) -> Iterator[str]:
    """What would make a step shorter: a newer torch, with which it is `gained`, and gradients reduced in bf16."""
    if gained.seconds < best.seconds * (1 - PLANS):
        settings = [f"{gained.choice.buffers} reduce-scatter inputs"] * (gained.choice.buffers > 1)
        settings += ["a communicator for reduce-scatters"] * gained.choice.separate
        yield (
            f"with torch {NEWER_TORCH}, {' and '.join(settings)} would make a step "
            f"{_shorter(best.seconds, gained.seconds)} (the choice `torch_version` of `backbeat.planners.propose`)"
        )
    if options.reduce_dtype is None:
        in_bf16 = problem.seconds(best.choice, "bf16")
        if in_bf16 < best.seconds * (1 - PLANS):
            yield (
                f"gradients reduced in bf16 would make a step {_shorter(best.seconds, in_bf16)}: plan with "
                "--reduce-dtype bf16 if training bears sums in two bytes"
            )


def _shorter(seconds: float, then_s: float) -> str:
    """
    >>> _shorter(0.5, 0.4)
    '20 % shorter'
    """
    return f"{1 - then_s / seconds:.0%} shorter".replace("%", " %")


def _has_newer_settings(version: str | None) -> bool:
    """An unsaid torch is taken not to have them."""
    if version is None:
        return False
    parts = version.partition("+")[0].split(".")[:2]
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise InputError(f"torch_version is {version!r}: it must begin with two numbers, like 2.11 or 2.13.0")
    return [int(part) for part in parts] >= [int(part) for part in NEWER_TORCH.split(".")]
