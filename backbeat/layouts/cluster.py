"""A cluster as a layout sees it: GPUs, and what its groups of ranks take to communicate.

A network says what a collective takes that fills whole nodes. A layout's groups do not: a group of `tp` lies inside a
node, a group of `dp` takes every tp-th rank, so that several such groups cross the same NICs at once.

Ranks of a group are `stride` apart. With g GPUs a node, a group has g / stride members in each node it touches, and
min(stride, g) groups share a node. These send at the same time, since every rank does the same thing. So a message
takes as long as one that is min(stride, g) times as large, in a group that fills the same nodes. A ring of fewer ranks
sends somewhat less (`_sent`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from backbeat.cost import Curve
from backbeat.cost.accelerators import ACCELERATORS, Accelerator, accelerator
from backbeat.cost.collectives import traffic
from backbeat.errors import InputError
from backbeat.model import Network
from backbeat.model.profile import ComputeShares
from backbeat.model.slowdown import Slowdown, slowdown_on
from backbeat.model.topology import Load
from backbeat.steps.sharded_cost import half_curve

CALL_S, RANK_S = 25e-6, 8.5e-6
"""What a small collective takes inside a node that a layer waits for: at least, and for each further rank. All-reduces
of 1 MiB take 44, 51 and 85 µs on 2, 4 and 8 A100 (VIA-Research/vTrain, trace/a100); all-gathers 32, 51 and 87 µs before
their bytes on B200 (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json)."""
LayoutCollective = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class GpuCluster:
    """A network and the GPUs that it joins."""

    network: Network
    accelerator: Accelerator
    load: Load = "typical"
    contention: bool = False
    """Whether computation takes longer beside communication: as the network says, or its transport lets assume."""
    _curves: dict[int, dict[LayoutCollective, Curve]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _slowdowns: dict[int, tuple[Slowdown, str] | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def per_node(self) -> int:
        return self.network.topology.gpus_per_node

    @property
    def name(self) -> str:
        return f"{self.network.name} ({self.accelerator.name})"

    @cached_property
    def edges(self) -> tuple[GpuCluster, GpuCluster] | None:
        """The same on a quiet day and on a busy one, where the network says how far these are apart."""
        fabric = self.network.topology.fabric
        if self.load != "typical" or (fabric is None and self.network.band is None):
            return None
        return replace(self, load="quiet"), replace(self, load="busy")

    def collective_s(self, kind: LayoutCollective, size: float, workers: int, stride: int = 1) -> float:
        """Seconds of a collective of `size` bytes in groups of `workers` ranks, `stride` apart, all groups at once."""
        if workers == 1 or size <= 0:
            return 0.0
        count = self._filled(workers, stride)
        sharing = 1.0 if count <= self.per_node else min(stride, self.per_node) * self._sent(kind, workers, count)
        return self._curve(kind, count).at(size * sharing)

    def _sent(self, kind: LayoutCollective, workers: int, filled: int) -> float:
        """What a byte of a group sends between nodes, over what it sends in a group that fills them: a ring of two
        sends half of what it gathers, one of sixteen nearly all. On two nodes, and where switches reduce, an all-reduce
        sends as much in either."""
        if kind == "all_reduce" and (filled == 2 * self.per_node or self.network.topology.across_algorithm == "sharp"):
            return 1.0
        return traffic(kind, "ring", workers) / traffic(kind, "ring", filled)

    def waited_s(self, kind: LayoutCollective, size: float, workers: int) -> float:
        """The same in groups of neighbours where every rank waits for it, in the middle of a layer."""
        if workers == 1 or size <= 0:
            return 0.0
        least = self.least_s(workers)
        return self.collective_s(kind, size, workers) + max(0.0, least - self.collective_s(kind, 1.0, workers))

    def least_s(self, workers: int) -> float:
        """What a collective that a layer waits for takes before its bytes: launches, for the most part."""
        return CALL_S + RANK_S * (workers - 1)

    def send_s(self, size: float, workers: int, stride: int) -> float:
        """Seconds to send from each rank to the next of its group, `stride` further on, all at once. The pairs that
        cross nodes set the pace."""
        if size <= 0:
            return 0.0
        inside = self.inside(workers, stride)
        latency, rate = self._link(inside=inside, sharing=1 if inside else min(stride, self.per_node))
        return latency + size / rate

    def late_s(self, size: float) -> float | None:
        """What is left of a send whose receiver is ready only after its buffer has taken what it can. None, which is
        assumed: nothing is sent before the receiver is ready."""
        return None

    def exchange_s(self, size: float, workers: int, stride: int = 1) -> float:
        """An all-to-all in which each rank sends `size` bytes, the same share to each of its group."""
        if workers == 1 or size <= 0:
            return 0.0
        near = max(1, min(workers, self.per_node // min(stride, self.per_node)))
        latency, rate = self._link(inside=True, sharing=1)
        seconds = latency * (workers - 1) / max(workers / 8, 1) + size * (near - 1) / workers / rate
        if near == workers:
            return seconds
        latency, rate = self._link(inside=False, sharing=self.per_node)
        return max(seconds, latency * (workers - near) / max(workers / 8, 1) + size * (workers - near) / workers / rate)

    def slowdown(
        self, workers: int, stride: int = 1, *, matmul: float = 0.0, attention: float = 0.0, memory: float = 0.0
    ) -> float:
        """How many times as long work that spends these shares of its time in each kind takes beside collectives of
        such groups. What the shares leave of 1 is not computation, and takes as long as it does."""
        count = self._filled(workers, stride)
        if workers == 1 or not self.contention:
            return 1.0
        if count not in self._slowdowns:
            there = self.network.at(workers=count, load=self.load)
            self._slowdowns[count] = slowdown_on(there, self.accelerator, sharded=True)
        found = self._slowdowns[count]
        computing = matmul + attention + memory
        if found is None or computing <= 0:
            return 1.0
        shares = ComputeShares(matmul=matmul / computing, attention=attention / computing, memory=memory / computing)
        return 1 + (found[0].of(shares) - 1) * computing

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the slowdowns that were asked for come from."""
        origins = dict.fromkeys(found[1] for found in self._slowdowns.values() if found is not None)
        return tuple(f"computation beside communication takes longer, {origin}" for origin in origins)

    def inside(self, workers: int, stride: int = 1) -> bool:
        """Whether a group lies inside a node."""
        return workers * stride <= self.per_node

    def _filled(self, workers: int, stride: int) -> int:
        """The GPUs of as many whole nodes as a group touches; of a group inside one node, its own."""
        nodes = -(-workers * stride // self.per_node)
        return workers if self.inside(workers, stride) else nodes * self.per_node

    def _link(self, *, inside: bool, sharing: int) -> tuple[float, float]:
        """Latency of one message, and bytes a second from each GPU where so many of a node send: those of a ring that
        fills a node, or two. A part of a node is no measure of it: where the switch adds up, its collectives take as
        long to start as the whole node's."""
        count = self.per_node if inside and self.per_node > 1 else 2 * self.per_node
        curve = self._curve("all_gather", count)
        per_byte = max(curve.link_s_per_byte, 1e-15)
        rate = traffic("all_gather", "ring", count) / per_byte
        return curve.at(0.0) / (count - 1), rate / sharing

    def _curve(self, kind: LayoutCollective, workers: int) -> Curve:
        if workers not in self._curves:
            there = self.network.at(workers=workers, load=self.load)
            self._curves[workers] = {
                "all_reduce": there.cost.isolated,
                "all_gather": half_curve(there, "all_gather"),
                "reduce_scatter": half_curve(there, "reduce_scatter"),
            }
        return self._curves[workers][kind]


def cluster_of(network: GpuCluster | Network | str | os.PathLike[str], gpu: str | None = None) -> GpuCluster:
    """A network, by its file or name, with its own GPUs or those that are named.

    >>> cluster_of("dgx-h100").accelerator.name, cluster_of("10gbe", "a100").accelerator.name
    ('H100', 'A100')
    """
    if isinstance(network, GpuCluster):
        return network if gpu is None else GpuCluster(network.network, gpu_named(gpu))
    loaded = network if isinstance(network, Network) else Network.load(network)
    chosen = gpu or loaded.accelerator
    if chosen is None:
        raise InputError(
            f"network {loaded.name!r} does not say what GPUs it joins: name them with --accelerator h100 "
            "(accelerator= in Python), or write accelerator into its file"
        )
    return GpuCluster(loaded, gpu_named(chosen))


def gpu_named(text: str) -> Accelerator:
    """By its short name (h100), or by its driver's (NVIDIA A100-SXM4-40GB)."""
    found = accelerator(text) or next((one for one in ACCELERATORS if one.short_name == text.lower()), None)
    if found is None:
        known = ", ".join(dict.fromkeys(one.short_name for one in ACCELERATORS))
        raise InputError(f"{text!r} is no accelerator known here: there are {known}")
    return found
