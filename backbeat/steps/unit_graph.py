"""A step of sharded data parallel (FSDP2, HSDP, ZeRO) as a graph.

`calls` says in which order FSDP2's host issues work: torch's rules, and nothing of time. Checked against the installed
torch by `tests/runtime/test_sharded_order.py`, rule by rule.

**Forward.** Before its forward a unit is gathered, unless it is already, and copied out of the gathered buffer; then
the all-gathers that it prefetches are issued; then it computes. After forward it is freed where it reshards. The root
is gathered first and stays.

**Backward.** The root's pre-backward comes first and gathers the last unit. Each unit is copied out, then the unit that
ran before it in forward is gathered, so that this runs behind the unit's backward. After its backward the unit is
reduced: computation first waits until fewer than `reduce_scatter_buffers` inputs are held, oldest first. A unit whose
input needs no gradient, as the root's, is reduced when all of backward is done; the root before others.

**Accumulation.** Every micro-batch runs all of that; those before the last reduce nothing where `gradient_sync` is
"last", and keep their parameters whole where `reshard_after_backward` is false.

Each call becomes ops.

| lane | its ops, in the order of issue |
|---|---|
| compute | copies out of gathered buffers, forward, backward, copies into reduce-scatter inputs, the update |
| copy in | own shards into the buffers to gather |
| communicator 0 | all-gathers, and reduce-scatters unless they have their own |
| communicator 1, 2 | reduce-scatters (`separate_reduce_scatter`); the all-reduces of the copies (HSDP) |

What waits for what, beside the order of each lane:

- A copy-out waits for its all-gather, an all-gather for its copy-in, a reduce-scatter for its own copy-in, an
  all-reduce over the copies for its reduce-scatter.
- *Rate limit.* In forward an all-gather issued after copy-out k waits for copy-out k-1, so that two gathered buffers
  are held; in backward it waits for the copy-out before it. The first all-gather of backward waits for the last
  copy-out of forward alone, and runs behind the last forward.
- *Held inputs.* A `wait` call holds computation until that reduce-scatter is done.
- *Blocking.* On gloo the host waits for every collective: everything waits for what was issued before it.
- *Edges.* The update waits for the last reduction, and the first all-gather of a step for the update before it, so that
  a step repeats as it is. A micro-batch begins when the reductions of the one before are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from backbeat.cost.curve import Curve
from backbeat.cost.link import LinkCost
from backbeat.engine import Graph, GraphTimes, SharedLink, run
from backbeat.engine.graph import Lane
from backbeat.errors import InputError
from backbeat.model import Network, Profile, Sharding
from backbeat.model.accelerator import accelerator
from backbeat.model.cluster import Cluster
from backbeat.model.profile import DTYPE_BYTES, ELEMENT_BYTES
from backbeat.steps.host import COMPUTE
from backbeat.steps.model_chain import ROOT, ShardedChain

Event = Literal[
    "begin", "all_gather", "copy_out", "forward", "to_backward", "loss", "backward", "free", "wait", "reduce_scatter",
    "all_reduce", "end", "update",
]  # fmt: skip
MARKS = ("begin", "to_backward", "loss", "free", "end", "update")
"""A micro-batch begins, turns to backward, passes its loss and ends, a unit's parameters are freed, and the optimizer
steps: these start nothing on the device that FSDP2 waits for."""


class Call(NamedTuple):
    """One call of the host. `unit` is the unit's index in the plan, ROOT for the root."""

    event: Event
    unit: int
    part: int = 0
    """Of `forward` and `backward`: which of the chain's parts."""


def calls(chain: ShardedChain, micro_batches: int = 1) -> list[Call]:
    """Every call of one step, with marks.

    Two blocks, each a unit, and nothing in the root:

    >>> from backbeat.model import Gradient, Mesh, Plan, Profile, ShardUnit, Sharding
    >>> from backbeat.steps.model_chain import chain_of
    >>> two = Profile(
    ...     name="two", model="m", batch_size=1, precision="fp32", device="cpu", forward_s=2.0, backward_s=2.0,
    ...     update_s=0.0, gradients=tuple(
    ...         Gradient(name=f"b.{k}.w", bytes=8, ready_s=2.0 - k, forward_s=1.0) for k in (1, 0)))
    >>> plan = Plan(strategy="fsdp", model="m", sharding=Sharding(
    ...     mesh=Mesh(replicate=1, shard=2), param_dtype="fp32", reduce_dtype="fp32", reduce_scatter_buffers=1,
    ...     separate_reduce_scatter=False,
    ...     units=tuple(ShardUnit(modules=(f"b.{k}",), reshard=True, prefetch=0) for k in (0, 1))))
    >>> words = {"all_gather": "AG", "copy_out": "out", "forward": "F", "backward": "B", "reduce_scatter": "RS"}
    >>> found = [call for call in calls(chain_of(two, plan)) if call.event not in MARKS]
    >>> " ".join(f"{words.get(event, event)}{unit}" for event, unit, _ in found)
    'AG0 out0 F0 AG1 out1 F1 AG1 out1 AG0 B1 RS1 out0 B0 wait1 RS0'
    """
    host = _Host(chain)
    found: list[Call] = []
    for number in range(micro_batches):
        found.extend(host.micro_batch(last=number == micro_batches - 1))
    found.append(Call("update", ROOT))
    return found


