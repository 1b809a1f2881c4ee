"""What the collectives and copies of a sharded step take; all-gathers and reduce-scatters of other steps too.

Parameters are gathered, and gradients scattered, within a *shard group*; with several copies of the model (HSDP) each
rank then all-reduces its shard with the ranks that hold the same one. All-gathers and reduce-scatters take what the
network measured of them at the shard group's size; where it did not, their part of its all-reduce. Times in a row count
where they were measured: a step that waits for collectives sends one after the other, and single ones are hidden. The
all-reduce of the copies crosses nodes where a shard group fills a node or more; the shards of a node's ranks share what
joins the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from backbeat.cost.accelerators import accelerator
from backbeat.cost.collectives import Shape, steps, traffic
from backbeat.cost.curve import Curve
from backbeat.cost.link import LinkCost
from backbeat.errors import InputError
from backbeat.model import Mesh, Network, Profile, Sharding
from backbeat.model.profile import DTYPE_BYTES, ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class ShardedCost:
    """Seconds by bytes of a whole unit."""

    gather: Curve
    scatter: Curve
    replicate: Curve | None
    """The all-reduce of a unit's shards over the copies; None where there is one copy."""
    one_link: bool
    """The copies' all-reduce passes the same link as the shard group's collectives."""
    sharing: LinkCost
    """How collectives at once share a link: as measured of all-gathers and reduce-scatters on two communicators,
    otherwise as all-reduces do."""
    copy_s_per_byte: float
    """Reading or writing a byte of the device's memory."""
    shards: int
    param_bytes: int
    reduce_bytes: int
    blocking: bool = False
    """The host waits for every collective, and issues nothing meanwhile: FSDP2 on gloo."""

    @classmethod
    def of(cls, profile: Profile, network: Network, sharding: Sharding) -> ShardedCost:
        mesh = sharding.mesh
        if mesh.workers != network.workers:
            raise InputError(
                f"mesh {mesh} != workers({network.workers}): the plan is made for {mesh.workers} workers; make it "
                f"again with `backbeat plan --workers {network.workers}`"
            )
        group = _at(network, mesh.shard)
        blocking = network.backend == "gloo"
        in_a_row, together, sharing = 1.0, None, group.cost
        if network.sharded is not None:
            in_a_row, together = 1.0 if blocking else network.sharded.in_a_row, network.sharded.speed(2)
        if together is not None:
            sharing = LinkCost(sharing.isolated, sharing.busy, {2: together * in_a_row})
        device = accelerator(profile.device)
        return cls(
            gather=half_curve(group, "all_gather").slower(in_a_row),
            # Gloo's own reduce-scatter, which FSDP2 calls there, moves as many bytes as its all-reduce.
            scatter=group.cost.isolated if blocking else half_curve(group, "reduce_scatter").slower(in_a_row),
            replicate=_across(network, mesh) if mesh.replicate > 1 else None,
            one_link=_inside(network) is None or mesh.shard > network.topology.gpus_per_node,
            sharing=sharing,
            # A device that is not in the table, such as a CPU, is taken to copy in no time.
            copy_s_per_byte=0.0 if device is None else 1 / device.bytes_per_s,
            shards=mesh.shard,
            param_bytes=DTYPE_BYTES[sharding.param_dtype],
            reduce_bytes=DTYPE_BYTES[sharding.reduce_dtype],
            blocking=blocking,
        )

    def collective(self, event: str) -> tuple[Curve, int]:
        """What a collective of FSDP2 takes by its bytes, and bytes of an element in it."""
        if event == "all_gather":
            return self.gather, self.param_bytes
        return self.scatter if event == "reduce_scatter" else self.replicate or self.scatter, self.reduce_bytes

    def gather_in_s(self, elements: int) -> float:
        """The own shard, read and written in the parameters' dtype, and once more into the gathered buffer."""
        cast = ELEMENT_BYTES + self.param_bytes if self.param_bytes != ELEMENT_BYTES else 0
        return elements / self.shards * (cast + 2 * self.param_bytes) * self.copy_s_per_byte

    def copy_out_s(self, elements: int) -> float:
        """Out of the gathered buffer into the parameters."""
        return 2 * elements * self.param_bytes * self.copy_s_per_byte

    def scatter_in_s(self, elements: int) -> float:
        """Gradients, in the dtype they were computed in, into the reduce-scatter's input."""
        return elements * (self.param_bytes + self.reduce_bytes) * self.copy_s_per_byte


