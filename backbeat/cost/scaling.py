"""Costs made from measured ones: on another number of workers, between two of them, on a slower link.

Latency grows with the steps of the algorithm and transfer with its traffic (`collectives`). `Topology.moved` says which
algorithms a cluster has to choose from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backbeat.cost.collectives import Collective, Shape, steps, traffic
from backbeat.cost.curve import Curve

FAR_BYTES = 2**40
"""A curve must be sampled somewhere; nobody all-reduces more than this in one message."""
_LARGEST_BYTES = 2.0**34
"""And hardly anybody more than this: up to here a changed curve costs what it should, not what a line through its
points says."""


def mixed(one: Curve, two: Curve, share: float) -> Curve:
    """A cost between two, at this share of the way: latency and transfer each.

    >>> mixed(Curve.affine(1e-3, 1e-9), Curve.affine(3e-3, 3e-9), 0.5).line
    (0.002, 2e-09)
    """
    slope = (1 - share) * one.link_s_per_byte + share * two.link_s_per_byte
    sizes = np.union1d(one.sizes, two.sizes)
    times = (1 - share) * one.time(sizes) + share * two.time(sizes)
    if one.is_affine and two.is_affine:
        return Curve.affine(float(times[0]), slope)
    return _with_slope(sizes, times, slope)


def stretched(curve: Curve, *, latency: float = 1.0, transfer: float = 1.0) -> Curve:
    """Every latency takes that many times as long, and every byte.

    >>> stretched(Curve.affine(1e-3, 1e-9), latency=3.0, transfer=2.0).line
    (0.003, 2e-09)
    """
    slope = curve.link_s_per_byte * transfer
    if curve.is_affine:
        return Curve.affine(float(curve.times[0]) * latency, slope)
    sizes = curve.sizes
    return _with_slope(sizes, curve.latency(sizes) * latency + curve.transfer(sizes) * transfer, slope)


def beside_traffic(curve: Curve, slowdown: float) -> Curve:
    """The same beside other traffic: all but the latency of the smallest message takes that many times as long.

    What a message of some megabytes takes beyond its bytes is mostly a pipeline being filled, whose parts wait for
    links as any bytes do.

    >>> curve = Curve.through([(1024, 1e-4), (2**20, 5e-4), (2**30, 3e-3)])
    >>> beside_traffic(curve, 2.0).time([1024, 2**20]).round(7).tolist()
    [0.0001, 0.0009]
    """
    if curve.is_affine:
        return stretched(curve, transfer=slowdown)
    latency = curve.times[0]
    times = latency + (curve.times - latency) * slowdown
    return _with_slope(curve.sizes, times, curve.link_s_per_byte * slowdown)


def stretch_factors(
    collective: Collective, shape: Shape, measured: Shape, old: int, new: int, slowdown: float = 1.0
) -> tuple[float, float]:
    """Factors of latency and of transfer when a collective whose slope was `measured`'s runs as `shape` on `new`."""
    return (
        steps(collective, shape, new) / steps(collective, shape, old),
        slowdown * traffic(collective, shape, new) / traffic(collective, measured, old),
    )


def cheapest(factors: list[tuple[float, float]], curve: Curve) -> Curve:
    """The least of the stretched curves at every size, with the sizes where they cross as points of its own."""
    if curve.is_affine:
        return cheaper_line(
            [(float(curve.times[0]) * latency, curve.link_s_per_byte * work) for latency, work in factors]
        )
    sizes = np.concatenate([curve.sizes, curve.sizes[-1] * np.array([2.0, 4.0])])
    latency, work = curve.latency(sizes), curve.transfer(sizes)
    candidates = [latency * by_latency + work * by_work for by_latency, by_work in factors]
    if len(candidates) == 2:
        sizes, candidates = _with_crossings(sizes, candidates[0], candidates[1])
    return through(sizes, np.minimum.reduce(candidates))


def cheaper_line(lines: list[tuple[float, float]]) -> Curve:
    """The cheaper of up to two affine costs (a, b) at every size.

    >>> cheaper_line([(1e-3, 2e-9), (2e-3, 1e-9)]).time([0, 1_000_000, 4_000_000]).round(6).tolist()
    [0.001, 0.003, 0.006]
    """
    winner = min(lines)
    if all(winner[1] <= beta for _, beta in lines):
        return Curve.affine(*winner)
    (low, steep), (high, flat) = sorted(lines)
    crossing = max(round((high - low) / (steep - flat)), 2)
    if crossing > FAR_BYTES:
        return Curve.affine(low, steep)
    far = max(crossing, 2**20)
    sizes = np.array([0, crossing, 2 * far, 1024 * far], dtype=np.float64)
    return through(sizes, np.minimum(low + steep * sizes, high + flat * sizes))


def _with_crossings(
    sizes: NDArray[np.float64], one: NDArray[np.float64], two: NDArray[np.float64]
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    difference = one - two
    changes = np.flatnonzero(difference[:-1] * difference[1:] < 0)
    share = difference[changes] / (difference[changes] - difference[changes + 1])
    crossings = np.round(sizes[changes] + share * (sizes[changes + 1] - sizes[changes]))
    everywhere = np.union1d(sizes, crossings)
    return everywhere, [np.interp(everywhere, sizes, one), np.interp(everywhere, sizes, two)]


def _with_slope(sizes: NDArray[np.float64], times: NDArray[np.float64], slope: float) -> Curve:
    """With a point beyond the last, and one at the largest message, which keep the slope where a file keeps points
    alone."""
    first = max(4 * float(sizes[-1]), 2.0**22)
    far = np.array([first] if first >= _LARGEST_BYTES else [first, _LARGEST_BYTES])
    return through(np.append(sizes, far), np.append(times, times[-1] + slope * (far - sizes[-1])))


def through(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> Curve:
    """The curve as a network file keeps it, in whole bytes."""
    return Curve.through([(round(size), float(time)) for size, time in zip(sizes, seconds, strict=True)])