class _Host:
    """What the host knows between calls: which units are gathered or on their way, and which inputs are held."""

    def __init__(self, chain: ShardedChain) -> None:
        self.chain, self.sharding = chain, chain.sharding
        # A mesh of one shard gathers nothing: parameters are whole on every rank.
        everything = {*range(chain.count), ROOT}
        self.always = everything if self.sharding.mesh.shard == 1 else set() if chain.has_root else {ROOT}
        self.whole = set(self.always)
        self.coming: set[int] = set()
        self.held: list[int] = []

    def micro_batch(self, *, last: bool) -> Iterator[Call]:
        yield Call("begin", ROOT)
        yield from self._gather(ROOT)
        yield from self._copy_out(ROOT)
        for index, part in enumerate(self.chain.parts):
            unit = part.unit
            if unit != ROOT:
                yield from self._gather(unit)
                yield from self._copy_out(unit)
                ahead = self.sharding.units[unit].prefetch
                for following in range(unit + 1, min(unit + 1 + ahead, self.chain.count)):
                    yield from self._gather(following)
            yield Call("forward", unit, index)
            if unit != ROOT and self.sharding.units[unit].reshard:
                yield from self._free(unit)
        yield Call("to_backward", ROOT)
        yield from self._backward(last=last)
        yield Call("end", ROOT)
        self.held.clear()

    def _backward(self, *, last: bool) -> Iterator[Call]:
        # The root has a pre-backward of its own where it holds parameters.
        if self.chain.has_root and self.chain.count:
            yield from self._gather(self.chain.count - 1)
        yield Call("loss", ROOT)
        for index in range(len(self.chain.parts) - 1, -1, -1):
            unit = self.chain.parts[index].unit
            if unit != ROOT:
                yield from self._gather(unit)
                yield from self._copy_out(unit)
                if unit > 0:
                    yield from self._gather(unit - 1)
            yield Call("backward", unit, index)
            if unit not in self.chain.reduced_last:
                yield from self._reduce(unit, last=last)
        for unit in sorted(self.chain.reduced_last):
            if unit != ROOT or self.chain.has_root:
                yield from self._reduce(unit, last=last)

    def _gather(self, unit: int) -> Iterator[Call]:
        if unit not in self.whole and unit not in self.coming:
            self.coming.add(unit)
            yield Call("all_gather", unit)

    def _copy_out(self, unit: int) -> Iterator[Call]:
        if unit in self.coming:
            self.coming.remove(unit)
            self.whole.add(unit)
            yield Call("copy_out", unit)

    def _free(self, unit: int) -> Iterator[Call]:
        if unit in self.whole and unit not in self.always:
            self.whole.remove(unit)
            yield Call("free", unit)

    def _reduce(self, unit: int, *, last: bool) -> Iterator[Call]:
        if last or self.sharding.reshard_after_backward:
            yield from self._free(unit)
        if not last and self.sharding.gradient_sync == "last":
            return
        while len(self.held) >= self.sharding.reduce_scatter_buffers:
            yield Call("wait", self.held.pop(0))
        yield Call("reduce_scatter", unit)
        if self.sharding.mesh.replicate > 1:
            yield Call("all_reduce", unit)
        self.held.append(unit)


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
                f"again with `backbeat plan --gpus {network.workers}`"
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
            # Each rank's shard, with the ranks that hold the same one.
            replicate=None
            if mesh.replicate == 1
            else cluster.group("all_reduce", mesh.replicate, mesh.shard).by_part(1 / mesh.shard),
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

    def by_unit(self, chain: ShardedChain) -> Callable[[str, int], tuple[float, float]]:
        """The same by event and unit: every micro-batch sends them again."""
        return cache(lambda event, unit: self.unit_times(event, unit, chain.elements[unit]))

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


_TRANSPORT = "network"
_COPY_IN: tuple[Lane, ...] = ("copy in",)
_GATHER, _SCATTER, _REPLICATE = ((("communicator", number),) for number in range(3))


def run_step(
    chain: ShardedChain, cost: ShardedCost, update_s: float = 0.0, *, micro_batches: int = 1, slowdown: float = 1.0
) -> tuple[UnitSteps, GraphTimes]:
    """One step, and when its ops run."""
    steps = UnitSteps(chain, cost, update_s, micro_batches=micro_batches, slowdown=slowdown)
    steps.add()
    return steps, run(steps.graph)


