"""A network with more or less bandwidth and latency, and a profile at another batch size: what a what-if asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from backbeat.cost import Curve, LinkCost
from backbeat.cost.link import busy_curve
from backbeat.model import CollectiveTimes, ConcurrencyPoint, Network
from backbeat.simulate.batch import at_batch

if TYPE_CHECKING:
    from backbeat.model import Profile


def scaled_network(network: Network, *, bandwidth: float = 1.0, latency: float = 1.0) -> Network:
    """Link work divided by `bandwidth`, latency multiplied by `latency`.

    Where a node has an inside of its own (NVLink), only what crosses nodes changes. How messages share the link,
    and how they cost less or more back to back, is taken to stay.
    """
    if bandwidth == 1.0 and latency == 1.0:
        return network

    def moved(times: CollectiveTimes | None) -> CollectiveTimes | None:
        return None if times is None else _stretched(times, latency, 1 / bandwidth)

    inside = network.topology.inside
    all_reduce = (
        _stretched(network.all_reduce, latency, 1 / bandwidth)
        if inside is None
        else _stretched_across(network.all_reduce, inside, latency, 1 / bandwidth)
    )
    changed = msgspec.structs.replace(
        network,
        all_reduce=all_reduce,
        all_gather=moved(network.all_gather),
        reduce_scatter=moved(network.reduce_scatter),
        broadcast=moved(network.broadcast),
        concurrency=(),
    )
    return msgspec.structs.replace(changed, concurrency=_sharing(network, changed))


def scaled_profile(profile: Profile, batch: int, sibling: Profile | None) -> Profile:
    """The profile at another batch size: between two that were measured, or in proportion where there is only one."""
    if batch == profile.batch_size:
        return profile
    if sibling is not None:
        return at_batch(profile, sibling, batch)
    factor = batch / profile.batch_size
    return msgspec.structs.replace(
        profile,
        batch_size=batch,
        forward_s=profile.forward_s * factor,
        backward_s=profile.backward_s * factor,
        gradients=tuple(msgspec.structs.replace(one, ready_s=one.ready_s * factor) for one in profile.gradients),
        iteration_s=tuple(seconds * factor for seconds in profile.iteration_s),
        memory=None,
        notes=(*profile.notes, f"batch {batch} is in proportion to batch {profile.batch_size}, not measured"),
    )


def _stretched(times: CollectiveTimes, latency: float, work: float) -> CollectiveTimes:
    if times.points is None:
        return CollectiveTimes(
            alpha_s=(times.alpha_s or 0.0) * latency, beta_s_per_byte=(times.beta_s_per_byte or 0.0) * work
        )
    curve = Curve.of(times)
    sizes = curve.sizes
    return _points(sizes, curve.latency(sizes) * latency + curve.work(sizes) * work)


def _stretched_across(times: CollectiveTimes, inside: CollectiveTimes, latency: float, work: float) -> CollectiveTimes:
    whole, inner = Curve.of(times), Curve.of(inside)
    sizes = np.unique(np.concatenate([whole.sizes, inner.sizes, [0.0, 2.0**20, 2.0**24, 2.0**28]]))
    beyond = np.maximum(whole.time(sizes) - inner.time(sizes), 0.0)
    slope = max(whole.gradient_s_per_byte - inner.gradient_s_per_byte, 0.0)
    across = Curve(sizes, beyond, slope)
    return _points(sizes, inner.time(sizes) + across.latency(sizes) * latency + across.work(sizes) * work)


def _points(sizes: np.ndarray, seconds: np.ndarray) -> CollectiveTimes:
    rising = np.maximum.accumulate(seconds)
    return CollectiveTimes(points=tuple((round(size), float(time)) for size, time in zip(sizes, rising, strict=True)))


def _sharing(before: Network, after: Network) -> tuple[ConcurrencyPoint, ...]:
    """Concurrency rows that keep e(n), u(n) and the ratio of back-to-back times on the changed network."""
    if not before.concurrency:
        return ()
    old = LinkCost.of(before)
    isolated = Curve.of(after.all_reduce)
    busy = None
    if old.busy is not None:
        sizes = {row.bytes for row in before.concurrency if row.communicators == 1}
        alone = {size: float(old.isolated.time(size)) for size in sizes}
        busy = busy_curve(isolated, {size: float(old.busy.time(size)) / alone[size] for size in sizes if alone[size]})
    new = LinkCost(isolated, busy, old.efficiencies, old.stretches)
    return tuple(
        msgspec.structs.replace(
            row, seconds=row.seconds * new.batch_s(row.bytes, row.messages, row.communicators) / modelled
        )
        if (modelled := old.batch_s(row.bytes, row.messages, row.communicators)) > 0
        else row
        for row in before.concurrency
    )
