"""A cluster: a network and the GPUs that it joins, as groups of ranks see it. What a collective takes in any group.

A network says what a collective takes that fills whole nodes. Groups need not: a group of `tp` lies inside a node, a
group of `dp` takes every tp-th rank, so that several such groups cross the same NICs at once.

Ranks of a group are `stride` apart. With g GPUs a node, a group has g / stride members in each node it touches, and
min(stride, g) groups share a node. These send at the same time, since every rank does the same thing. So a message
takes as long as one that is min(stride, g) times as large, in a group that fills the same nodes. A ring of fewer ranks
sends somewhat less (`_sent`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from backbeat.cost import Curve
from backbeat.cost.collectives import Collective, traffic
from backbeat.cost.pcie import is_pcie
from backbeat.cost.protocols import with_own_share
from backbeat.errors import InputError
from backbeat.model.accelerator import Accelerator, accelerator_named
from backbeat.model.network import Network
from backbeat.model.profile import ComputeShares
from backbeat.model.slowdown import Slowdown, slowdown_on
from backbeat.model.topology import Load

CALL_S, RANK_S = 25e-6, 8.5e-6
"""What a small collective takes inside a node that a layer waits for: at least, and for each further rank. All-reduces
of 1 MiB take 44, 51 and 85 µs on 2, 4 and 8 A100 (VIA-Research/vTrain, trace/a100); all-gathers 32, 51 and 87 µs before
their bytes on B200 (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json)."""

SEND_BYTES_PER_S = 25e9
"""The most that one rank sends to another node: NCCL gives a send one or two channels, which do not fill 400 Gbit/s. 25
to 26 GB/s with 1 to 4 of 8 H100 of ten nodes, 15 with 8, 42 between two nodes (xxrjun/nccl-tests-cluster)."""


@dataclass(frozen=True)
class Cluster:
    """Any number of its ranks may be asked for; `load` says how busy others keep its links."""

    network: Network
    gpu: Accelerator | None = None
    load: Load = "typical"
    contention: bool = False
    """Whether computation takes longer beside communication: as the network says, or its transport lets assume."""
    _networks: dict[int, Network] = field(default_factory=dict, init=False, repr=False, compare=False)
    _curves: dict[tuple[Collective, int], Curve] = field(default_factory=dict, init=False, repr=False, compare=False)
    _groups: dict[tuple[Collective, int, int], Curve] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _slowdowns: dict[int, tuple[Slowdown, str] | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, network: Network) -> Cluster:
        """As busy as this network is taken to be."""
        return cls(network, load=network.how_busy)

    @property
    def accelerator(self) -> Accelerator:
        if self.gpu is None:
            raise InputError(
                f"network {self.network.name!r} does not say what GPUs it joins: name them with --accelerator h100 "
                "(accelerator= in Python), or write accelerator into its file"
            )
        return self.gpu

    @property
    def per_node(self) -> int:
        return self.network.topology.gpus_per_node

    @property
    def name(self) -> str:
        return f"{self.network.name} ({self.accelerator.name})"

    @cached_property
    def edges(self) -> tuple[Cluster, Cluster] | None:
        """The same on a quiet day and on a busy one, where the network says how far these are apart."""
        fabric = self.network.topology.fabric
        if self.load != "typical" or (fabric is None and self.network.band is None):
            return None
        return replace(self, load="quiet"), replace(self, load="busy")

    def at(self, workers: int) -> Network:
        """The network of so many."""
        if workers not in self._networks:
            self._networks[workers] = self.network.at(workers=workers, load=self.load)
        return self._networks[workers]

    def collective_s(self, kind: Collective, size: float, workers: int, stride: int = 1) -> float:
        """Seconds of a collective of `size` bytes in groups of `workers` ranks, `stride` apart, all groups at once."""
        return 0.0 if workers == 1 or size <= 0 else self.group(kind, workers, stride).at(size)

    def group(self, kind: Collective, workers: int, stride: int = 1) -> Curve:
        """Seconds by bytes in such groups, all of them at once.

        Of a node's NICs each of the groups that share them has its part. A ring of fewer ranks sends somewhat less
        between nodes: one of two sends half of what it gathers, one of sixteen nearly all. On two nodes, and where
        switches reduce, an all-reduce sends as much in either.
        """
        if (kind, workers, stride) not in self._groups:
            self._groups[kind, workers, stride] = self._group(kind, workers, stride)
        return self._groups[kind, workers, stride]

    def _group(self, kind: Collective, workers: int, stride: int) -> Curve:
        nodes, sharing = self._nodes(workers, stride), min(stride, self.per_node)
        if nodes == 1:
            return self.curve(kind, workers)
        filled, topology = nodes * self.per_node, self.network.topology
        whole, inner, members = self.curve(kind, filled), self.inside_node, workers // nodes
        # Algorithms that go inside and across in turn send between nodes what their number says.
        ring, full = (nodes, nodes) if topology.in_turn else (workers, filled)
        less = traffic(kind, "ring", ring) / traffic(kind, "ring", full)
        tree = nodes == 2 and topology.algorithm != "ring"
        if kind == "all_reduce" and (tree or topology.across_algorithm == "sharp"):
            less = 1.0
        if kind != "all_reduce" or inner is None or stride == 1:
            return whole.by_part(sharing * less)
        across = topology.across(whole, inner).by_part(sharing * less)
        if self.at(filled).all_gather is not None:
            # At most what it takes at the rate at which the ring of an all-gather over all ranks crosses nodes.
            sent = traffic(kind, "ring", ring) / traffic("all_gather", "ring", filled)
            across = across.joined(self.curve("all_gather", filled).by_part(sharing * sent), np.minimum)
        return across if members == 1 else topology.with_inside(across, self.curve(kind, members))

    def curve(self, kind: Collective, workers: int | None = None) -> Curve:
        """Seconds by bytes of the collective, isolated, in one group of neighbours that sends alone: of as many
        as the network has, unless told.

        An all-gather or reduce-scatter that the network has not measured is half of the all-reduce, or more where
        switches reduce: they spare the all-reduce bytes that its halves do send. Neither takes less than its time on
        the link: an isolated message may be let through faster where a shaped link was idle, but most of these follow
        each other without a gap.
        """
        workers = self.network.workers if workers is None else workers
        if (kind, workers) not in self._curves:
            there = self.at(workers)
            self._curves[kind, workers] = there.cost.isolated if kind == "all_reduce" else _half(there, kind)
        return self._curves[kind, workers]

    @cached_property
    def inside_node(self) -> Curve | None:
        """The all-reduce within one full node, where the file has it."""
        inside = self.network.topology.inside
        if inside is not None:
            return inside.curve
        known = any(1 < row.workers <= self.per_node for row in self.network.as_measured.file_rows)
        return self.curve("all_reduce", self.per_node) if known else None

    def waited_s(self, kind: Collective, size: float, workers: int) -> float:
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
        if inside:
            latency, rate = self._link(inside=True, sharing=1)
            return latency + size / rate
        nics = self.network.topology.nics_per_node
        # Each rank has its own NICs, however few send.
        own = 1 if nics is None else min(nics, self.per_node)
        latency, rate = self._link(inside=False, sharing=max(min(stride, self.per_node), own))
        return latency + size / (rate if nics is None else min(rate, SEND_BYTES_PER_S))

    def late_s(self, size: float) -> float | None:
        """What is left of a send whose receiver is ready only after its buffer has taken what it can. None, which is
        assumed: nothing is sent before the receiver is ready."""
        return None

    def exchange_s(self, size: float, workers: int, stride: int = 1) -> float:
        """An all-to-all in which each rank sends `size` bytes, the same share to each of its group."""
        if workers == 1 or size <= 0:
            return 0.0
        near = max(1, min(workers, self.per_node // min(stride, self.per_node)))
        latency, rate = self._link(inside=True, sharing=1, ranks=near)
        seconds = latency * (workers - 1) / max(workers / 8, 1)
        if near > 1:
            own = (
                1.0
                if is_pcie(self.network.topology.inside_link)
                else with_own_share(near) / with_own_share(self.per_node)
            )
            seconds += size * (near - 1) / workers / rate * own
        if near == workers:
            return seconds
        latency, rate = self._link(inside=False, sharing=self.per_node)
        return max(seconds, latency * (workers - near) / max(workers / 8, 1) + size * (workers - near) / workers / rate)

    def slowdown(
        self, workers: int, stride: int = 1, *, matmul: float = 0.0, attention: float = 0.0, memory: float = 0.0
    ) -> float:
        """How many times as long work that spends these shares of its time in each kind takes beside collectives of
        such groups. What the shares leave of 1 is not computation, and takes as long as it does."""
        found = self._slowdown(workers, stride)
        computing = matmul + attention + memory
        if found is None or computing <= 0:
            return 1.0
        shares = ComputeShares(matmul=matmul / computing, attention=attention / computing, memory=memory / computing)
        return 1 + (found[0].of(shares) - 1) * computing

    def origins(self, *groups: tuple[int, int]) -> tuple[str, ...]:
        """Where the slowdowns beside such groups (how many ranks, how far apart) come from."""
        found = [self._slowdown(workers, stride) for workers, stride in groups]
        return tuple(dict.fromkeys(each[1] for each in found if each is not None))

    def _slowdown(self, workers: int, stride: int) -> tuple[Slowdown, str] | None:
        if workers == 1 or not self.contention:
            return None
        count = workers if self.inside(workers, stride) else self._nodes(workers, stride) * self.per_node
        if count not in self._slowdowns:
            self._slowdowns[count] = slowdown_on(self.at(count), self.gpu, sharded=True)
        return self._slowdowns[count]

    def inside(self, workers: int, stride: int = 1) -> bool:
        """Whether a group lies inside a node."""
        return workers * stride <= self.per_node

    def _nodes(self, workers: int, stride: int) -> int:
        """That a group touches."""
        return -(-workers * min(stride, self.per_node) // self.per_node)

    def _link(self, *, inside: bool, sharing: int, ranks: int = 0) -> tuple[float, float]:
        """Latency of one message, and bytes a second from each GPU where so many of a node send: those of a ring that
        fills a node, or two. A part of a node is no measure of it: where the switch adds up, its collectives take as
        long to start as the whole node's. On PCIe it is: `ranks` share what the host carries."""
        count = self.per_node if inside and self.per_node > 1 else 2 * self.per_node
        if inside and ranks > 1 and is_pcie(self.network.topology.inside_link):
            count = ranks
        curve = self.curve("all_gather", count)
        per_byte = max(curve.link_s_per_byte, 1e-15)
        rate = traffic("all_gather", "ring", count) / per_byte
        return curve.at(0.0) / (count - 1), rate / sharing


