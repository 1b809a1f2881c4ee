"""How much longer computation takes beside communication: in a network's file, as data of an accelerator, and which of
them holds for a profile on a network.

NCCL's kernels take multiprocessors and memory bandwidth away from whatever runs beside them, from a message's launch to
its end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from msgspec import Meta

from backbeat.cost.collectives import traffic
from backbeat.cost.pcie import is_pcie
from backbeat.model.accelerator import Accelerator, accelerator
from backbeat.model.checks import Checked
from backbeat.model.files import ZOO, Document, Source
from backbeat.model.profile import ComputeShares, Profile

if TYPE_CHECKING:
    from backbeat.model.network import Network

Transport = Literal["nvlink", "nvls", "infiniband", "roce", "efa", "sockets"]
Factor = Annotated[float, Meta(ge=1)]
WORK_KINDS = ("matmul", "attention", "memory")
EMULATED = ZOO / "contention" / "h200.json"

RING_MEMORY = 3.0
"""Bytes of a GPU's own memory that a ring all-reduce moves for each byte on its bus: it reads the gradient and what
came, and writes what it sends; later it reads what came, and writes it for itself and to send on."""


class Channels(NamedTuple):
    """What NCCL takes of a GPU on one transport."""

    sms: int
    """One block of 640 threads a channel, which has a multiprocessor for itself."""
    memory: float = RING_MEMORY
    """Bytes of memory moved for each byte on the bus."""


CHANNELS: dict[str, Channels] = {
    "nvlink": Channels(24),
    # The switch adds up: each of 8 GPUs has all of its gradients read and written once, for 1.75 bytes on the bus each.
    "nvls": Channels(16, 2 / 1.75),
    "infiniband": Channels(16),
    "roce": Channels(16),
    "efa": Channels(16),
    "sockets": Channels(2),
    "pcie": Channels(2),
}
"""As NCCL 2.28 to 2.30 opens them on GPUs of compute capability 9.0; validation/zoo/README.md has the sources. PCIe,
which a topology names as `inside_link`, is taken to need as few as sockets."""


class Slowdown(Checked, frozen=True, kw_only=True):
    """How many times as long each kind of work takes beside an all-reduce."""

    matmul: Factor
    attention: Factor | None = None
    """Where it was not measured, that of matrix products."""
    memory: Factor | None = None
    """Norms, elementwise work, the optimizer. Where it was not measured, that of matrix products."""

    def of(self, shares: ComputeShares | None) -> float:
        """The slowdown of work that spends these shares of its time in each kind; without shares, matrix products'.

        >>> round(Slowdown(matmul=1.1, memory=1.3).of(ComputeShares(matmul=0.75, attention=0.0, memory=0.25)), 9)
        1.15
        """
        if shares is None:
            return self.matmul
        each = ((shares.attention, self.attention), (shares.memory, self.memory))
        return shares.matmul * self.matmul + sum(share * (factor or self.matmul) for share, factor in each)


class EmulatedSlowdown(Checked, frozen=True, kw_only=True):
    """Work beside a kernel that takes that many multiprocessors and stands for that much bandwidth on a ring's bus."""

    sms: Annotated[int, Meta(ge=1)]
    bus_bytes_per_s: Annotated[float, Meta(ge=0)]
    matmul: float
    attention: float
    memory: float


class Contention(Document, frozen=True, kw_only=True):
    """What an accelerator loses beside communication, emulated: a kernel stood in for NCCL's, and no network took
    part."""

    SCHEMA: ClassVar[str] = "backbeat.contention/1"

    accelerator: str
    sms: Annotated[int, Meta(ge=1)]
    memory_bytes_per_s: Annotated[float, Meta(gt=0)]
    rows: Annotated[tuple[EmulatedSlowdown, ...], Meta(min_length=2)]
    source: Source
    notes: tuple[str, ...] = ()

    def slowdown(self, sm_share: float, memory_share: float) -> Slowdown:
        """The slowdown beside communication that takes these shares of the multiprocessors and of the memory's
        bandwidth."""
        return Slowdown(**{kind: curve.at(sm_share, memory_share) for kind, curve in self.curves.items()})

    @cached_property
    def curves(self) -> dict[str, SlowdownCurve]:
        """For each kind of work, what its rows have in common."""
        shares = np.array([(row.sms, RING_MEMORY * row.bus_bytes_per_s) for row in self.rows], dtype=np.float64)
        shares /= (self.sms, self.memory_bytes_per_s)
        return {kind: SlowdownCurve.of(shares, [getattr(row, kind) for row in self.rows]) for kind in WORK_KINDS}


class SlowdownCurve(NamedTuple):
    """How one kind of work slows down: a line through corners for multiprocessors, and a slope for memory.

    Corners, because the first few multiprocessors cost a matrix product most: it is cut into as many tiles at a time as
    there are multiprocessors, and what is left over waits for another round.
    """

    sm_shares: list[float]
    factors: list[float]
    """The slowdown at each of these shares of the multiprocessors, with no memory moved."""
    per_memory: float
    """Added for each share of the memory's bandwidth."""

    @classmethod
    def of(cls, shares: np.ndarray, factors: Sequence[float]) -> SlowdownCurve:
        """The slope from rows with as many multiprocessors as each other, the corners from what it leaves."""
        taken, moved, found = shares[:, 0], shares[:, 1], np.array(factors)
        corners = np.unique(taken)
        same = [taken == corner for corner in corners]
        spread = sum(float(((moved[rows] - moved[rows].mean()) ** 2).sum()) for rows in same)
        rise = sum(float(((moved[rows] - moved[rows].mean()) * found[rows]).sum()) for rows in same)
        slope = max(rise / spread, 0.0) if spread > 0 else 0.0
        left = [float((found[rows] - slope * moved[rows]).mean()) for rows in same]
        rising = np.maximum.accumulate([1.0, *left])
        return cls([0.0, *corners.tolist()], rising.tolist(), slope)

    def at(self, sm_share: float, memory_share: float) -> float:
        """Beyond the last corner the line goes on."""
        beyond = max(sm_share - self.sm_shares[-1], 0.0)
        steepness = (self.factors[-1] - self.factors[-2]) / (self.sm_shares[-1] - self.sm_shares[-2])
        base = float(np.interp(sm_share, self.sm_shares, self.factors)) + beyond * steepness
        return base + self.per_memory * memory_share


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


class ComputeSlowdown(NamedTuple):
    """Computation beside communication."""

    factor: float = 1.0
    """How many times as long it takes."""
    origin: str = ""
    """Where that is from."""


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
    return ComputeSlowdown(found[0].of(profile.compute_shares), found[1])


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


def _transport(network: Network) -> str | None:
    """Of all workers in one node, where others are joined by a network, NVLink is taken to carry their messages unless
    the topology names PCIe."""
    topology = network.topology
    if network.nodes == 1 and topology.gpus_per_node > 1 and is_pcie(topology.inside_link):
        return "pcie"
    if topology.transport is None or network.nodes > 1 or topology.gpus_per_node == 1:
        return topology.transport
    if topology.transport == "nvls" or "nvls" in (topology.algorithm, topology.inside_algorithm):
        return "nvls"
    return "nvlink"


@lru_cache(maxsize=1)
def emulated() -> Contention:
    return Contention.load(EMULATED)
