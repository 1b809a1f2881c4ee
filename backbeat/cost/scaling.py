"""Moving a calibration from one number of workers to another.

Latency grows with the steps of the algorithm and transfer with its traffic (`collectives`). Under `auto` the library
is taken to choose the cheaper of ring and tree at every size, as NCCL does; both are anchored at what was measured.
Hierarchical clusters pay the inside of a node once and scale only what crosses nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backbeat.cost.collectives import Collective, Shape, steps, traffic
from backbeat.cost.curve import Curve
from backbeat.errors import InputError

Algorithm = Literal["ring", "tree", "auto", "halving-doubling", "hierarchical", "nvls", "sharp"]
Across = Literal["auto", "ring", "tree", "halving-doubling", "sharp"]
Inside = Literal["ring", "nvls"]

_NVLS_OVER_RING = 309 / 370
"""Bytes a second through a GPU's links, of large all-reduces on 8 H100 (`collectives` names the sources)."""
_FAR_BYTES = 2**40
"""A curve must be sampled somewhere; nobody all-reduces more than this in one message."""
_LARGEST_BYTES = 2.0**34
"""And hardly anybody more than this: up to here a changed curve costs what it should, not what a line through its
points says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTopology:
    """How the workers are joined."""

    algorithm: Algorithm = "auto"
    per_node: int = 1
    inside: Curve | None = None
    """The all-reduce within one full node, for the hierarchical algorithm."""
    inside_algorithm: Inside = "ring"
    across_algorithm: Across = "auto"
    pipelined: bool = False
    """Parts of a message cross nodes while others travel inside: the slower of the two sets the pace, not their sum."""

    def inner(self, collective: Collective) -> Curve | None:
        """A collective inside one full node, from the all-reduce there."""
        if self.inside is None or collective == "all_reduce":
            return self.inside
        if self.per_node == 1:
            return Curve.affine(0.0, 0.0)
        shape = self.inside_algorithm
        latency = steps(collective, shape, self.per_node) / steps("all_reduce", shape, self.per_node)
        work = traffic(collective, shape, self.per_node) / traffic("all_reduce", shape, self.per_node)
        return _cheapest([(latency, work)], self.inside)


def moved(
    curve: Curve, collective: Collective, old: int, new: int, topology: PlainTopology, *, slowdown: float = 1.0
) -> Curve:
    """The cost on `new` workers of a collective that costs `curve` on `old`.

    `slowdown` is how much longer a byte takes between nodes there, beyond what the algorithm sends.

    A ring of 2 becomes one of 4: three times the steps, and 3/2 bytes through each link for every byte instead of 1.

    >>> ring = PlainTopology(algorithm="ring")
    >>> moved(Curve.affine(1e-3, 1e-9), "all_reduce", 2, 4, ring).time([0, 1_000_000]).round(6).tolist()
    [0.003, 0.0045]
    """
    if new == 1:
        return Curve.affine(0.0, 0.0)
    inner = topology.inner(collective) if topology.algorithm == "hierarchical" else None
    if inner is not None and new <= topology.per_node:
        # What was measured of this collective inside a node says more than its all-reduce does.
        return _moved_inside(curve if old == topology.per_node else inner, collective, new, topology)
    if inner is not None and collective == "all_reduce":
        return _moved_across(curve, inner, old, new, topology, slowdown)
    shapes: tuple[Shape, ...] = ("ring", "tree")
    if collective in ("all_gather", "reduce_scatter") and topology.per_node > 1:
        # One ring through all GPUs. NCCL has trees for these (PAT) only where a node has one GPU.
        shapes = ("ring",)
    if topology.algorithm != "auto" and topology.algorithm != "hierarchical":
        shapes = (topology.algorithm,)
    there = _cheapest([_stretch(collective, shape, shapes[0], old, new, slowdown) for shape in shapes], curve)
    if inner is None:
        return there
    sizes = np.unique(np.concatenate([there.sizes, inner.sizes, [2.0**20, 2.0**24, 2.0**28]]))
    return _through(sizes, np.maximum(there.time(sizes), inner.time(sizes)))


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
    return _through(*_with_slope(sizes, times, slope))


def stretched(curve: Curve, *, latency: float = 1.0, transfer: float = 1.0) -> Curve:
    """Every latency takes that many times as long, and every byte.

    >>> stretched(Curve.affine(1e-3, 1e-9), latency=3.0, transfer=2.0).line
    (0.003, 2e-09)
    """
    slope = curve.link_s_per_byte * transfer
    if curve.is_affine:
        return Curve.affine(float(curve.times[0]) * latency, slope)
    sizes = curve.sizes
    return _through(*_with_slope(sizes, curve.latency(sizes) * latency + curve.transfer(sizes) * transfer, slope))


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
    return _through(*_with_slope(curve.sizes, times, curve.link_s_per_byte * slowdown))


def _stretch(
    collective: Collective, shape: Shape, measured: Shape, old: int, new: int, slowdown: float = 1.0
) -> tuple[float, float]:
    """Factors of latency and of transfer when a collective whose slope was `measured`'s runs as `shape` on `new`."""
    return (
        steps(collective, shape, new) / steps(collective, shape, old),
        slowdown * traffic(collective, shape, new) / traffic(collective, measured, old),
    )