class UnitSteps:
    """A graph to which one step after the other is added: ops of the calls so far, and what later ones will wait
    for. A rank updates its own shard in `update_s`; computation takes `slowdown` times as long beside collectives."""

    def __init__(
        self, chain: ShardedChain, cost: ShardedCost, update_s: float = 0.0, *, micro_batches: int = 1,
        slowdown: float = 1.0,
    ) -> None:  # fmt: skip
        self.chain, self.cost, self.update_s, self.micro_batches = chain, cost, update_s, micro_batches
        self.graph = Graph()
        self.calls: list[Call] = []
        """The call that issued each op."""
        self.kind = self.graph.kind({_TRANSPORT: slowdown})
        self.shard_links = (self.graph.link(SharedLink.of(cost.sharing)),)
        self.replica_links = self.shard_links if cost.one_link else (self.graph.link(SharedLink.of(cost.sharing)),)
        self.scatter_lane = _SCATTER if chain.sharding.separate_reduce_scatter else _GATHER
        self.in_forward = True
        self.gather_waits_for: tuple[int, ...] = ()
        """The next all-gather."""
        self.last_copy_out: tuple[int, ...] = ()
        """Of this forward."""
        self.compute_waits_for: list[int] = []
        """The next computation."""
        self.gathers: dict[int, int] = {}
        """The last all-gather of each unit."""
        self.scatters: dict[int, int] = {}
        """The last reduce-scatter of each unit."""
        self.unfinished: list[int] = []
        """Reductions that the end of the micro-batch waits for."""
        self.link_times = cost.by_unit(chain)

    def add(self) -> int:
        """The update that ends the step."""
        self.issue(calls(self.chain, self.micro_batches))
        return len(self.graph) - 1

    def on(self, cost: ShardedCost, slowdown: float) -> Graph:
        """The same ops where collectives cost this, as on a quieter network."""
        prices, sent = cost.by_unit(self.chain), ((op, self.calls[op]) for op in self.graph.sent)
        times = {op: (*prices(call.event, call.unit), None) for op, call in sent}
        return self.graph.retimed(times, SharedLink.of(cost.sharing), {_TRANSPORT: slowdown})

    def issue(self, issued: Iterable[Call]) -> None:
        """These calls, behind those before them."""
        for call in issued:
            self._add(call)

    def _add(self, call: Call) -> None:
        event, unit = call.event, call.unit
        elements = self.chain.elements[unit]
        if event == "all_gather":
            copied = self._put(call, _COPY_IN, self.cost.gather_in_s(elements), self.gather_waits_for, cause="copy")
            self.gathers[unit] = self._send(call, _GATHER, copied)
        elif event == "copy_out":
            out = self._compute(call, self.cost.copy_out_s(elements), self.gathers[unit], cause="copy")
            if self.in_forward:
                self.gather_waits_for, self.last_copy_out = self.last_copy_out or self.gather_waits_for, (out,)
            else:
                self.gather_waits_for, self.last_copy_out = (out,), ()
        elif event == "forward":
            self._compute(call, self.chain.parts[call.part].forward_s)
        elif event == "backward":
            self._compute(call, self.chain.parts[call.part].backward_s)
        elif event == "wait":
            self.compute_waits_for.append(self.scatters[unit])
        elif event == "reduce_scatter":
            copied = self._compute(call, self.cost.scatter_in_s(elements), cause="copy")
            self.scatters[unit] = self._send(call, self.scatter_lane, copied)
            self.unfinished.append(self.scatters[unit])
        elif event == "all_reduce":
            self.unfinished.append(self._send(call, _REPLICATE, self.scatters[unit]))
        elif event == "begin":
            self.gather_waits_for, self.in_forward = (self._compute(call, 0.0),), True
        elif event == "to_backward":
            self.gather_waits_for = self.last_copy_out or self.gather_waits_for
            self.last_copy_out, self.in_forward = (), False
        elif event == "end":
            self.compute_waits_for.extend(self.unfinished)
            self.unfinished.clear()
        elif event == "update":
            self._compute(call, self.update_s)

    def _compute(self, call: Call, seconds: float, *after: int, cause: str = "") -> int:
        waits, self.compute_waits_for = self.compute_waits_for, []
        return self._put(call, COMPUTE, seconds, (*after, *waits), kind=self.kind, cause=cause)

    def _send(self, call: Call, lane: tuple[Lane, ...], after: int) -> int:
        seconds, work = self.link_times(call.event, call.unit)
        links = self.replica_links if lane is _REPLICATE else self.shard_links
        return self._put(call, lane, seconds, (after,), work_s=work, links=links, transport=_TRANSPORT)

    def _put(
        self, call: Call, lane: tuple[Lane, ...], seconds: float, after: tuple[int, ...], *, work_s: float = 0.0,
        links: tuple[int, ...] = (), transport: str | None = None, kind: int = 0, cause: str = "",
    ) -> int:  # fmt: skip
        if self.cost.blocking and self.calls:
            after = (*after, len(self.calls) - 1)
        self.calls.append(call)
        return self.graph.add(
            lane, seconds, after=after, work_s=work_s, links=links, transport=transport, kind=kind,
            label=("{} {}", call.event, call.unit), cause=cause or call.event,
        )  # fmt: skip
