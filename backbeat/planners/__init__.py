"""Strategies by name, and `propose`, which runs one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.structs import replace

from backbeat.errors import InputError, did_you_mean
from backbeat.model import Network, Plan, Profile
from backbeat.model.profile import device_alone
from backbeat.planners.adaptive import adaptive
from backbeat.planners.baselines import asc_wfbp, ddp, horovod, mg_wfbp, single, wfbp
from backbeat.planners.best import best
from backbeat.planners.compressed_or_dense import compressed
from backbeat.planners.draft import Draft, StrategyOptions
from backbeat.planners.memory_plan import plan_within_memory
from backbeat.planners.optimal import optimal
from backbeat.planners.sharded import sharded
from backbeat.planners.sharded_baselines import fsdp, hsdp, zero1, zero2
from backbeat.steps.host import HostLane
from backbeat.steps.predict import predict
from backbeat.units import format_bytes

__all__ = [
    "BUCKETED", "BUDGETED", "FIXED_BUCKETS", "KNOWN_AS", "OTHERWISE_CALLED", "SEVERAL", "SHARDED", "STRATEGIES",
    "Draft", "Strategy", "StrategyOptions", "is_sharded", "propose", "unit_strategies", "whole_groups",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Strategy:
    """What is known of a strategy; sets and tables elsewhere are made from it."""

    run: Callable[[Profile, Network, StrategyOptions], Draft | Plan]
    kind: Literal["buckets", "buckets at run time", "compressed buckets", "units"] = "buckets"
    """What it plans. Units shard parameters; buckets send gradients, and all but the first kind change in every step or
    hold them other than they are."""
    known_as: str = ""
    """What people call it, for a way to hold the model."""
    bucket: bool = False
    """It takes `bucket_bytes`."""
    budgeted: bool = False
    """It chooses within a memory budget itself."""
    several: bool = False
    """It uses a second communicator where nobody says how many."""


STRATEGIES = {
    "wfbp": Strategy(wfbp),
    "single": Strategy(single),
    "ddp": Strategy(ddp, known_as="DDP", bucket=True),
    "horovod": Strategy(horovod, "buckets at run time", bucket=True),
    "mg-wfbp": Strategy(mg_wfbp),
    "asc-wfbp": Strategy(asc_wfbp, several=True),
    "adaptive": Strategy(adaptive),
    "optimal": Strategy(optimal),
    "best": Strategy(best, known_as="DDP with planned buckets", several=True),
    "compressed": Strategy(compressed, "compressed buckets"),
    "fsdp": Strategy(fsdp, "units", "FSDP"),
    "hsdp": Strategy(hsdp, "units", "HSDP"),
    "zero1": Strategy(zero1, "units", "ZeRO-1"),
    "zero2": Strategy(zero2, "units", "ZeRO-2"),
    "sharded": Strategy(sharded, "units", "planned sharding", budgeted=True),
}
"""By name; of those that people have a name for, the simplest first."""
SHARDED = frozenset(name for name, one in STRATEGIES.items() if one.kind == "units")
BUDGETED = frozenset(name for name, one in STRATEGIES.items() if one.budgeted)
BUCKETED = frozenset(name for name, one in STRATEGIES.items() if one.bucket)
FIXED_BUCKETS = frozenset(name for name, one in STRATEGIES.items() if one.kind == "buckets")
"""Strategies whose buckets are the same in every step, and hold gradients as they are."""
SEVERAL = frozenset(name for name, one in STRATEGIES.items() if one.several)
KNOWN_AS = {name: one.known_as for name, one in STRATEGIES.items() if one.known_as}
"""What people call the ways to hold a model, the simplest first."""
OTHERWISE_CALLED = {
    "zero3": "ZeRO-3 is 'fsdp'",
    "zero-3": "ZeRO-3 is 'fsdp'",
    "decoupled": "it went: 'sharded' weighs its plans, whose units stay gathered after forward",
}
"""What others, or this before 1.0, call by a name that is none here."""


def is_sharded(strategy: str) -> bool:
    """Whether a strategy shards parameters; it may name its groups.

    >>> is_sharded("hsdp:8"), is_sharded("best")
    (True, False)
    """
    return strategy.partition(":")[0] in SHARDED


def unit_strategies(network: Network) -> list[str]:
    """Those that may be predicted for it where it is not said which, the ones planned quickest first."""
    within = 1 < network.topology.gpus_per_node < network.workers
    return [name for name in ("zero2", "hsdp", "fsdp", "sharded") if name != "hsdp" or within]


def propose(profile: Profile, network: Network, strategy: str = "best", **choices: Any) -> Plan:
    """The gradient schedule that a strategy chooses for this profile on this network, not yet predicted.

    `hsdp:8` is hsdp with 8 shards. What the caller may fix are fields of `StrategyOptions`; a strategy takes what
    concerns it.
    """
    name, shards = _shards(strategy)
    if name not in STRATEGIES:
        hint = OTHERWISE_CALLED.get(strategy.lower().replace("_", "-")) or did_you_mean(strategy, STRATEGIES)
        raise InputError(f"{strategy!r} is not a strategy: {hint}")
    options = StrategyOptions(**choices, shards=shards)
    _check(strategy, options)

    def schedule(of: Profile) -> Plan:
        # Waiting for the host is no time to hide communication behind: it does not wait for the network.
        own = device_alone(of)
        made = STRATEGIES[name].run(own, network, options)
        if not isinstance(made, Draft):
            return replace(made, strategy=strategy)
        planned = made.named(own, strategy, network.workers)
        if name != "best" or not HostLane.of(of).by_block:
            return planned
        # More buckets are more for the host to issue.
        stock = ddp(own, network, StrategyOptions()).named(own, strategy, network.workers)
        return min((planned, stock), key=lambda one: predict(of, network, one).iteration_s)

    if name in BUDGETED or (options.memory_bytes is None and options.residuals is None):
        return schedule(profile)
    return plan_within_memory(profile, network, schedule, options)


def whole_groups(strategy: str, network: Network, workers: int) -> bool:
    """Whether so many workers form whole groups of the strategy's shards.

    >>> network = Network.load("10gbe")
    >>> [whole_groups(name, network, 12) for name in ("hsdp:4", "hsdp:8", "fsdp", "best")]
    [True, False, True, True]
    """
    name, shards = _shards(strategy)
    return name != "hsdp" or workers % (shards or network.topology.gpus_per_node) == 0


def _shards(strategy: str) -> tuple[str, int | None]:
    name, colon, count = strategy.partition(":")
    if not colon:
        return name, None
    if name != "hsdp":
        raise InputError(f"{strategy!r} is not a strategy: only hsdp takes a number, of shards, like hsdp:8")
    if not count.isascii() or not count.isdigit() or int(count) < 1:
        raise InputError(f"{strategy!r} is not a strategy: hsdp takes the number of shards, like hsdp:8")
    return name, int(count)


def _check(strategy: str, options: StrategyOptions) -> None:
    """Refuse values out of range, and what does not concern the strategy."""
    for name in ("communicators", "bucket_bytes", "cycle_s"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise InputError(f"{name} is {value}: it must be above zero")
    if options.bucket_bytes is not None and strategy not in BUCKETED:
        raise InputError(
            f"bucket_bytes is {options.bucket_bytes}, but {strategy!r} chooses its buckets itself: leave it out, or "
            "use ddp or horovod"
        )
    if options.density is not None and strategy != "compressed":
        raise InputError(f"density is {options.density}, but {strategy!r} sends every element: use compressed")
    if options.residuals is not None and strategy != "compressed":
        raise InputError(f"residuals is {options.residuals!r}, but {strategy!r} has none: use compressed")
    memory_bytes, reserve = options.memory_bytes, options.reserve
    if memory_bytes is None:
        if reserve is not None:
            raise InputError(f"reserve is {reserve}, but there is no memory budget to leave it from: give memory_bytes")
        return
    if is_sharded(strategy) and strategy not in BUDGETED:
        raise InputError(
            f"{strategy!r} keeps no budget of memory ({format_bytes(memory_bytes)}): it is what people write by hand; "
            "use `sharded`, which chooses within one, or leave the budget out and see the peak that is predicted"
        )
    if memory_bytes <= 0:
        raise InputError(f"memory_bytes is {memory_bytes}: it must be above zero")
    if reserve is not None and not 0 <= reserve < memory_bytes:
        raise InputError(
            f"reserve is {reserve}: it must be a share from 0 to below 1, or bytes below the budget of {memory_bytes}"
        )
