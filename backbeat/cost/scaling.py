"""Moving a calibration from one number of workers to another.

Latency grows with the steps of the algorithm and link work with its traffic (`collectives`). Under `auto` the library
is taken to choose the cheaper of ring and tree at every size, as NCCL does; both are anchored at what was measured.
Hierarchical clusters pay the inside of a node once and scale only what crosses nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from backbeat.cost.collectives import Collective, Shape, steps, traffic
from backbeat.cost.curve import Curve
from backbeat.cost.link import LinkCost, busy_curve
from backbeat.errors import InputError
from backbeat.model.network import Calibration, CollectiveTimes, ConcurrencyPoint, Network, Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FAR_BYTES = 2**40
"""A curve must be sampled somewhere; nobody all-reduces more than this in one message."""
_MOST_WORKERS = 10**9


def moved(network: Network, workers: int) -> Network:
    """The network with `workers` workers, computed from its original calibration."""
    if workers < 1:
        raise InputError(f"workers is {workers}: a job has at least one worker")
    if workers > _MOST_WORKERS:
        raise InputError(f"workers is {workers}: no model of a cluster holds beyond {_MOST_WORKERS}; choose fewer")
    base = network.moved_from or Calibration(
        workers=network.workers,
        all_reduce=network.all_reduce,
        all_gather=network.all_gather,
        reduce_scatter=network.reduce_scatter,
        broadcast=network.broadcast,
        concurrency=network.concurrency,
    )
    if workers == network.workers:
        return network
    if workers == base.workers:
        return _replaced(network, base, None)
    if base.workers < 2:
        raise InputError(
            f"network {network.name!r} was measured on {base.workers} worker: nothing travels there, "
            "so it cannot be moved to more; calibrate with 2 workers or more"
        )
    names: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    times = {
        name: moved_times(measured, name, base.workers, workers, network.topology)
        for name in names
        if (measured := getattr(base, name)) is not None
    }
    there = msgspec.structs.replace(base, workers=workers, concurrency=(), **times)
    there = msgspec.structs.replace(there, concurrency=_moved_rows(network, base, there))
    return _replaced(network, there, base)


def moved_times(
    times: CollectiveTimes, collective: Collective, old: int, new: int, topology: Topology
) -> CollectiveTimes:
    """One collective's times at another number of workers."""
    if new == 1:
        return CollectiveTimes(alpha_s=0.0, beta_s_per_byte=0.0)
    if topology.algorithm == "hierarchical" and topology.inside is not None and collective == "all_reduce":
        return _moved_hierarchical(times, topology.inside, topology.gpus_per_node, old, new)
    algorithm = topology.algorithm
    shapes: tuple[Shape, ...] = ("ring", "tree")
    if algorithm != "auto" and algorithm != "hierarchical":
        shapes = (algorithm,)
    return _cheapest([_stretch(collective, shape, shapes[0], old, new) for shape in shapes], Curve.of(times))


def _stretch(collective: Collective, shape: Shape, measured: Shape, old: int, new: int) -> tuple[float, float]:
    """Factors of latency and of link work when a collective whose slope was `measured`'s runs as `shape` on `new`."""
    return (
        steps(collective, shape, new) / steps(collective, shape, old),
        traffic(collective, shape, new) / traffic(collective, measured, old),
    )


def _cheapest(factors: list[tuple[float, float]], curve: Curve) -> CollectiveTimes:
    """The least of the stretched curves at every size, with the sizes where they cross as points of its own."""
    if curve.is_affine:
        lines = [(float(curve.times[0]) * latency, curve.gradient_s_per_byte * work) for latency, work in factors]
        winner = min(lines)
        if all(winner[1] <= beta for _, beta in lines):
            return CollectiveTimes(alpha_s=winner[0], beta_s_per_byte=winner[1])
        (low, steep), (high, flat) = sorted(lines)
        crossing = max(round((high - low) / (steep - flat)), 2)
        if crossing > _FAR_BYTES:
            return CollectiveTimes(alpha_s=low, beta_s_per_byte=steep)
        far = max(crossing, 2**20)
        sizes = np.array([0, crossing, 2 * far, 1024 * far], dtype=np.float64)
        return _points(sizes, np.minimum(low + steep * sizes, high + flat * sizes))
    sizes = np.concatenate([curve.sizes, curve.sizes[-1] * np.array([2.0, 4.0])])
    latency, work = curve.latency(sizes), curve.work(sizes)
    candidates = [latency * by_latency + work * by_work for by_latency, by_work in factors]
    if len(candidates) == 2:
        sizes, candidates = _with_crossings(sizes, candidates[0], candidates[1])
    return _points(sizes, np.minimum.reduce(candidates))


def _with_crossings(
    sizes: NDArray[np.float64], one: NDArray[np.float64], two: NDArray[np.float64]
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    difference = one - two
    changes = np.flatnonzero(difference[:-1] * difference[1:] < 0)
    share = difference[changes] / (difference[changes] - difference[changes + 1])
    crossings = np.round(sizes[changes] + share * (sizes[changes + 1] - sizes[changes]))
    everywhere = np.union1d(sizes, crossings)
    return everywhere, [np.interp(everywhere, sizes, one), np.interp(everywhere, sizes, two)]


def _moved_hierarchical(
    times: CollectiveTimes, inside: CollectiveTimes, per_node: int, old: int, new: int
) -> CollectiveTimes:
    """Reduce inside the nodes, all-reduce across them, gather inside: only the middle part depends on their number."""
    inner, whole = Curve.of(inside), Curve.of(times)
    if new <= per_node:
        return _cheapest([_stretch("all_reduce", "ring", "ring", per_node, new)], inner) if new < per_node else inside
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
    beyond = Curve.of(_cheapest(factors, across))
    sizes = np.union1d(sizes, beyond.sizes)
    return _points(sizes, beyond.time(sizes) + inner.time(sizes))


def _moved_rows(network: Network, base: Calibration, there: Calibration) -> tuple[ConcurrencyPoint, ...]:
    """Concurrency rows keep their ratio to the model: e(n) and T_busy / T are taken to hold at any N."""
    if not base.concurrency or there.workers == 1:
        return ()
    before = LinkCost.of(_replaced(network, base, None))
    isolated = Curve.of(there.all_reduce)
    busy = None
    if before.busy is not None:
        sizes = {row.bytes for row in base.concurrency if row.communicators == 1}
        ratio = {
            size: float(before.busy.time(size) / before.isolated.time(size))
            for size in sizes
            if before.isolated.time(size) > 0
        }
        busy = busy_curve(isolated, ratio)
    after = LinkCost(isolated, busy, before.efficiencies, before.stretches)
    return tuple(
        msgspec.structs.replace(row, seconds=row.seconds * after.batch_s(*_shape(row)) / modelled)
        if (modelled := before.batch_s(*_shape(row))) > 0
        else row
        for row in base.concurrency
    )


def _shape(row: ConcurrencyPoint) -> tuple[int, int, int]:
    return row.bytes, row.messages, row.communicators


def _replaced(network: Network, there: Calibration, base: Calibration | None) -> Network:
    fields = {name: getattr(there, name) for name in Calibration.__struct_fields__}
    return msgspec.structs.replace(network, moved_from=base, **fields)


def _points(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> CollectiveTimes:
    return CollectiveTimes(points=tuple((round(size), float(time)) for size, time in zip(sizes, seconds, strict=True)))
