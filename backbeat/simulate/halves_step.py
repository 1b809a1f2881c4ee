"""All-reduce in two halves: reduce-scatter hidden by backward, all-gather by the next forward (as DeAR does).

One steady period, from the start of backward to the start of the next. Reduce-scatters run in ready order as buckets
are complete; all-gathers follow in plan order, which is the order in which the next forward needs them. A layer's
forward begins when its gradients are gathered and applied, so an optimizer step is spread over the forward pass. One
communicator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backbeat.cost.curve import Curve
from backbeat.cost.link import LinkCost
from backbeat.model import Network, Plan, Profile
from backbeat.simulate.bound import communication_bound
from backbeat.simulate.contention import contended
from backbeat.simulate.engine import in_turn
from backbeat.simulate.gather_scatter import Halves


@dataclass(frozen=True)
class Layers:
    """The forward pass in the order it runs: the reverse of ready order."""

    compute_s: NDArray[np.float64]
    """Forward time of each gradient's module, and its share of the update that precedes it."""
    sizes: NDArray[np.float64]
    guessed: bool
    """Forward times are not in the profile; taken from the shape of backward."""

    @classmethod
    def of(cls, profile: Profile) -> Layers:
        known = [gradient.forward_s for gradient in profile.gradients]
        guessed = any(seconds is None for seconds in known)
        spans = np.diff(profile.ready, prepend=0.0) if guessed else np.array(known, dtype=np.float64)
        total = float(spans.sum())
        shares = spans / total if total > 0 else np.full(len(spans), 1 / len(spans))
        weight = profile.sizes / profile.sizes.sum() if profile.sizes.sum() > 0 else shares
        compute = shares * profile.forward_s + weight * profile.update_s
        return cls(compute[::-1], profile.sizes[::-1], guessed)


@dataclass(frozen=True)
class Period:
    """One steady period; times count from the start of backward."""

    scatters: list[tuple[float, float]]
    gathers: list[tuple[float, float]]
    backward_end_s: float
    forward_end_s: float
    """When the next backward starts: the length of the period."""
    stalled_s: float
    """Forward waiting for gathers."""


def period(profile: Profile, plan: Plan, network: Network, slowdown: float = 1.0) -> Period:
    """Run a plan in halves until it repeats; computation takes `slowdown` times as long beside communication."""
    index = profile.index
    halves = Halves.of(network)
    scatter_buckets = [
        [index[name] for name in bucket.gradients] for bucket in plan.buckets if bucket.phase == "reduce_scatter"
    ]
    gather_buckets = [
        [index[name] for name in bucket.gradients] for bucket in plan.buckets if bucket.phase == "all_gather"
    ]
    # Gathers are ready when they are next: a message starts after the one before it at the earliest.
    ready = np.array([float(profile.ready[max(members)]) for members in scatter_buckets] + [0.0] * len(gather_buckets))
    times = [
        float(half.time(profile.sizes[members].sum()))
        for half, buckets in ((halves.scatter, scatter_buckets), (halves.gather, gather_buckets))
        for members in buckets
    ]

    flow, clock = contended(lambda moments: in_turn(moments.tolist(), times, times), ready, slowdown)
    spans = list(zip(flow.starts, flow.finishes, strict=True))
    scatters, gathers = spans[: len(scatter_buckets)], spans[len(scatter_buckets) :]
    gathered = np.zeros(len(profile.gradients))
    for members, (_, arrival) in zip(gather_buckets, gathers, strict=True):
        gathered[members] = arrival
    backward_end, stalled = float(clock.when(profile.backward_s)), 0.0
    now = backward_end
    layers = Layers.of(profile)
    for arrival, seconds in zip(gathered[::-1].tolist(), layers.compute_s.tolist(), strict=True):
        stalled += max(arrival - now, 0.0)
        now = max(now, arrival)
        now = now + seconds if slowdown == 1 else float(clock.when(clock.done_by(now) + seconds))
    return Period(scatters, gathers, backward_end, now, stalled)


def halves_bound(profile: Profile, network: Network) -> float:
    """A period holds all of the computation, all of the link's work, and the two in an order that nothing escapes.

    Gathers follow the last scatter, and that ends no earlier than any plan's communication could. Of the first j layers
    of forward one is gathered last, after the bytes of all j, and what it and the layers after it compute comes after.
    """
    layers = Layers.of(profile)
    halves = Halves.of(network)
    scattered = communication_bound(profile, LinkCost(halves.scatter), 1)
    latency, per_byte = _cheapest(halves.gather, profile)
    after = np.cumsum(layers.compute_s[::-1])[::-1]
    in_order = scattered + float((latency + per_byte * np.cumsum(layers.sizes) + after).max())
    return max(profile.forward_s + profile.backward_s + profile.update_s, link_s(profile, network), in_order)


def link_s(profile: Profile, network: Network) -> float:
    """The least link time of both halves, whatever the bucketing."""
    halves = Halves.of(network)
    return float(profile.sizes.sum()) * sum(_cheapest(half, profile)[1] for half in (halves.scatter, halves.gather))


def _cheapest(half: Curve, profile: Profile) -> tuple[float, float]:
    """(least latency, least link time per byte) over the bucket sizes possible."""
    return LinkCost(half).cheapest(float(profile.sizes.min()), float(profile.sizes.sum()))
