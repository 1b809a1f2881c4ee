"""How runs of our own lab are asked: replayed profiles, plans by their messages, and models simpler than `predict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from backbeat.model import Gradient, MemoryPlan, Network, Plan, Profile
from backbeat.model.batches import at_batch, join
from backbeat.planners import Draft
from backbeat.steps.predict import predict

Made = TypeVar("Made")
_MADE: dict[int, tuple[Mapping[str, Any], Any]] = {}


def once(told: Mapping[str, Any], make: Callable[[], Made]) -> Made:
    """What cases share is made for the first of them: of the very same object, which is kept."""
    if id(told) not in _MADE:
        _MADE[id(told)] = (told, make())
    made: Made = _MADE[id(told)][1]
    return made


def profile_of(told: Mapping[str, Any], load: Callable[[str], Profile]) -> Profile:
    """As a file has it; by its gradients' bytes and times; or `joined` of files, at a batch size."""
    if "joined" in told:
        found = at_batch(join(*(load(one) for one in told["joined"])), told["batch"])
        assert found.host_link is not None
        return msgspec.structs.replace(found, host_link=found.host_link.shared_by(told["nodes"]))
    if "ready_s" not in told:
        return msgspec.convert(told, Profile)
    times = {name: told[f"{name}_s"] for name in ("forward", "backward", "update")}
    rows = enumerate(zip(told["bytes"], told["ready_s"], strict=True))
    return Profile(
        name=told["name"], model=told["name"], batch_size=1, precision="", device="",
        forward_s=times["forward"], backward_s=times["backward"], update_s=times["update"],
        gradients=tuple(Gradient(name=str(index), bytes=size, ready_s=ready) for index, (size, ready) in rows),
    )  # fmt: skip


def plan_of(told: Mapping[str, Any], profile: Profile | None, workers: int) -> Plan:
    """As a file has it, or by how many gradients each message has and the communicator that sends it."""
    if "launches" not in told:
        return msgspec.convert({key: value for key, value in told.items() if key != "schema"}, Plan)
    assert profile is not None
    return Draft.of_launches(told["launches"], told["communicators"]).named(profile, told["name"], workers)


def treated(plan: Plan, segments: Sequence[Mapping[str, Any]] | None = None) -> Plan:
    """The same with what a memory plan does to blocks; every unit's blocks recomputed unless given."""
    units = plan.sharding.units if plan.sharding else ()
    every = [{"blocks": [name], "action": "recompute"} for unit in units for name in unit.modules]
    told = msgspec.convert({"segments": every if segments is None else segments}, MemoryPlan)
    return msgspec.structs.replace(plan, memory=told, predicted=None)


def closed_form(profile: Profile, network: Network, plan: Plan) -> float:
    """Compute, or all messages in a row from the first gradient on, whichever is longer: no simulation."""
    alpha, beta = network.cost.isolated.line
    messages = float(profile.ready[0]) + alpha * len(plan.buckets) + beta * profile.total_bytes
    return profile.forward_s + max(profile.backward_s, messages) + profile.update_s


def isolated_times(profile: Profile, network: Network, plan: Plan) -> float:
    """The event model without what several or back-to-back messages were measured to do."""
    return predict(profile, msgspec.structs.replace(network, concurrency=()), plan).iteration_s


SIMPLER: dict[str, Callable[[Profile, Network, Plan], float]] = {
    "closed form": closed_form,
    "isolated times": isolated_times,
}
"""Routes that leave something out, by name."""