def _inside(network: Network) -> Curve | None:
    """The all-reduce within one full node, where the file has it."""
    nodes = network.topology
    if nodes.inside is not None:
        return nodes.inside.curve
    own = network.workers if network.moved_from is None else network.moved_from.workers
    known = any(1 < count <= nodes.gpus_per_node for count in (own, *(row.workers for row in network.rows)))
    return _at(network, nodes.gpus_per_node).cost.isolated if known else None


def _across(network: Network, mesh: Mesh) -> Curve:
    """The all-reduce over the copies, by the bytes of the whole unit."""
    per_node, inside = network.topology.gpus_per_node, _inside(network)
    if inside is None or network.workers <= per_node:
        # Every rank of a node sends its own shard, and all of them pass the node's link.
        links = 1 if inside is not None else min(per_node, mesh.shard)
        return _by_part(_at(network, mesh.replicate).cost.isolated, links / mesh.shard)
    # What an all-reduce over whole nodes takes above its inner part is what crosses them. Where it is measured as one,
    # or pipelined, the inner transfer hides behind the other, and only its latency is taken off.
    apart = network.topology.inside is not None and not network.topology.pipelined
    over = _at(network, mesh.replicate * per_node if mesh.shard >= per_node else network.workers)
    whole = over.cost.isolated
    sizes = np.union1d(whole.sizes, inside.sizes)
    across = Curve(
        sizes,
        np.maximum(whole.time(sizes) - (inside.time(sizes) if apart else inside.latency(sizes)), 0.0),
        max(whole.link_s_per_byte - (inside.link_s_per_byte if apart else 0.0), 0.0),
    )
    if over.all_gather is not None:
        # At most what it takes at the rate at which the ring of an all-gather over all ranks crosses nodes. That takes
        # more of every message across than one ring for each rank of a node: with two nodes of two ranks 3/4 of it,
        # where an all-reduce over the nodes takes 1/2 twice.
        more = traffic("all_reduce", "ring", over.nodes) / traffic("all_gather", "ring", over.workers)
        across = across.joined(half_curve(over, "all_gather").slower(more), np.minimum)
    if mesh.shard >= per_node:
        return _by_part(across, per_node / mesh.shard)
    # Several copies in one node are first reduced there.
    local = _by_part(_at(network, per_node // mesh.shard).cost.isolated, 1 / mesh.shard)
    return across.joined(local, np.add)


def _at(network: Network, workers: int) -> Network:
    """As busy as this one is taken to be."""
    return network.at(workers=workers, load="typical" if network.moved_from is None else network.moved_from.load)


def _by_part(curve: Curve, part: float) -> Curve:
    """The cost by whole bytes of a message of which this part is sent."""
    return Curve(curve.sizes / part, curve.times, curve.link_s_per_byte * part)


def half_curve(network: Network, collective: Literal["all_gather", "reduce_scatter"]) -> Curve:
    """What this half costs. Where the network has not measured it, it is half of the all-reduce, or more where switches
    reduce: they spare the all-reduce bytes that its halves do send.

    Never less than its time on the link: an isolated message may be let through faster where a shaped link was idle,
    but most halves follow each other without a gap.
    """
    times = network.all_gather if collective == "all_gather" else network.reduce_scatter
    if times is not None:
        alone = times.curve
    else:
        whole = network.cost.isolated
        alone = whole.slower(0.5)
        if (parts := _parts(network)) is not None:
            latency, work = parts
            times_s = latency * whole.latency(whole.sizes) + work * whole.transfer(whole.sizes)
            alone = Curve(whole.sizes, times_s, work * whole.link_s_per_byte)
    return Curve(alone.sizes, np.maximum(alone.times, alone.link_s_per_byte * alone.sizes), alone.link_s_per_byte)


def _parts(network: Network) -> tuple[float, float] | None:
    """Of an all-reduce's latency and link time, what a half takes where switches reduce; None elsewhere."""
    topology, workers = network.topology, network.workers
    shape: Shape | Literal["auto", "hierarchical"] = topology.algorithm
    if shape == "hierarchical":
        shape = topology.shape_inside(workers)
        if workers > topology.gpus_per_node:
            shape, workers = topology.across_algorithm, network.nodes
    if (shape != "nvls" and shape != "sharp") or workers == 1:
        return None
    # Inside a node, where steps are short, most of the latency is NCCL's own.
    return (
        0.5 if shape == "nvls" else steps("all_gather", shape, workers) / steps("all_reduce", shape, workers),
        traffic("all_gather", shape, workers) / traffic("all_reduce", shape, workers),
    )
