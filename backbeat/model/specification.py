"""A network from a cluster's data sheets: what its links could carry, times what NCCL is seen to reach.

Large all-reduces go in rings that cross a node's NICs with all of their traffic; on two nodes a tree sends each byte
across once. Smaller ones take other protocols (`cost/protocols.py`). Parts of a message cross nodes while others travel
inside, so the slower of the two sets the pace.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from backbeat.cost import pcie
from backbeat.cost.collectives import Collective, traffic
from backbeat.cost.pcie import InsideLink
from backbeat.cost.protocols import INFINIBAND, INFINIBAND_HOP_S, NicLatency, all_reduce_lines, fastest_s, ring_lines
from backbeat.errors import InputError
from backbeat.model import files
from backbeat.model.collective_times import CollectiveTimes
from backbeat.model.files import Source
from backbeat.model.network import Network
from backbeat.model.network_rows import WorkersRow
from backbeat.model.slowdown import Transport
from backbeat.model.topology import Fabric, LoadBand, Topology
from backbeat.units import counted, format_rate, format_seconds, parse_rate

RING_EFFICIENCY = 0.82
"""Bus bandwidth of NCCL's ring inside a node over the line rate: 370 of 450 GB/s on 8 H100
(github.com/NVIDIA/nccl-tests/issues/212)."""
NVLS_EFFICIENCY = 0.685
"""What NVLS reaches on the link over the line rate: 308 of 450 GB/s on 5 to 8 H100, which is 480 GB/s of bus bandwidth
on 8 (github.com/NVIDIA/nccl/issues/1455)."""
NIC_EFFICIENCY = 0.92
"""Bus bandwidth of large all-reduces on three nodes and more over the rate of a node's NICs: 365 to 390 of 400 GB/s."""
GATHER_SHARE = 0.88
"""Bandwidth of all-gather and reduce-scatter between nodes over that of all-reduce: 80 H100 (nccl-tests-cluster)."""
NVLS_GATHER_SHARE = 0.75
"""Inside a node with NVLS: what is not reduced goes as it does without."""
SIZES = tuple(4**power for power in range(8, 18))
_SMALLER = tuple(4**power for power in range(5, 8))
"""Slow links take longer for these, too."""
SOCKETS_EFFICIENCY = 0.943
"""What TCP leaves of an Ethernet line rate: 9.43 of 10 Gbit/s."""
SOCKETS_NIC = 2.5e9
"""Bytes a second that the processor moves through sockets, a network interface: 2.2 to 2.6 GB/s of bus bandwidth on 2
to 8 nodes of IP over 100 Gb InfiniBand (HKBU-HPML/ddl-benchmarks)."""
_LONGEST_HOPS_S: dict[Transport, float] = {"infiniband": 10e-6, "efa": 30e-6}
"""The longest hop that each is taken for; anything slower goes through sockets."""
_TYPICAL_HOPS_S = {"efa": 15e-6, "sockets": 45e-6}
"""All else is as quick as InfiniBand."""


def typical_hop_s(transport: str | None) -> float:
    """One message from node to node, where nobody says how long it takes."""
    return _TYPICAL_HOPS_S.get(transport or "", INFINIBAND_HOP_S)


def latency_by(transport: str | None, hop_s: float) -> NicLatency:
    """NCCL's latencies between nodes: sockets have their own."""
    return NicLatency.through_sockets(hop_s) if transport == "sockets" else NicLatency.of(hop_s)


def transport_of(hop_s: float) -> Transport:
    """What messages are taken to go by, where nobody says, from how long a hop takes."""
    return next((one for one, longest_s in _LONGEST_HOPS_S.items() if hop_s <= longest_s), "sockets")


