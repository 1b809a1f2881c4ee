"""What to know of a prediction: where its figures come from, and which lie beyond what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean

from backbeat.cost.operator_curves import REFERENCE
from backbeat.cost.stragglers import LEAST_SAMPLES
from backbeat.model.accelerator import accelerator
from backbeat.model.moved import compression_rates
from backbeat.model.network import Network
from backbeat.model.network_rows import HALVES
from backbeat.model.plan import Plan
from backbeat.model.prediction import Note
from backbeat.model.profile import Profile
from backbeat.model.sharding import Sharding

BEYOND = frozenset({"extrapolated", "large", "slowest_extrapolated"})
"""Kinds of notes that say so of a figure."""
_UNLIKE = 2.0
"""Iterations that take this many times as long as their parts, or as much less, are noted: a unit may be wrong."""


def noted(
    profile: Profile,
    network: Network,
    plan: Plan,
    largest_bytes: float,
    *,
    slowest_extrapolated: bool = False,
    pieces: Iterable[str] = (),
) -> list[Note]:
    """On messages of up to so many bytes. `pieces` is how a sharded model was cut."""
    from_rows = _workers_notes(network, plan)
    large = _size_notes(network, plan, largest_bytes)
    slowest = []
    if slowest_extrapolated:
        counts = {"workers": network.workers, "iterations": len(profile.iteration_s)}
        slowest.append(Note("slowest_extrapolated", counts))
    return [*_plan_notes(profile, network, plan, pieces), *from_rows, *large, *_time_notes(profile), *slowest]


def _plan_notes(profile: Profile, network: Network, plan: Plan, pieces: Iterable[str]) -> Iterator[Note]:
    """On the profile, the network and what the plan makes of them."""
    if profile.analytic:
        yield Note("analytic", {"profile": profile.name})
    if profile.moved_from is not None:
        yield Note("moved", {"profile": profile.name, "measured": profile.moved_from, "device": profile.device})
    if profile.analytic or profile.moved_from is not None:
        device = accelerator(profile.device)
        if device is None or not device.measured:
            like = "the one that its file names" if device is None else device.like or REFERENCE
            yield Note("data_sheet", {"device": profile.device.removesuffix(" (analytic)"), "like": like})
    # The last note of nodes that were joined by another network says so.
    joined = network.topology.inside is not None and not network.topology.pipelined
    for left, text in enumerate(network.notes, start=1 - len(network.notes)):
        yield Note("joined" if joined and not left else "network", {"network": network.name, "text": text})
    if plan.compressed and network.workers > 1:
        yield from _compressed_notes(profile, network, plan)
    if plan.sharding is not None:
        yield from (Note("pieces", {"text": text}) for text in pieces)
        yield from _sharded_notes(profile, network, plan.sharding)
    if plan.workers is not None and plan.workers != network.workers:
        yield Note("made_for", {"made_for": plan.workers, "workers": network.workers})
    if network.workers > 1 and 0 < len(profile.iteration_s) < LEAST_SAMPLES:
        yield Note("few_iterations", {"counted_iteration_time": len(profile.iteration_s), "needed": LEAST_SAMPLES})
    if plan.dynamic is None and (left_out := plan.missing(profile)):
        yield Note("left_out", {"gradients": len(left_out), "first": left_out[0]})


def _compressed_notes(profile: Profile, network: Network, plan: Plan) -> Iterator[Note]:
    """What is assumed rather than measured."""
    rates = compression_rates(profile)
    if rates.origin != "measured":
        yield Note(f"compression_{rates.origin}", {"ns_per_byte": rates.per_byte * 1e9})
    elif profile.compression_s_per_bucket is None:
        yield Note("compression_launches")
    if network.all_gather is None:
        yield Note("compressed_gather")
    if plan.communicators > 1:
        yield Note("compressed_communicators", {"communicators": plan.communicators})


def _sharded_notes(profile: Profile, network: Network, sharding: Sharding) -> Iterator[Note]:
    if not profile.knows_precision:
        yield Note("precision_unknown", {"precision": profile.precision})
    halves = {"all-gather": network.all_gather, "reduce-scatter": network.reduce_scatter}
    # On gloo a reduce-scatter takes a whole all-reduce.
    missing = [word for word in halves if halves[word] is None and (word == "all-gather" or network.backend != "gloo")]
    if missing and sharding.mesh.shard > 1:
        yield Note("halves", {"collectives": " and ".join(missing)})


def _one_copy(plan: Plan) -> bool:
    """All workers gather together. With several copies parts of the job do: `at` another number than the network's."""
    return plan.sharding is not None and plan.sharding.mesh.replicate == 1


def _workers_notes(network: Network, plan: Plan) -> list[Note]:
    """Which numbers of workers the times come from."""
    workers, notes = network.workers, []
    values: dict[str, str | int | float]
    used = network.sources() if workers > 1 else ()
    if len(used) == 1:
        fabric = network.topology.fabric
        how = network.topology.algorithm + (f", {fabric.kind} fabric" if fabric is not None else "")
        values = {"collective": "all-reduce", "workers": workers, "measured": used[0], "how": f" ({how})"}
        notes.append(Note("extrapolated", values))
    elif used:
        below, above = used
        values = {"collective": "all-reduce", "workers": workers, "below": below, "above": above}
        notes.append(Note("interpolated", values))
    for name in HALVES if _one_copy(plan) else ():
        if len(used := network.sources(name)) == 1:
            values = {"collective": name.replace("_", "-"), "workers": workers, "measured": used[0], "how": ""}
            notes.append(Note("extrapolated", values))
    return notes


def _size_notes(network: Network, plan: Plan, largest_bytes: float) -> list[Note]:
    measured = [network.largest_bytes(name) for name in HALVES] if _one_copy(plan) else []
    largest = min((size for size in measured if size is not None), default=network.largest_bytes())
    if largest is None or largest_bytes <= largest:
        return []
    return [Note("large", {"what": "buckets" if plan.sharding is None else "units", "largest_bytes": largest})]


def _time_notes(profile: Profile) -> list[Note]:
    alone_s = profile.single_s
    usual_s = fmean(profile.iteration_s) if profile.iteration_s else alone_s
    if alone_s / _UNLIKE <= usual_s <= alone_s * _UNLIKE:
        return []
    return [Note("units_unlike", {"usual_s": usual_s, "alone_s": alone_s})]
