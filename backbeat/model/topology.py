"""How a cluster's workers are joined, what a collective then takes on more or fewer of them, and how busy the network
between their nodes may be.

Under `auto` the library is taken to choose the cheaper of ring and tree at every size, as NCCL does; both are anchored
at what was measured. Hierarchical clusters pay the inside of a node once and scale only what crosses nodes.

A collective on many nodes goes at the pace of its slowest link. The more links it takes, the likelier one of them
carries other traffic as well. Published sweeps are followed by a `share = 1 / (1 + fall * log2(nodes))` of the
bandwidth, with one `fall` for each kind of fabric and each load (`FALL`). `validation/published/fabric/fit.py` fits
them, and names the sources and the one left out to judge the fit. What falls is the bandwidth of large messages;
latency grows with the algorithm's steps, and accounts for most of what small ones lose. On two nodes NCCL's tree
exceeds the link's own rate, which more nodes cannot: shares are those of the ring.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

import numpy as np
from msgspec import Meta

from backbeat.cost.collectives import Collective, Shape, steps, traffic
from backbeat.cost.curve import Curve, cheapest, stretch_factors
from backbeat.cost.pcie import InsideLink, is_pcie, reached
from backbeat.cost.protocols import with_own_share
from backbeat.errors import InputError
from backbeat.model.checks import Checked
from backbeat.model.collective_times import CollectiveTimes
from backbeat.model.slowdown import Transport

Algorithm = Literal["ring", "tree", "auto", "halving-doubling", "hierarchical", "nvls", "sharp"]
Across = Literal["auto", "ring", "tree", "halving-doubling", "sharp"]
Inside = Literal["ring", "nvls"]
_INSIDE: tuple[Inside, Inside] = get_args(Inside)
FabricKind = Literal["rail-optimised", "fat-tree", "cloud"]
Load = Literal["quiet", "typical", "busy"]

FALL: dict[FabricKind, dict[Load, float]] = {
    "rail-optimised": {"quiet": 0.0, "typical": 0.04, "busy": 0.085},
    "fat-tree": {"quiet": 0.002, "typical": 0.046, "busy": 0.259},
    "cloud": {"quiet": 0.0, "typical": 0.107, "busy": 0.402},
}
"""What each doubling of the nodes adds to the time of a large message, as a share of the time on one link."""

_CROSSING: dict[Load, float] = {"quiet": 0.0, "typical": 0.5, "busy": 1.0}
"""Assumed: how much of a collective leaves its group of nodes at once. A ring laid out by group crosses its edge once;
one laid out at random crosses with nearly every hop."""

_GROUP: dict[FabricKind, int] = {"rail-optimised": 32, "fat-tree": 4, "cloud": 16}
"""Assumed: nodes below one switch. A rail's switch has a port for each of 32 nodes; without rails a node takes 8."""

_NVLS_OVER_RING = 309 / 370
"""Bytes a second through a GPU's links, of large all-reduces on 8 H100 (`cost/collectives.py` names the sources)."""
_RING_BASE_S, _RING_STEP_S = 6.6e-6, 0.6e-6
"""What NCCL's own model counts for a small all-reduce by a ring inside a node, and for each of its steps (LL in its
src/graph/tuning.cc)."""
_LARGE = (2.0**20, 2.0**24, 2.0**28)
"""Bytes at which a cost that is the greater of two is sampled beside their own sizes."""


class Fabric(Checked, frozen=True, kw_only=True):
    """What joins the nodes: bandwidth between them falls with their number, and with other jobs. `oversubscription` is
    the bandwidth below a switch over that above it: 1 is a full fat tree."""

    kind: FabricKind
    oversubscription: Annotated[float, Meta(ge=1)] = 1.0

    def share(self, nodes: int, load: Load = "typical") -> float:
        """The share that is left of the bandwidth between two nodes of a quiet cluster.

        >>> [round(Fabric(kind="cloud").share(32, load), 2) for load in ("quiet", "typical", "busy")]
        [1.0, 0.65, 0.33]
        """
        for name, value, allowed in (("kind", self.kind, get_args(FabricKind)), ("load", load, get_args(Load))):
            if value not in allowed:
                raise InputError(f"{name} is {value!r}: a fabric has one of {', '.join(allowed)}")
        if nodes < 1:
            raise InputError(f"nodes is {nodes}: a job runs on at least one")
        if nodes == 1:
            return 1.0
        fall = FALL[self.kind]
        through = (1 + fall["quiet"]) / (1 + fall[load] * math.log2(nodes))
        outside = max(1 - _GROUP[self.kind] / nodes, 0.0)
        return through / (1 + (self.oversubscription - 1) * _CROSSING[load] * outside)

    def change(self, old: int, new: int) -> float:
        """How much longer a byte takes between `new` nodes than between `old`. One node has all of a link's bandwidth:
        where only many were measured, its links are taken to be as fast as those between two on a quiet day, so that it
        is never slower than two."""
        return self.share(old) / self.share(new)

    def slowdown(self, nodes: int, load: Load) -> float:
        """How much longer a byte takes under this load than on a typical day."""
        return self.share(nodes) / self.share(nodes, load)


