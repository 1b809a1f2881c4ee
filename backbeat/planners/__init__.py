"""Strategies by name, and `plan`, which runs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict, Unpack

from msgspec.structs import replace

from backbeat.errors import InputError, did_you_mean
from backbeat.model import Network, Plan, Profile
from backbeat.model.plan import PlanPrediction
from backbeat.planners.adaptive import adaptive
from backbeat.planners.baselines import ddp, horovod, single, wfbp
from backbeat.planners.best import best
from backbeat.planners.compressed_or_dense import compressed
from backbeat.planners.draft import Draft, StrategyOptions
from backbeat.planners.memory_plan import plan_within_memory
from backbeat.planners.mgwfbp import asc_wfbp, mg_wfbp
from backbeat.planners.optimal import optimal
from backbeat.planners.sharded import decoupled, sharded
from backbeat.planners.sharded_baselines import fsdp, hsdp, zero1, zero2
from backbeat.simulate.host_lane import HostLane, device_alone
from backbeat.simulate.predict import predict
from backbeat.units import format_bytes

__all__ = [
    "BUCKETED", "BUDGETED", "FIXED_BUCKETS", "SHARDED", "STRATEGIES", "Choices", "Draft", "StrategyOptions",
    "is_sharded", "plan", "propose", "whole_groups",
]  # fmt: skip

STRATEGIES: dict[str, Callable[[Profile, Network, StrategyOptions], Draft | Plan]] = {
    "wfbp": wfbp,
    "single": single,
    "ddp": ddp,
    "horovod": horovod,
    "mg-wfbp": mg_wfbp,
    "asc-wfbp": asc_wfbp,
    "adaptive": adaptive,
    "optimal": optimal,
    "best": best,
    "compressed": compressed,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "zero1": zero1,
    "zero2": zero2,
    "decoupled": decoupled,
    "sharded": sharded,
}
SHARDED = frozenset({"fsdp", "hsdp", "zero1", "zero2", "decoupled", "sharded"})
"""Strategies that shard parameters rather than send gradients in buckets."""
BUDGETED = frozenset({"decoupled", "sharded"})
"""Strategies that choose within a memory budget themselves."""
BUCKETED = frozenset({"ddp", "horovod"})
"""Strategies that take `bucket_bytes`."""
FIXED_BUCKETS = frozenset(STRATEGIES) - SHARDED - {"horovod", "compressed"}
"""Strategies whose buckets are the same in every step, and hold gradients as they are."""


def is_sharded(strategy: str) -> bool:
    """Whether a strategy shards parameters; it may name its groups.

    >>> is_sharded("hsdp:8"), is_sharded("best")
    (True, False)
    """
    return strategy.partition(":")[0] in SHARDED


class Choices(TypedDict, total=False):
    """What a caller may fix; `StrategyOptions` says what each means, and a strategy takes what concerns it."""

    communicators: int | None
    bucket_bytes: int | None
    cycle_s: float | None
    budget_s: float | None
    density: float | None
    memory_bytes: int | None
    reserve: float | None
    residuals: Literal["device", "host"] | None
    torch_version: str | None


class JobChoices(Choices, total=False):
    """The same, and facts of the job that sharded strategies plan for."""

    reduce_dtype: str | None
    accumulation: int | None


def propose(profile: Profile, network: Network, strategy: str = "best", **choices: Unpack[JobChoices]) -> Plan:
    """The gradient schedule that a strategy chooses for this profile on this network, not yet predicted.

    `hsdp:8` is hsdp with 8 shards.
    """
    name, shards = _shards(strategy)
    if name not in STRATEGIES:
        zero3 = strategy.lower().replace("-", "").replace("_", "") == "zero3"
        hint = "ZeRO-3 is 'fsdp'" if zero3 else did_you_mean(strategy, STRATEGIES)
        raise InputError(f"{strategy!r} is not a strategy: {hint}")
    options = StrategyOptions(**choices, shards=shards)  # type: ignore[arg-type]
    if options.density is not None and strategy == "best":
        name = strategy = "compressed"
    _check(strategy, options)
    _check_memory(strategy, options.memory_bytes, options.reserve)

    def schedule(of: Profile) -> Plan:
        # Waiting for the host is no time to hide communication behind: it does not wait for the network.
        own = device_alone(of)
        made = STRATEGIES[name](own, network, options)
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


def _check_memory(strategy: str, memory_bytes: int | None, reserve: float | None) -> None:
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


def plan(profile: Profile, network: Network, strategy: str = "best", **choices: Unpack[JobChoices]) -> Plan:
    """The gradient schedule that a strategy chooses for this profile on this network, with its prediction."""
    made = propose(profile, network, strategy, **choices)
    accumulation = choices.get("accumulation")
    result = predict(profile, network, made, accumulation=accumulation)
    predicted = PlanPrediction.of(result, network.name)
    if (older := made.on_older_torch()) is not None:
        without_s = predict(profile, network, older, accumulation=accumulation).iteration_s
        predicted = replace(predicted, older_torch_s=without_s)
    return replace(made, predicted=predicted)
