"""A chain cut into the units of a sharded plan: what each computes, the elements it holds, and what its collectives and
copies take.

A unit holds consecutive pieces; what no unit holds is the root's, both its parameters and its computation. A *part* is
a run of pieces of one unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from backbeat.cost.accelerators import accelerator
from backbeat.cost.curve import Curve
from backbeat.cost.link import LinkCost
from backbeat.errors import InputError
from backbeat.model import Network, Plan, Profile, Sharding
from backbeat.model.cluster import Cluster
from backbeat.model.profile import DTYPE_BYTES, ELEMENT_BYTES
from backbeat.model.sharding import Mesh, enclosing
from backbeat.steps.model_chain import Chain, ChainPiece

ROOT = -1
"""The root's index, after the units."""


@dataclass(frozen=True, slots=True)
class UnitPart:
    """Consecutive pieces of one unit, or of the root."""

    unit: int
    forward_s: float
    backward_s: float
    elements: int
    """Whose gradients its backward makes, padded."""
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardedChain:
    """A model in units."""

    parts: tuple[UnitPart, ...]
    elements: tuple[int, ...]
    """Of each unit, and last of the root: all parameters, each padded to a whole number of elements a shard."""
    reduced_last: frozenset[int]
    """Units whose input needs no gradient: autograd never reaches their input, so they are reduced when all of backward
    is done."""
    whole: Chain
    """Before it was cut."""
    sharding: Sharding

    @property
    def count(self) -> int:
        """Units without the root."""
        return len(self.sharding.units)

    @property
    def has_root(self) -> bool:
        """The root holds parameters."""
        return self.elements[ROOT] > 0

    @classmethod
    def of(cls, chain: Chain, sharding: Sharding) -> ShardedChain:
        owner = _owners([piece.name for piece in chain.pieces], sharding)
        _join_gaps(owner, chain.pieces)
        held: list[list[int]] = [[] for _ in range(len(sharding.units) + 1)]
        held[ROOT].extend(chain.loose)
        shards = sharding.mesh.shard
        parts: list[UnitPart] = []
        for unit, run in groupby(zip(owner, chain.pieces, strict=True), key=itemgetter(0)):
            own = [piece for _, piece in run]
            elements = [count for piece in own for count in piece.elements]
            held[unit].extend(elements)
            forward_s, backward_s = sum(piece.forward_s for piece in own), sum(piece.backward_s for piece in own)
            blocks = tuple(piece.block for piece in own if piece.block is not None)
            parts.append(UnitPart(unit, forward_s, backward_s, padded(elements, shards), blocks))
        _check_order(parts, sharding)
        for index, inside in enumerate(held[:ROOT]):
            if not inside:
                raise InputError(
                    f"units[{index}] ({', '.join(sharding.units[index].modules)}) holds no parameter with a gradient: "
                    "remove it, its modules are the root's"
                )
        units = tuple(padded(inside, shards) for inside in held)
        holding = [unit for unit, piece in zip(owner, chain.pieces, strict=True) if piece.elements]
        return cls(tuple(parts), units, frozenset({ROOT, *holding[:1]}), chain, sharding)


@dataclass(frozen=True, slots=True)
class ShardedCost:
    """What the collectives and copies of a sharded step take: seconds by bytes of a whole unit.

    Parameters are gathered, and gradients scattered, within a *shard group*; with several copies of the model (HSDP)
    each rank then all-reduces its shard with the ranks that hold the same one. Times in a row count where they were
    measured: a step that waits for collectives sends one after the other, and single ones are hidden.
    """

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
            replicate=_copies(cluster, sharding.mesh),
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

    def unit_times(self, event: str, unit: int, elements: int) -> tuple[float, float]:
        """Latency and transfer of a unit's collective."""
        curve, width = self.collective(event)
        size = elements * width
        seconds = curve.at(size)
        work = min(curve.link_s_per_byte * size, seconds)
        return seconds - work, work

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


def _copies(cluster: Cluster, mesh: Mesh) -> Curve | None:
    """Each rank all-reduces its shard with the ranks that hold the same one, by the bytes of what all shards are of."""
    return (
        cluster.group("all_reduce", mesh.replicate, mesh.shard).by_part(1 / mesh.shard) if mesh.replicate > 1 else None
    )


def chain_of(profile: Profile, plan: Plan) -> ShardedChain:
    """The profile in the plan's units."""
    if plan.sharding is None:
        raise InputError(f"the plan {plan.strategy!r} has no sharding: make one with `backbeat plan --strategy fsdp`")
    plan.check(profile)
    return ShardedChain.of(Chain.of_profile(profile, plan.memory), plan.sharding)


def padded(elements: Iterable[int], shards: int) -> int:
    """Elements of these parameters, each filled up to a whole number a shard."""
    return sum(-(-count // shards) * shards for count in elements)


def _owners(names: Sequence[str], sharding: Sharding) -> list[int]:
    """The unit of each piece, or ROOT."""
    of_module = {module: index for index, unit in enumerate(sharding.units) for module in unit.modules}
    owner = []
    found: set[str] = set()
    for name in names:
        module = next((outer for outer in enclosing(name) if outer in of_module), None)
        owner.append(ROOT if module is None else of_module[module])
        if module is not None:
            found.add(module)
    for module, index in of_module.items():
        if module not in found:
            raise InputError(
                f"units[{index}] names {module!r}, which is a part of a block or holds several kinds of them: units "
                f"are made of whole blocks, like {names[len(names) // 2]!r}"
            )
    return owner


def _join_gaps(owner: list[int], pieces: Sequence[ChainPiece]) -> None:
    """Pieces without parameters between two of one unit run while it is gathered."""
    last = 0
    for index in range(1, len(owner)):
        if owner[index] == ROOT and not pieces[index].elements:
            continue
        if owner[index] == owner[last] != ROOT:
            owner[last:index] = [owner[index]] * (index - last)
        last = index


def _check_order(parts: Sequence[UnitPart], sharding: Sharding) -> None:
    order = [part.unit for part in parts if part.unit != ROOT]
    if order != list(range(len(sharding.units))):
        broken = next((index for index, unit in enumerate(order) if unit != index), len(order))
        where = order[broken] if broken < len(order) else broken
        raise InputError(
            f"units[{where}] is not a run of consecutive blocks after those before it: list units, and the modules "
            "of each, in the order of forward"
        )
