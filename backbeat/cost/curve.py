"""How long one isolated collective takes: T(M), from two numbers or from a measured curve.

Symbols of the papers, defined here: T(M) time of M bytes · a (alpha) latency of an affine cost · b (beta)
seconds per byte · G seconds per byte of link time · s(M) = max(0, T(M) - G·M) latency · w(M) = T(M) - s(M) transfer.

And costs made from measured ones: on another number of workers, between two of them, on a slower link. Latency grows
with the steps of the algorithm and transfer with its traffic (`collectives`). `Topology.moved` says which algorithms a
cluster has to choose from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backbeat.cost.collectives import Collective, Shape, steps, traffic

_BANDWIDTH_BOUND_BYTES = 2**20
"""G is fitted to points of this size and more: below, latency hides the slope."""
_LARGEST_POINTS = 3
"""What G is fitted to where fewer than two points are that large: smaller ones would pull it towards their latency."""
FAR_BYTES = 2**40
"""A curve must be sampled somewhere; nobody all-reduces more than this in one message."""


class Curve:
    """A monotone, piecewise linear cost: flat below the first size, slope `link_s_per_byte` beyond the last.

    An affine cost is the curve of one segment that starts at zero bytes.

    >>> Curve.affine(1e-3, 1e-9).time([0, 1_000_000]).tolist()
    [0.001, 0.002]
    >>> curve = Curve([1024, 2048], [1e-3, 1.5e-3], 1e-9)
    >>> curve.time([1, 1024, 1536, 2048, 1_002_048]).round(6).tolist()
    [0.001, 0.001, 0.00125, 0.0015, 0.0025]
    """

    def __init__(self, sizes: ArrayLike, times: ArrayLike, link_s_per_byte: float) -> None:
        self.sizes: NDArray[np.float64] = np.asarray(sizes, dtype=np.float64)
        # Noise can make a larger message look faster than a smaller one; a cost must not fall with size.
        self.times: NDArray[np.float64] = np.maximum.accumulate(np.asarray(times, dtype=np.float64))
        self.link_s_per_byte = link_s_per_byte

    @classmethod
    def affine(cls, alpha_s: float, beta_s_per_byte: float) -> Curve:
        return cls([0.0], [alpha_s], beta_s_per_byte)

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """The cost through measured (bytes, seconds), sizes rising; the slope beyond the last is the link's.

        >>> Curve.through([(2**20, 2e-3), (2**21, 3e-3)]).time(2**22).round(6).item()
        0.005
        """
        sizes, seconds = np.array(points, dtype=np.float64).T
        seconds = np.maximum.accumulate(seconds)
        return cls(sizes, seconds, _link_slope(sizes, seconds))

    @property
    def is_affine(self) -> bool:
        return len(self.sizes) == 1 and float(self.sizes[0]) == 0.0

    @property
    def line(self) -> tuple[float, float]:
        """(a, b): itself where affine, otherwise the relative least-squares line through all points."""
        if self.is_affine:
            return float(self.times[0]), self.link_s_per_byte
        alpha, beta = relative_line(self.sizes, self.times)
        return max(alpha, 0.0), max(beta, 0.0)

    def time(self, sizes: ArrayLike) -> NDArray[np.float64]:
        """Isolated seconds of messages of these sizes."""
        m = np.asarray(sizes, dtype=np.float64)
        if self.is_affine:
            return np.asarray(self.times[0] + self.link_s_per_byte * m)
        beyond = np.maximum(m - self.sizes[-1], 0.0)
        return np.asarray(np.interp(m, self.sizes, self.times) + self.link_s_per_byte * beyond)

    def at(self, size: float) -> float:
        """`time` for one message, without the cost of an array.

        >>> Curve([1024, 2048], [1e-3, 1.5e-3], 1e-9).at(1536)
        0.00125
        """
        lows, lines = self._lines
        intercept, slope = lines[max(bisect_right(lows, size) - 1, 0)]
        return intercept + slope * size

    @cached_property
    def _lines(self) -> tuple[list[float], list[tuple[float, float]]]:
        found = self.segments()
        return [low for low, _, _, _ in found], [(intercept, slope) for _, _, intercept, slope in found]

    def slower(self, factor: float) -> Curve:
        """Every message takes that many times as long."""
        return Curve(self.sizes, self.times * factor, self.link_s_per_byte * factor)

    def by_part(self, part: float) -> Curve:
        """The cost by the bytes of a message of which this part is sent; more than 1 where several share a link.

        >>> Curve.affine(1e-3, 1e-9).by_part(2.0).time(1_000_000).item()
        0.003
        """
        return Curve(self.sizes / part, self.times, self.link_s_per_byte * part)

    def joined(self, other: Curve, how: np.ufunc) -> Curve:
        """Both costs at the sizes of either, put together: their sum (`np.add`), or the lesser (`np.minimum`).

        >>> Curve.affine(1e-3, 1e-9).joined(Curve.affine(2e-3, 2e-9), np.add).time(1_000_000).item()
        0.006
        """
        sizes = np.union1d(self.sizes, other.sizes)
        slope = float(how(self.link_s_per_byte, other.link_s_per_byte))
        return Curve(sizes, how(self.time(sizes), other.time(sizes)), slope)

    def transfer(self, sizes: ArrayLike) -> NDArray[np.float64]:
        """Seconds of link time in each message, w(M)."""
        m = np.asarray(sizes, dtype=np.float64)
        return np.minimum(self.link_s_per_byte * m, self.time(m))

    def latency(self, sizes: ArrayLike) -> NDArray[np.float64]:
        """Seconds in which a message holds its communicator but not the link, s(M)."""
        return self.time(sizes) - self.transfer(sizes)

    def segments(self) -> list[tuple[float, float, float, float]]:
        """(from bytes, to bytes, time at zero of the segment's line, slope), covering every size from 0 up."""
        edges = self.sizes.tolist()
        times = self.times.tolist()
        lines = [(0.0, edges[0], times[0], 0.0)] if edges[0] > 0 else []
        for low, high, start, end in zip(edges, edges[1:], times, times[1:], strict=False):
            slope = (end - start) / (high - low)
            lines.append((low, high, start - slope * low, slope))
        slope = self.link_s_per_byte
        lines.append((edges[-1], float("inf"), times[-1] - slope * edges[-1], slope))
        return lines


def _link_slope(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    """G. Points that noise has made level say nothing of the link, so wider choices follow until one rises. Where none
    does, bandwidth is not known: that of the largest message is the least that there is."""
    bandwidth_bound = int(np.count_nonzero(sizes >= _BANDWIDTH_BOUND_BYTES))
    for count in (bandwidth_bound, _LARGEST_POINTS, len(sizes)):
        if count >= 2 and seconds[-1] > seconds[-count:][0]:
            return max(relative_line(sizes[-count:], seconds[-count:])[1], 0.0)
    return float(seconds[-1] / sizes[-1]) if sizes[-1] > 0 else 0.0


def relative_line(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """(alpha, beta) that minimise the sum of squared *relative* errors of alpha + beta·size.

    Relative, because the points span six decades: an absolute fit would see the largest alone.

    >>> alpha, beta = relative_line(np.array([1e3, 1e6, 1e8]), 2e-4 + 1e-9 * np.array([1e3, 1e6, 1e8]))
    >>> round(alpha, 9), round(beta, 15)
    (0.0002, 1e-09)
    """
    weight = 1.0 / np.maximum(seconds, 1e-12)
    # Columns are scaled to comparable size, or the normal equations lose half their digits.
    scale = float(sizes.max()) or 1.0
    columns = np.stack([weight, weight * sizes / scale], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    return float(alpha), float(beta) / scale


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
    return Curve(sizes, times, slope)


def stretched(curve: Curve, *, latency: float = 1.0, transfer: float = 1.0) -> Curve:
    """Every latency takes that many times as long, and every byte.

    >>> stretched(Curve.affine(1e-3, 1e-9), latency=3.0, transfer=2.0).line
    (0.003, 2e-09)
    """
    slope = curve.link_s_per_byte * transfer
    if curve.is_affine:
        return Curve.affine(float(curve.times[0]) * latency, slope)
    sizes = curve.sizes
    return Curve(sizes, curve.latency(sizes) * latency + curve.transfer(sizes) * transfer, slope)


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
    return Curve(curve.sizes, times, curve.link_s_per_byte * slowdown)


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
    # Beyond the last size too: latencies, which smaller messages may have more of, hold a cost up until transfer passes
    # it. The curves may cross as far as the very last, which is beyond all messages.
    further = curve.sizes[-1] * 2.0 ** np.arange(1, 9)
    sizes = np.concatenate([curve.sizes, further, [max(float(FAR_BYTES), 2 * further[-1])]])
    latency, work = curve.latency(sizes), curve.transfer(sizes)
    candidates = [latency * by_latency + work * by_work for by_latency, by_work in factors]
    if len(candidates) == 2:
        sizes, candidates = _with_crossings(sizes, candidates[0], candidates[1])
    slope = curve.link_s_per_byte * min(by_work for _, by_work in factors)
    sizes, times = sizes[:-1], np.maximum.accumulate(np.minimum.reduce(candidates)[:-1])
    # What the slope says already needs no points: nobody has measured them.
    straight = np.isclose(times, times[-1] - slope * (sizes[-1] - sizes), rtol=1e-9, atol=0.0)
    bent = np.flatnonzero(~straight | (sizes < curve.sizes[-1]))
    last = int(bent[-1]) + 1 if len(bent) else 0
    return Curve(sizes[: last + 1], times[: last + 1], slope)


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
    # Beyond the crossing too, or a line through the points (`Curve.line`) would be that of small messages alone.
    far = max(crossing, 2**20)
    sizes = np.array([0, crossing, 2 * far, 1024 * far], dtype=np.float64)
    return Curve(sizes, np.minimum(low + steep * sizes, high + flat * sizes), flat)


def _with_crossings(
    sizes: NDArray[np.float64], one: NDArray[np.float64], two: NDArray[np.float64]
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    difference = one - two
    changes = np.flatnonzero(difference[:-1] * difference[1:] < 0)
    share = difference[changes] / (difference[changes] - difference[changes + 1])
    crossings = np.round(sizes[changes] + share * (sizes[changes + 1] - sizes[changes]))
    everywhere = np.union1d(sizes, crossings)
    return everywhere, [np.interp(everywhere, sizes, one), np.interp(everywhere, sizes, two)]
