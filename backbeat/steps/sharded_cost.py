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

from backbeat.cost.accelerators import accelerator
from backbeat.cost.curve import Curve
from backbeat.cost.link import LinkCost
from backbeat.errors import InputError
from backbeat.model import Network, Profile, Sharding
from backbeat.model.cluster import Cluster
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
        cluster = Cluster.of(network)
        group = cluster.at(mesh.shard)
        blocking = network.backend == "gloo"
        in_a_row, together, sharing = 1.0, None, group.cost
        if network.sharded is not None:
            in_a_row, together = 1.0 if blocking else network.sharded.in_a_row, network.sharded.speed(2)
        if together is not None:
            sharing = LinkCost(sharing.isolated, sharing.busy, {2: together * in_a_row})
        device = accelerator(profile.device)
        return cls(
            gather=cluster.curve("all_gather", mesh.shard).slower(in_a_row),
            # Gloo's own reduce-scatter, which FSDP2 calls there, moves as many bytes as its all-reduce.
            scatter=group.cost.isolated if blocking else cluster.curve("reduce_scatter", mesh.shard).slower(in_a_row),
            replicate=cluster.copies(mesh.shard, mesh.replicate) if mesh.replicate > 1 else None,
            one_link=cluster.inside_node is None or mesh.shard > network.topology.gpus_per_node,
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
