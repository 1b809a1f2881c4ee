"""A network from a cluster's data sheets: what its links could carry, times what collectives are known to reach.

An all-reduce on n nodes of g GPUs reduces inside the nodes, across them, and gathers inside. Parts of a message cross
nodes while others travel inside, so the slower of the two sets its pace; latencies add up. All-gather, reduce-scatter
and broadcast go in one ring through all GPUs, as NCCL's do: each node's NICs carry the ring's traffic once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backbeat.cost.collectives import Collective, Shape, steps, traffic
from backbeat.cost.fabric import Load
from backbeat.cost.scaling import Inside, cheaper_line
from backbeat.errors import InputError
from backbeat.model.collective_times import CollectiveTimes
from backbeat.model.network import COLLECTIVES, Network, WorkersRow
from backbeat.model.source import Source
from backbeat.model.topology import Fabric, LoadBand, Topology
from backbeat.units import format_rate, format_seconds

INSIDE_EFFICIENCY = {"ring": 0.82, "nvls": 0.685}
"""Of the line rate inside a node: 8 H100 reach 370 GB/s of 450 with NCCL's ring, and with NVLS 308 GB/s on the link
(480 GB/s of bus bandwidth): github.com/NVIDIA/nccl-tests/issues/212 and github.com/NVIDIA/nccl/issues/1455."""
ACROSS_EFFICIENCY = 0.9
"""Of the line rate of the NICs. Assumed: 8 NICs of 400 Gbit/s give rings 320 to 370 GB/s of 400."""
INSIDE_HOP_S = 1.5e-6
"""One message between two GPUs of a node. Assumed."""
ACROSS_HOP_S = 5e-6
"""One message between two nodes over RDMA, NCCL's own cost included. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """A cluster as its data sheets describe it. Every rate is of one direction, in bytes a second."""

    gpus_per_node: int
    inside: float | CollectiveTimes
    """Line rate of one GPU's links inside its node, or the all-reduce measured there."""
    nic: float
    """Line rate of one network interface."""
    nics_per_node: int = 1
    hop_s: float = ACROSS_HOP_S
    """One message from node to node."""
    fabric: Fabric | None = None
    nvls: bool = False
    """The node's NVSwitches reduce (NVLink SHARP)."""
    sharp: bool = False
    """The switches between nodes reduce (SHARP)."""

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "nics_per_node"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: a node has at least one")
        if self.nvls and self.gpus_per_node < 2:
            raise InputError("NVLS reduces between the GPUs of a node, and there is one: leave it out")

    def network(self, name: str, nodes: Sequence[int]) -> Network:
        """The network at these numbers of nodes; the smallest of two or more has the file's own times.

        >>> sheet = Specification(gpus_per_node=8, inside=450e9, nic=50e9, nics_per_node=8)
        >>> [row.workers for row in sheet.network("mine", [1, 2, 4]).rows]
        [8, 32]
        """
        counts = sorted({count for count in nodes if count * self.gpus_per_node > 1})
        if not counts:
            raise InputError("nodes has no number with two GPUs or more: nothing travels; give --nodes 1..64")
        own = next((count for count in counts if count > 1), counts[-1])
        per_node = self.gpus_per_node
        inside = self._inside("all_reduce") if per_node > 1 else None
        topology = Topology(
            algorithm="hierarchical" if inside is not None else "sharp" if self.sharp else "auto",
            gpus_per_node=per_node,
            inside=inside,
            inside_algorithm=self._inside_shape,
            across_algorithm="sharp" if self.sharp and per_node > 1 else "auto",
            pipelined=per_node > 1,
            fabric=self.fabric,
        )
        first = self._row(own)
        return Network(
            name=name,
            topology=topology,
            rows=tuple(self._row(count) for count in counts if count != own),
            backend="nccl",
            source=Source(method="assumed", reference=self.sentence),
            **{field: getattr(first, field) for field in WorkersRow.__struct_fields__},
        )

    @property
    def sentence(self) -> str:
        """What the figures are computed from."""
        text = f"computed from specifications: {self.gpus_per_node} GPU{'s' if self.gpus_per_node > 1 else ''} a node"
        if isinstance(self.inside, CollectiveTimes):
            text += " with the all-reduce measured inside one"
        elif self.gpus_per_node > 1:
            shape = self._inside_shape
            text += f", {self.inside / 1e9:g} GB/s each way inside ({100 * INSIDE_EFFICIENCY[shape]:g}% with {shape})"
        text += (
            f"; {self.nics_per_node} NIC{'s' if self.nics_per_node > 1 else ''} a node of {format_rate(8 * self.nic)} "
            f"({ACROSS_EFFICIENCY:.0%} assumed), {format_seconds(self.hop_s)} from node to node"
        )
        if self.fabric is not None:
            text += f"; {self.fabric.kind} fabric, oversubscription {self.fabric.oversubscription:g}"
        return text + ("; SHARP between nodes" if self.sharp else "")

    @property
    def _inside_shape(self) -> Inside:
        return "nvls" if self.nvls else "ring"

    def _inside(self, collective: Collective) -> CollectiveTimes:
        """One full node."""
        count, shape = self.gpus_per_node, self._inside_shape
        if isinstance(self.inside, CollectiveTimes):
            if collective == "all_reduce":
                return self.inside
            alpha, beta = self.inside.curve.line
            alpha *= steps(collective, shape, count) / steps("all_reduce", shape, count)
            beta *= traffic(collective, shape, count) / traffic("all_reduce", shape, count)
            return CollectiveTimes(alpha_s=alpha, beta_s_per_byte=beta)
        # Switches speed up what is reduced; the rest goes as it does without them.
        rate = self.inside * INSIDE_EFFICIENCY[shape if collective == "all_reduce" else "ring"]
        return _line(steps(collective, shape, count) * INSIDE_HOP_S, traffic(collective, shape, count) / rate)

    def _row(self, nodes: int) -> WorkersRow:
        times: dict[str, Any] = {one: self._times(one, nodes, "typical") for one in COLLECTIVES}
        band = None
        if self.fabric is not None:
            typical, quiet, busy = (
                self._times("all_reduce", nodes, load).curve.gradient_s_per_byte
                for load in ("typical", "quiet", "busy")
            )
            band = LoadBand(quiet=_rounded(max(typical / quiet, 1.0)), busy=_rounded(min(typical / busy, 1.0)))
        return WorkersRow(workers=nodes * self.gpus_per_node, band=band, **times)

    def _times(self, collective: Collective, nodes: int, load: Load) -> CollectiveTimes:
        """Under this load."""
        per_node = self.gpus_per_node
        inner = self._inside(collective) if per_node > 1 else CollectiveTimes(alpha_s=0.0, beta_s_per_byte=0.0)
        if nodes == 1:
            return inner
        share = self.fabric.share(nodes, load) if self.fabric is not None else 1.0
        rate = self.nic * self.nics_per_node * ACROSS_EFFICIENCY * share
        alpha, beta = inner.curve.line
        lines = []
        reduces = collective == "all_reduce"
        shapes: tuple[Shape, ...] = ("sharp",) if self.sharp and reduces else ("ring", "tree") if reduces else ("ring",)
        for shape in shapes:
            latency = steps(collective, shape, nodes) * self.hop_s
            ring = traffic(collective, shape, nodes if reduces else nodes * per_node)
            lines.append((alpha + latency, max(beta, ring / rate)))
        return CollectiveTimes.of(cheaper_line(lines)) if len(lines) > 1 else _line(*lines[0])


def _line(alpha: float, beta: float) -> CollectiveTimes:
    return CollectiveTimes(alpha_s=_rounded(alpha), beta_s_per_byte=_rounded(beta))


def _rounded(value: float) -> float:
    """Four digits: more would pretend to be known."""
    return float(f"{value:.4g}")