def reached_inside(rate: float, gpus: int, *, nvls: bool = False) -> float:
    """Bus bandwidth of a large all-reduce inside a node whose GPUs have links of this line rate, one direction.

    >>> round(reached_inside(450e9, 8) / 1e9), round(reached_inside(450e9, 8, nvls=True) / 1e9)
    (369, 480)
    """
    if not nvls or gpus < 2:
        return rate * RING_EFFICIENCY
    return rate * NVLS_EFFICIENCY * traffic("all_reduce", "ring", gpus) / traffic("all_reduce", "nvls", gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """A cluster as its data sheets describe it. Every rate is of one direction, in bytes a second."""

    gpus_per_node: int
    inside: float | CollectiveTimes = 0.0
    """Bus bandwidth of a large all-reduce inside one node, or the all-reduce measured there."""
    inside_link: InsideLink | None = None
    """PCIe by name, in place of `inside`."""
    nic: float = 0.0
    """Line rate of one network interface."""
    nics_per_node: int = 1
    latency: NicLatency = INFINIBAND
    efficiency: float | None = None
    """Bus bandwidth of large all-reduces over the NICs' rate; that of the transport unless told."""
    fabric: Fabric | None = None
    nvls: bool = False
    """The node's NVSwitches reduce (NVLink SHARP)."""
    sharp: bool = False
    """The switches between nodes reduce (SHARP)."""
    transport: Transport | None = None
    """What NCCL sends by between nodes."""
    rings: bool = False
    """Large messages go in rings on two nodes, too, as in NCCL before 2.12."""

    def __post_init__(self) -> None:
        if self._pcie and self.inside:
            raise InputError(f"inside_link {self.inside_link} says what a node reaches: leave inside out")
        for name in ("gpus_per_node", "nics_per_node"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: a node has at least one")
        if self.nvls and self.gpus_per_node < 2:
            raise InputError("NVLS reduces between the GPUs of a node, and there is one: leave it out")

    def network(self, name: str, nodes: Sequence[int], *, reference: str | None = None) -> Network:
        """The network at these numbers of nodes; the smallest of two or more has the file's own times.

        >>> sheet = Specification(gpus_per_node=8, inside=369e9, nic=50e9, nics_per_node=8)
        >>> [row.workers for row in sheet.network("mine", [1, 2, 4]).rows]
        [8, 32]
        """
        per_node = self.gpus_per_node
        counts = sorted({count for count in nodes if count * per_node > 1})
        if not counts:
            raise InputError("nodes has no number with two GPUs or more: nothing travels; give --nodes 1..64")
        if counts[-1] > 1 and self.nic <= 0:
            raise InputError(f"nodes is {counts[-1]} and nothing says what joins them: give nic, or one node")
        own = next((count for count in counts if count > 1), counts[-1])
        topology = Topology(
            fabric=self.fabric,
            transport=self.transport,
            nics_per_node=self.nics_per_node if counts[-1] > 1 else None,
            inside_link=self.inside_link,
        )
        if per_node > 1:
            topology = msgspec.structs.replace(
                topology,
                algorithm="hierarchical",
                gpus_per_node=per_node,
                inside=self._row(1).all_reduce,
                inside_algorithm="nvls" if self.nvls else "ring",
                across_algorithm="sharp" if self.sharp else "auto",
                pipelined=True,
            )
        first = self._row(own)
        return Network(
            name=name,
            topology=topology,
            rows=tuple(self._row(count) for count in counts if count != own),
            backend="nccl",
            source=Source(method="assumed", reference=reference or self.sentence),
            **msgspec.structs.asdict(first),
        )

    @property
    def sentence(self) -> str:
        """What the figures are computed from."""
        text = f"computed from specifications: {counted(self.gpus_per_node, 'GPU')} a node"
        if isinstance(self.inside, CollectiveTimes):
            text += " with the all-reduce measured inside one"
        elif self.gpus_per_node > 1:
            reaches = f"{self._inside_rate / 1e9:.{0 if self._inside_rate > 10e9 else 1}f} GB/s"
            text += f", of which a large all-reduce inside one reaches {reaches}"
            text += " with NVLS" if self.nvls else ""
            text += f" ({pcie.origin(str(self.inside_link))})" if self._pcie else ""
        if not self.nic:
            return text
        text += (
            f"; {self.nics_per_node} x {format_rate(8 * self.nic)} a node, of which one across reaches "
            f"{self._nics_rate / self.nic / self.nics_per_node:.0%}; latencies of NCCL on InfiniBand, "
        )
        if self.latency.further_hop_s:
            text += f"and {format_seconds(self.latency.further_hop_s)} more for each hop through sockets"
        else:
            text += f"in proportion to {format_seconds(self.latency.small_s)} on two nodes"
        if self.fabric is not None:
            text += f"; {self.fabric.kind} fabric, oversubscription {self.fabric.oversubscription:g}"
        return text + ("; SHARP between nodes" if self.sharp else "")

    def _across_rate(self, nodes: int) -> float:
        """Bus bandwidth of a large all-reduce across nodes of a quiet cluster, in bytes a second."""
        share = self.fabric.share(nodes, "quiet") if self.fabric is not None else 1.0
        nics_rate = self._nics_rate * share
        if self.sharp or (nodes == 2 and not self.rings):
            nics_rate *= traffic("all_reduce", "ring", nodes * self.gpus_per_node)
        return min(nics_rate, self._inside_rate)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (*_SMALLER, *SIZES) if self._pcie or self.transport == "sockets" else SIZES

    @property
    def _pcie(self) -> bool:
        return pcie.is_pcie(self.inside_link)

    @property
    def _nics_rate(self) -> float:
        """Bus bandwidth through all NICs of a node."""
        efficiency, nic = self.efficiency or NIC_EFFICIENCY, self.nic
        if self.transport == "sockets":
            efficiency = self.efficiency or SOCKETS_EFFICIENCY
            nic = min(nic, SOCKETS_NIC / efficiency)
        return nic * self.nics_per_node * efficiency

    @property
    def _inside_rate(self) -> float:
        if self.gpus_per_node == 1:
            return math.inf
        if self._pcie:
            return pcie.reached(str(self.inside_link), self.gpus_per_node)
        if isinstance(self.inside, CollectiveTimes):
            slope = self.inside.curve.link_s_per_byte
            return traffic("all_reduce", "ring", self.gpus_per_node) / slope if slope > 0 else math.inf
        return self.inside

    def _row(self, nodes: int) -> WorkersRow:
        """A typical day, and how far it is from a quiet and a busy one."""
        band = None
        if self.fabric is not None:
            quiet, busy = (self.fabric.slowdown(nodes, load) if nodes > 1 else 1.0 for load in ("quiet", "busy"))
            band = LoadBand(quiet=_rounded(1 / quiet), busy=_rounded(1 / busy))
        return WorkersRow(
            workers=nodes * self.gpus_per_node,
            all_reduce=self.inside
            if nodes == 1 and isinstance(self.inside, CollectiveTimes)
            else self._typical(nodes, [self._all_reduce_s(nodes, size) for size in self._sizes]),
            all_gather=self._typical(nodes, [self._ring_s("all_gather", nodes, size) for size in self._sizes]),
            reduce_scatter=self._typical(nodes, [self._ring_s("reduce_scatter", nodes, size) for size in self._sizes]),
            band=band,
        )

    def _typical(self, nodes: int, quiet: list[float]) -> CollectiveTimes:
        """All but the smallest message's latency is slower than on a quiet cluster (`cost/curve.beside_traffic`)."""
        slowdown = 1 / self.fabric.slowdown(nodes, "quiet") if self.fabric is not None and nodes > 1 else 1.0
        times = (_rounded(quiet[0] + (time - quiet[0]) * slowdown) for time in quiet)
        return CollectiveTimes(points=tuple(zip(self._sizes, times, strict=True)))

    def _all_reduce_s(self, nodes: int, size: float) -> float:
        """On a quiet cluster."""
        per_node = self.gpus_per_node
        within = 0.0
        if isinstance(self.inside, CollectiveTimes):
            within = float(self.inside.curve.time(size))
        elif per_node > 1:
            lines = pcie.lines("all_reduce", per_node) if self._pcie else all_reduce_lines(1, per_node, self.latency)
            within = fastest_s(lines, traffic("all_reduce", "ring", per_node) * size, self._inside_rate)
        if nodes == 1:
            return within
        lines = all_reduce_lines(nodes, per_node, self.latency, sharp=self.sharp)
        sent = traffic("all_reduce", "ring", nodes * per_node) * size
        return max(within, fastest_s(lines, sent, self._across_rate(nodes)))

    def _ring_s(self, collective: Collective, nodes: int, size: float) -> float:
        """On a quiet cluster."""
        rate = self._inside_rate * (NVLS_GATHER_SHARE if self.nvls else 1.0)
        if nodes > 1:
            rate = min(GATHER_SHARE * self._across_rate(nodes), rate)
        sent = traffic(collective, "ring", nodes * self.gpus_per_node) * size
        if nodes == 1 and self._pcie:
            return fastest_s(pcie.lines(collective, self.gpus_per_node), sent, GATHER_SHARE * rate)
        return fastest_s(ring_lines(nodes, self.gpus_per_node, self.latency), sent, rate)


def across_named(text: str) -> Network:
    """What joins nodes: a network by its file or name, or a bandwidth.

    >>> across_named("ib400").name, across_named("40gbe").topology.transport
    ('ib400', 'sockets')
    """
    if text in files.bundled(Network) or not re.fullmatch(r"[0-9.]+ *[a-zA-Z]+(/s)?", text) or Path(text).exists():
        return Network.load(text)
    transport: Transport = "sockets" if is_ethernet(text) else "infiniband"
    latency = latency_by(transport, typical_hop_s(transport))
    sheet = Specification(gpus_per_node=1, nic=parse_rate(text) / 8, latency=latency, transport=transport)
    return sheet.network(text, [2, 4, 8, 16, 32, 64])


def is_ethernet(rate: str) -> bool:
    """Written like 10gbe: taken to go through sockets, unless something else is said."""
    return rate.strip().lower().endswith("gbe")


def _rounded(value: float) -> float:
    """Four digits: more would pretend to be known."""
    return float(f"{value:.4g}")