class LoadBand(Checked, frozen=True, kw_only=True):
    """Bandwidth on a quiet and on a busy cluster, over that of a typical day. `quiet` is 1 or more, such as the 95th
    percentile; `busy` is 1 or less, such as the 5th."""

    quiet: Annotated[float, Meta(ge=1)]
    busy: Annotated[float, Meta(gt=0, le=1)]


class Topology(Checked, frozen=True, kw_only=True):
    """How the workers are joined: what is needed to move a calibration to another number of them."""

    algorithm: Algorithm = "auto"
    """`auto` is the cheaper of ring and tree; `nvls` and `sharp` reduce in the switches, inside a node and across."""
    gpus_per_node: Annotated[int, Meta(ge=1)] = 1
    inside: CollectiveTimes | None = None
    """All-reduce inside one full node, for `hierarchical` (NVLink inside, network across)."""
    inside_algorithm: Inside = "ring"
    """Algorithm that `hierarchical` uses inside a node."""
    across_algorithm: Across = "auto"
    """Algorithm that `hierarchical` uses between nodes."""
    pipelined: bool = False
    """With `hierarchical`, parts of a message cross nodes while others travel inside: the slower of the two sets the
    pace, not their sum."""
    fabric: Fabric | None = None
    """What joins the nodes; without it, bandwidth between them stays whatever their number."""
    transport: Transport | None = None
    """What carries messages between nodes, or inside the one there is: what NCCL takes of a GPU for it decides how much
    computation slows down beside communication."""
    nics_per_node: Annotated[int, Meta(ge=1)] | None = None
    """Network interfaces of a node, so that one rank's sends are held to its own; without it they may use all."""
    inside_link: InsideLink | None = None
    """What joins the GPUs of a node. On PCIe without peer-to-peer they share the host's memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm == "hierarchical" and self.inside is None:
            raise InputError("algorithm 'hierarchical' needs inside: the all-reduce times within one node")

    def moved(self, curve: Curve, collective: Collective, old: int, new: int, *, slowdown: float = 1.0) -> Curve:
        """The cost on `new` workers of a collective that costs `curve` on `old`.

        `slowdown` is how much longer a byte takes between nodes there, beyond what the algorithm sends.

        A ring of 2 becomes one of 4: three times the steps, and 3/2 bytes through each link for every byte, not 1.

        >>> ring = Topology(algorithm="ring")
        >>> ring.moved(Curve.affine(1e-3, 1e-9), "all_reduce", 2, 4).time([0, 1_000_000]).round(6).tolist()
        [0.003, 0.0045]
        """
        if new == 1:
            return Curve.affine(0.0, 0.0)
        inner = self.inner(collective)
        if inner is not None and new <= self.gpus_per_node:
            # What was measured of this collective inside a node says more than its all-reduce does.
            return self._moved_inside(curve if old == self.gpus_per_node else inner, collective, new)
        if inner is not None and collective == "all_reduce":
            return self._moved_across(curve, inner, old, new, slowdown)
        shapes: tuple[Shape, ...] = ("ring", "tree")
        if collective in ("all_gather", "reduce_scatter") and self.gpus_per_node > 1:
            # One ring through all GPUs. NCCL has trees for these (PAT) only where a node has one GPU.
            shapes = ("ring",)
        if self.algorithm != "auto" and self.algorithm != "hierarchical":
            shapes = (self.algorithm,)
        there = cheapest([stretch_factors(collective, shape, shapes[0], old, new, slowdown) for shape in shapes], curve)
        if inner is None:
            return there
        sizes = np.unique(np.concatenate([there.sizes, inner.sizes, _LARGE]))
        slope = max(there.link_s_per_byte, inner.link_s_per_byte)
        return Curve(sizes, np.maximum(there.time(sizes), inner.time(sizes)), slope)

    def inner(self, collective: Collective) -> Curve | None:
        """A collective inside one full node, from the all-reduce there; None where the algorithm knows no nodes."""
        if self.algorithm != "hierarchical" or self.inside is None:
            return None
        if collective == "all_reduce":
            return self.inside.curve
        if self.gpus_per_node == 1:
            return Curve.affine(0.0, 0.0)
        shape, count = self.inside_algorithm, self.gpus_per_node
        work = traffic(collective, shape, count) / traffic("all_reduce", shape, count)
        return cheapest([(0.5, work)], self.inside.curve)

    def shape_inside(self, workers: int) -> Shape:
        """What carries large all-reduces of so many GPUs of a node. With few the ring is faster than NVLS."""
        if self.inside_algorithm == "nvls" and workers < self.gpus_per_node:
            ring, nvls = (traffic("all_reduce", shape, workers) for shape in _INSIDE)
            return "ring" if ring * _NVLS_OVER_RING < nvls else "nvls"
        return self.inside_algorithm

    def half(self, workers: int) -> tuple[float, float]:
        """Of an all-reduce's latency and link time, what its all-gather or reduce-scatter takes: more than half where
        switches reduce."""
        shape: Algorithm = self.algorithm
        if shape == "hierarchical":
            shape = self.shape_inside(workers)
            if workers > self.gpus_per_node:
                shape, workers = self.across_algorithm, self.nodes(workers)
        if (shape != "nvls" and shape != "sharp") or workers == 1:
            return 0.5, 0.5
        # Inside a node, where steps are short, most of the latency is NCCL's own.
        return (
            0.5 if shape == "nvls" else steps("all_gather", shape, workers) / steps("all_reduce", shape, workers),
            traffic("all_gather", shape, workers) / traffic("all_reduce", shape, workers),
        )

    def _moved_inside(self, whole: Curve, collective: Collective, new: int) -> Curve:
        """Fewer GPUs of a node. With few the ring is faster than NVLS, and NCCL takes it."""
        shape, whole_node = self.inside_algorithm, self.gpus_per_node
        if new == whole_node:
            return whole
        # NCCL's own latency does not fall with the number of GPUs.
        own_s, ring_s = (_RING_BASE_S + _RING_STEP_S * steps(collective, "ring", one) for one in (new, whole_node))
        least = min(own_s / max(float(whole.times[0]), 1e-9), 1.0)
        latency, work = stretch_factors(collective, shape, shape, whole_node, new)
        if is_pcie(self.inside_link):
            work *= reached(str(self.inside_link), whole_node) / reached(str(self.inside_link), new)
        elif collective != "all_reduce" and new > 1:
            work *= with_own_share(new) / with_own_share(whole_node)
        factors = [(max(latency, least), work)]
        if shape == "nvls" and collective == "all_reduce":
            work = traffic(collective, "ring", new) / traffic(collective, "nvls", whole_node)
            factors.append((max(own_s / ring_s, least), work * _NVLS_OVER_RING))
        return cheapest(factors, whole)

    def _moved_across(self, whole: Curve, inner: Curve, old: int, new: int, slowdown: float) -> Curve:
        """Reduce inside the nodes, all-reduce across them, gather inside: only the middle part depends on their
        number."""
        old_nodes, new_nodes = self.nodes(old), self.nodes(new)
        if old_nodes < 2:
            raise InputError(
                f"the calibration on {old} workers is within one node of {self.gpus_per_node}: it says nothing of the "
                "network between nodes; calibrate across two nodes or more"
            )
        shapes: tuple[Shape, ...] = ("ring", "tree") if self.across_algorithm == "auto" else (self.across_algorithm,)
        factors = [stretch_factors("all_reduce", shape, shapes[0], old_nodes, new_nodes, slowdown) for shape in shapes]
        return self.with_inside(cheapest(factors, self.across(whole, inner)), inner)

    @property
    def in_turn(self) -> bool:
        """An all-reduce goes inside nodes and between them one after the other."""
        return self.inside is not None and not self.pipelined

    def across(self, whole: Curve, inner: Curve) -> Curve:
        """Of an all-reduce over whole nodes, what crosses them. What overlaps with the inside is not seen of it: then
        all of the transfer is taken to cross nodes."""
        within = inner.time if self.in_turn else inner.latency
        sizes = np.unique(np.concatenate([inner.sizes, whole.sizes, _LARGE]))
        slope = whole.link_s_per_byte - (inner.link_s_per_byte if self.in_turn else 0.0)
        return Curve(sizes, np.maximum(whole.time(sizes) - within(sizes), 0.0), max(slope, 0.0))

    def with_inside(self, across: Curve, inner: Curve) -> Curve:
        """The all-reduce whose parts cross nodes, and go inside them, in these times."""
        within = inner.time if self.in_turn else inner.latency
        sizes = np.unique(np.concatenate([across.sizes, inner.sizes, _LARGE]))
        slope = across.link_s_per_byte + (inner.link_s_per_byte if self.in_turn else 0.0)
        times = np.maximum(across.time(sizes) + within(sizes), inner.time(sizes))
        return Curve(sizes, times, max(slope, inner.link_s_per_byte))

    def nodes(self, workers: int) -> int:
        """That so many workers take."""
        return -(-workers // self.gpus_per_node)