def _half(network: Network, kind: Collective) -> Curve:
    measured = network.all_gather if kind == "all_gather" else network.reduce_scatter
    if measured is not None:
        alone = measured.curve
    else:
        whole = network.cost.isolated
        latency, work = network.topology.half(network.workers)
        times_s = latency * whole.latency(whole.sizes) + work * whole.transfer(whole.sizes)
        alone = Curve(whole.sizes, times_s, work * whole.link_s_per_byte)
    return Curve(alone.sizes, np.maximum(alone.times, alone.link_s_per_byte * alone.sizes), alone.link_s_per_byte)


def cluster_of(
    network: Cluster | Network | str | os.PathLike[str], gpu: str | os.PathLike[str] | Accelerator | None = None
) -> Cluster:
    """A network, by its file or name, with its own GPUs or others: named, of a file, or as they are.

    >>> cluster_of("dgx-h100").accelerator.name, cluster_of("10gbe", "a100").accelerator.name
    ('H100', 'A100')
    """
    if isinstance(network, Cluster):
        return network if gpu is None else replace(network, gpu=accelerator_named(gpu))
    loaded = network if isinstance(network, Network) else Network.load(network)
    chosen = gpu or loaded.accelerator
    return Cluster(loaded, None if chosen is None else accelerator_named(chosen))
