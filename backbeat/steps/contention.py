"""Computation beside communication: while a message is in flight, computation takes `slowdown` times as long.

Which slowdown holds (`slowdown_of`): the one measured on the cluster, or that emulated for the accelerator and the
transport, or none.

NCCL's kernels take multiprocessors and memory bandwidth away from whatever runs beside them, from a message's launch to
its end. So gradients become ready later the more of their backward pass overlaps with communication, which moves the
communication, and so on. In a graph the engine follows that. Buckets that form at run time, as Horovod's, are no graph:
they run again and again (`contended`), each time with the ready times that the last run gave. What happens until some
moment depends on nothing after it. So each run or two puts one more message right; the runs end when ready times no
longer change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backbeat.cost.accelerators import Accelerator, accelerator
from backbeat.cost.collectives import traffic
from backbeat.model import Network, Profile
from backbeat.model.files import ZOO
from backbeat.model.slowdown import CHANNELS, Contention, Slowdown, Transport
from backbeat.steps.schedule import Flow, busy_periods

EMULATED = ZOO / "accelerators" / "h200-contention.json"
_WORTH_SAYING = 1.005
_SAME = 1e-12
"""Ready times this close to those of the run before, relative to the last, are the same."""


F = TypeVar("F", bound=Flow)


@dataclass(frozen=True, slots=True)
class ComputeClock:
    """How far computation is at any time: a line through corners, of full speed after the last."""

    done: NDArray[np.float64]
    """Seconds of undisturbed computation at each corner."""
    at: NDArray[np.float64]
    """When that is reached."""

    def when(self, done_s: ArrayLike) -> NDArray[np.float64]:
        """When this much computation is done, if none of it waits."""
        return self._along(np.asarray(done_s, dtype=np.float64), self.done, self.at)

    def done_by(self, at_s: ArrayLike) -> NDArray[np.float64]:
        """How much computation can be done by then."""
        return self._along(np.asarray(at_s, dtype=np.float64), self.at, self.done)

    @staticmethod
    def _along(
        values: NDArray[np.float64], known: NDArray[np.float64], other: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        beyond = other[-1] + (values - known[-1])
        return np.where(values >= known[-1], beyond, np.interp(values, known, other))


UNDISTURBED = ComputeClock(np.zeros(1), np.zeros(1))


def contended(
    travel: Callable[[NDArray[np.float64]], F], ready: NDArray[np.float64], slowdown: float
) -> tuple[F, ComputeClock]:
    """Messages that leave when `travel` sends them, given when each is ready, and the computation they slow down.

    `ready` is when messages would be ready without communication. One of 2 s, ready at 1 s, and one of 1 s, ready at
    2 s; computation beside them takes twice as long. The second is ready at 3 s, just as the first is done, and what
    would be done at 4 s is done at 5.5: both messages, 3 s, cost half of their time.

    >>> from backbeat.steps.schedule import Flow
    >>> def one_by_one(ready):
    ...     first = ready[0] + 2
    ...     second = max(first, ready[1])
    ...     return Flow(np.array([ready[0], second]), np.array([ready[0], second]), np.array([first, second + 1]))
    >>> flow, clock = contended(one_by_one, np.array([1.0, 2.0]), 2.0)
    >>> flow.finishes.tolist(), clock.when([2.0, 4.0]).tolist()
    ([3.0, 4.0], [3.0, 5.5])
    """
    clock = UNDISTURBED
    flow = travel(ready)
    if slowdown == 1 or not len(ready):
        return flow, clock
    moments = ready
    for _ in range(4 * len(ready) + 4):
        clock = _clock(flow, clock, slowdown)
        later = clock.when(ready)
        same = float(np.abs(later - moments).max()) <= _SAME * float(later.max())
        moments = later
        flow = travel(moments)
        if same:
            break
    return flow, clock


def least_s(compute_s: float, in_flight_s: float, slowdown: float) -> float:
    """What computation takes at least with messages in flight that long: it cannot avoid them."""
    return compute_s + (1 - 1 / slowdown) * in_flight_s


def together_s(compute_s: float, in_flight_s: float, slowdown: float = 1.0) -> float:
    """Computation and one message, or messages without a pause, that start together: until both are done.

    3 s of each, computation beside messages taking twice as long: after 3 s half of it is left.

    >>> together_s(3.0, 3.0, 2.0), together_s(3.0, 3.0), together_s(1.0, 3.0, 2.0)
    (4.5, 3.0, 3.0)
    """
    return max(in_flight_s, least_s(compute_s, in_flight_s, slowdown))


def _clock(flow: Flow, before: ComputeClock, slowdown: float) -> ComputeClock:
    """Computation beside these messages. A busy period begins after as much computation as it did before: what made
    its first message ready."""
    periods = busy_periods(flow.starts, flow.finishes)
    done, at = [0.0], [0.0]
    for (begin, end), anchor in zip(periods, before.done_by([begin for begin, _ in periods]).tolist(), strict=True):
        length = end - begin
        start = max(anchor, done[-1])
        arrives = at[-1] + (start - done[-1])
        done += [start, start + length / slowdown]
        at += [arrives, arrives + length]
    return ComputeClock(np.array(done), np.array(at))


@dataclass(frozen=True, slots=True)
class ComputeSlowdown:
    """Computation beside communication."""

    factor: float = 1.0
    """How many times as long it takes."""
    notes: tuple[str, ...] = ()


def slowdown_of(profile: Profile, network: Network, *, sharded: bool = False) -> ComputeSlowdown:
    """How much longer this profile's computation takes while this network carries its gradients, or, under a `sharded`
    plan, its all-gathers and reduce-scatters.

    What the network's file measured comes first. Otherwise it is the emulation on an H200, for the transport's channels
    and the network's bandwidth; on other accelerators by the shares of multiprocessors and memory bandwidth that these
    take there, which is an assumption. It is 1 where the network does not name a transport or the profile's device is
    no accelerator of the table.
    """
    found = slowdown_on(network, accelerator(profile.device), sharded=sharded)
    if found is None:
        return ComputeSlowdown()
    factor = found[0].of(profile.compute_shares)
    note = f"computation takes {factor:.2f} times as long beside communication ({found[1]})"
    return ComputeSlowdown(factor, (note,) if factor >= _WORTH_SAYING else ())


def slowdown_on(network: Network, device: Accelerator | None, *, sharded: bool = False) -> tuple[Slowdown, str] | None:
    """The slowdown of each kind of work on such a device beside this network's collectives, and where it is from; None
    where nobody knows."""
    if network.workers == 1:
        return None
    measured = network.slowdown
    if sharded and network.sharded is not None and network.sharded.slowdown is not None:
        measured = network.sharded.slowdown
    if measured is not None:
        return measured, "as measured on this cluster"
    transport = _transport(network)
    if transport is None or device is None:
        return None
    data = emulated()
    channels = CHANNELS[transport]
    slope = network.cost.isolated.link_s_per_byte
    bus = traffic("all_reduce", "ring", network.workers) / slope if slope > 0 else 0.0
    moved = min(channels.memory * bus / device.bytes_per_s, 1.0)
    same = device.name == data.accelerator
    where = f"emulated on an {data.accelerator}" + ("" if same else f", scaled to the {device.name} by assumption")
    return data.slowdown(min(channels.sms / device.multiprocessors, 1.0), moved), f"{where} for {transport}"


def _transport(network: Network) -> Transport | None:
    """Of all workers in one node, where others are joined by a network, NVLink is taken to carry their messages."""
    topology = network.topology
    if topology.transport is None or network.nodes > 1 or topology.gpus_per_node == 1:
        return topology.transport
    if topology.transport == "nvls" or "nvls" in (topology.algorithm, topology.inside_algorithm):
        return "nvls"
    return "nvlink"


@lru_cache(maxsize=1)
def emulated() -> Contention:
    return Contention.load(EMULATED)