def _cheapest(factors: list[tuple[float, float]], curve: Curve) -> Curve:
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
    return _through(sizes, np.minimum.reduce(candidates))


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
    if crossing > _FAR_BYTES:
        return Curve.affine(low, steep)
    far = max(crossing, 2**20)
    sizes = np.array([0, crossing, 2 * far, 1024 * far], dtype=np.float64)
    return _through(sizes, np.minimum(low + steep * sizes, high + flat * sizes))


def _with_crossings(
    sizes: NDArray[np.float64], one: NDArray[np.float64], two: NDArray[np.float64]
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    difference = one - two
    changes = np.flatnonzero(difference[:-1] * difference[1:] < 0)
    share = difference[changes] / (difference[changes] - difference[changes + 1])
    crossings = np.round(sizes[changes] + share * (sizes[changes + 1] - sizes[changes]))
    everywhere = np.union1d(sizes, crossings)
    return everywhere, [np.interp(everywhere, sizes, one), np.interp(everywhere, sizes, two)]


def _moved_inside(whole: Curve, collective: Collective, new: int, topology: PlainTopology) -> Curve:
    """Fewer GPUs of a node. Few have more of NVLS than they need: then NCCL takes the ring."""
    if new == topology.per_node:
        return whole
    shape = topology.inside_algorithm
    factors = [_stretch(collective, shape, shape, topology.per_node, new)]
    if shape == "nvls" and collective == "all_reduce":
        latency, _ = factors[0]
        work = traffic(collective, "ring", new) / traffic(collective, "nvls", topology.per_node)
        factors.append((latency, work * _NVLS_OVER_RING))
    return _cheapest(factors, whole)


def _moved_across(whole: Curve, inner: Curve, old: int, new: int, topology: PlainTopology, slowdown: float) -> Curve:
    """Reduce inside the nodes, all-reduce across them, gather inside: only the middle part depends on their number."""
    per_node = topology.per_node
    old_nodes, new_nodes = -(-old // per_node), -(-new // per_node)
    if old_nodes < 2:
        raise InputError(
            f"the calibration on {old} workers is within one node of {per_node}: it says nothing of the network "
            "between nodes; calibrate across two nodes or more"
        )
    sizes = np.unique(np.concatenate([inner.sizes, whole.sizes, [2.0**20, 2.0**24, 2.0**28, float(_FAR_BYTES)]]))
    # What overlaps with the inside is not seen of it: then all of the transfer is taken to cross nodes.
    within = inner.latency if topology.pipelined else inner.time
    across = Curve(
        sizes,
        np.maximum(whole.time(sizes) - within(sizes), 0.0),
        max(whole.link_s_per_byte - (0.0 if topology.pipelined else inner.link_s_per_byte), 0.0),
    )
    across_algorithm = topology.across_algorithm
    shapes: tuple[Shape, ...] = ("ring", "tree") if across_algorithm == "auto" else (across_algorithm,)
    beyond = _cheapest(
        [_stretch("all_reduce", shape, shapes[0], old_nodes, new_nodes, slowdown) for shape in shapes], across
    )
    sizes = np.union1d(sizes, beyond.sizes)
    return _through(sizes, np.maximum(beyond.time(sizes) + within(sizes), inner.time(sizes)))


def _with_slope(
    sizes: NDArray[np.float64], times: NDArray[np.float64], slope: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A point beyond the last, and one at the largest message, which keep the slope where a file keeps points alone."""
    first = max(4 * float(sizes[-1]), 2.0**22)
    far = np.array([first] if first >= _LARGEST_BYTES else [first, _LARGEST_BYTES])
    return np.append(sizes, far), np.append(times, times[-1] + slope * (far - sizes[-1]))


def _through(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> Curve:
    """The curve as a network file keeps it, in whole bytes."""
    return Curve.through([(round(size), float(time)) for size, time in zip(sizes, seconds, strict=True)])
