"""A network with more or less bandwidth and latency: what a what-if asks for."""

from __future__ import annotations

import msgspec
import numpy as np

from backbeat.cost import Curve
from backbeat.model import CollectiveTimes, Network


def scaled_network(network: Network, *, bandwidth: float = 1.0, latency: float = 1.0) -> Network:
    """Transfer time divided by `bandwidth`, latency multiplied by `latency`.

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
    return msgspec.structs.replace(
        network,
        all_reduce=all_reduce,
        all_gather=moved(network.all_gather),
        reduce_scatter=moved(network.reduce_scatter),
        broadcast=moved(network.broadcast),
        concurrency=network.concurrency_on(all_reduce),
    )


def _stretched(times: CollectiveTimes, latency: float, transfer: float) -> CollectiveTimes:
    if times.points is None:
        return CollectiveTimes(
            alpha_s=(times.alpha_s or 0.0) * latency, beta_s_per_byte=(times.beta_s_per_byte or 0.0) * transfer
        )
    curve = times.curve
    sizes = curve.sizes
    return _points(sizes, curve.latency(sizes) * latency + curve.work(sizes) * transfer)


def _stretched_across(
    times: CollectiveTimes, inside: CollectiveTimes, latency: float, transfer: float
) -> CollectiveTimes:
    whole, inner = times.curve, inside.curve
    sizes = np.unique(np.concatenate([whole.sizes, inner.sizes, [0.0, 2.0**20, 2.0**24, 2.0**28]]))
    beyond = np.maximum(whole.time(sizes) - inner.time(sizes), 0.0)
    slope = max(whole.gradient_s_per_byte - inner.gradient_s_per_byte, 0.0)
    across = Curve(sizes, beyond, slope)
    return _points(sizes, inner.time(sizes) + across.latency(sizes) * latency + across.work(sizes) * transfer)


def _points(sizes: np.ndarray, seconds: np.ndarray) -> CollectiveTimes:
    rising = np.maximum.accumulate(seconds)
    return CollectiveTimes(points=tuple((round(size), float(time)) for size, time in zip(sizes, rising, strict=True)))
