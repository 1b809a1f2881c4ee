"""Moving a calibration from one number of workers to another.

Latency grows with the steps of the algorithm and link work with its traffic (`collectives`). Under `auto` the library
is taken to choose the cheaper of ring and tree at every size, as NCCL does; both are anchored at what was measured.
Hierarchical clusters pay the inside of a node once and scale only what crosses nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from backbeat.cost.collectives import Collective, Shape, steps, traffic
from backbeat.cost.curve import Curve
from backbeat.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Algorithm = Literal["ring", "tree", "auto", "halving-doubling", "hierarchical"]

_FAR_BYTES = 2**40
"""A curve must be sampled somewhere; nobody all-reduces more than this in one message."""


def moved(
    curve: Curve,
    collective: Collective,
    old: int,
    new: int,
    algorithm: Algorithm,
    *,
    inside: Curve | None = None,
    per_node: int = 1,
) -> Curve:
    """The cost on `new` workers of a collective that costs `curve` on `old`.

    `inside` is the all-reduce within one full node of `per_node` workers, for the hierarchical algorithm.

    A ring of 2 becomes one of 4: three times the steps, and 3/2 bytes through each link for every byte instead of 1.

    >>> moved(Curve.affine(1e-3, 1e-9), "all_reduce", 2, 4, "ring").time([0, 1_000_000]).round(6).tolist()
    [0.003, 0.0045]
    """
    if new == 1:
        return Curve.affine(0.0, 0.0)
    if algorithm == "hierarchical" and inside is not None and collective == "all_reduce":
        return _moved_hierarchical(curve, inside, per_node, old, new)
    shapes: tuple[Shape, ...] = ("ring", "tree")
    if algorithm != "auto" and algorithm != "hierarchical":
        shapes = (algorithm,)
    return _cheapest([_stretch(collective, shape, shapes[0], old, new) for shape in shapes], curve)


def _stretch(collective: Collective, shape: Shape, measured: Shape, old: int, new: int) -> tuple[float, float]:
    """Factors of latency and of link work when a collective whose slope was `measured`'s runs as `shape` on `new`."""
    return (
        steps(collective, shape, new) / steps(collective, shape, old),
        traffic(collective, shape, new) / traffic(collective, measured, old),
    )


def _cheapest(factors: list[tuple[float, float]], curve: Curve) -> Curve:
    """The least of the stretched curves at every size, with the sizes where they cross as points of its own."""
    if curve.is_affine:
        lines = [(float(curve.times[0]) * latency, curve.gradient_s_per_byte * work) for latency, work in factors]
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
    sizes = np.concatenate([curve.sizes, curve.sizes[-1] * np.array([2.0, 4.0])])
    latency, work = curve.latency(sizes), curve.work(sizes)
    candidates = [latency * by_latency + work * by_work for by_latency, by_work in factors]
    if len(candidates) == 2:
        sizes, candidates = _with_crossings(sizes, candidates[0], candidates[1])
    return _through(sizes, np.minimum.reduce(candidates))


def _with_crossings(
    sizes: NDArray[np.float64], one: NDArray[np.float64], two: NDArray[np.float64]
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    difference = one - two
    changes = np.flatnonzero(difference[:-1] * difference[1:] < 0)
    share = difference[changes] / (difference[changes] - difference[changes + 1])
    crossings = np.round(sizes[changes] + share * (sizes[changes + 1] - sizes[changes]))
    everywhere = np.union1d(sizes, crossings)
    return everywhere, [np.interp(everywhere, sizes, one), np.interp(everywhere, sizes, two)]


def _moved_hierarchical(whole: Curve, inner: Curve, per_node: int, old: int, new: int) -> Curve:
    """Reduce inside the nodes, all-reduce across them, gather inside: only the middle part depends on their number."""
    if new <= per_node:
        return _cheapest([_stretch("all_reduce", "ring", "ring", per_node, new)], inner) if new < per_node else inner
    old_nodes, new_nodes = -(-old // per_node), -(-new // per_node)
    if old_nodes < 2:
        raise InputError(
            f"the calibration on {old} workers is within one node of {per_node}: it says nothing of the network "
            "between nodes; calibrate across two nodes or more"
        )
    sizes = np.unique(np.concatenate([inner.sizes, whole.sizes, [2.0**20, 2.0**24, 2.0**28, float(_FAR_BYTES)]]))
    across = Curve(
        sizes,
        np.maximum(whole.time(sizes) - inner.time(sizes), 0.0),
        max(whole.gradient_s_per_byte - inner.gradient_s_per_byte, 0.0),
    )
    factors = [_stretch("all_reduce", shape, "ring", old_nodes, new_nodes) for shape in ("ring", "tree")]
    beyond = _cheapest(factors, across)
    sizes = np.union1d(sizes, beyond.sizes)
    return _through(sizes, beyond.time(sizes) + inner.time(sizes))


def _through(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> Curve:
    """The curve as a network file keeps it, in whole bytes."""
    return Curve.through([(round(size), float(time)) for size, time in zip(sizes, seconds, strict=True)])
