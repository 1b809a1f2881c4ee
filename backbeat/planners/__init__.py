"""Strategies by name, and `plan`, which runs one."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, TypedDict, Unpack

import msgspec

from backbeat.errors import InputError
from backbeat.planners.adaptive import adaptive
from backbeat.planners.baselines import ddp, horovod, single, wfbp
from backbeat.planners.decoupled import Halved, decoupled
from backbeat.planners.draft import Draft, Options
from backbeat.planners.joint import best
from backbeat.planners.mgwfbp import asc_wfbp, mg_wfbp
from backbeat.planners.optimal import optimal
from backbeat.simulate.predict import predict

if TYPE_CHECKING:
    from collections.abc import Callable

    from backbeat.model import Network, Plan, Profile

__all__ = ["STRATEGIES", "Draft", "Options", "plan", "propose"]

STRATEGIES: dict[str, Callable[[Profile, Network, Options], Draft | Halved]] = {
    "wfbp": wfbp,
    "single": single,
    "ddp": ddp,
    "horovod": horovod,
    "mg-wfbp": mg_wfbp,
    "asc-wfbp": asc_wfbp,
    "adaptive": adaptive,
    "optimal": optimal,
    "best": best,
    "decoupled": decoupled,
}


class Choices(TypedDict, total=False):
    """What a caller may fix; `Options` says what each means, and a strategy takes what concerns it."""

    channels: int | None
    bucket_bytes: int | None
    cycle_s: float | None
    budget_s: float | None


def propose(profile: Profile, network: Network, strategy: str = "best", **choices: Unpack[Choices]) -> Plan:
    """The gradient schedule that a strategy chooses for this profile on this network, not yet predicted."""
    if strategy not in STRATEGIES:
        close = difflib.get_close_matches(strategy, STRATEGIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(STRATEGIES)}."
        raise InputError(f"{strategy!r} is not a strategy: {hint}")
    options = Options(**choices)
    for name in ("channels", "bucket_bytes", "cycle_s"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise InputError(f"{name} is {value}: it must be above zero")
    return STRATEGIES[strategy](profile, network, options).named(profile, strategy, network.workers)


def plan(profile: Profile, network: Network, strategy: str = "best", **choices: Unpack[Choices]) -> Plan:
    """The gradient schedule that a strategy chooses for this profile on this network, with its prediction."""
    made = propose(profile, network, strategy, **choices)
    result = predict(profile, network, made)
    return msgspec.structs.replace(
        made,
        predicted={
            "network": network.name,
            "iteration_s": result.iteration_s,
            "scaling_factor": result.scaling_factor,
            "exposed_s": result.exposed_s,
            "bound_s": result.bound_s,
        },
    )
