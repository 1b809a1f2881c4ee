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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from backbeat.engine import Graph, SharedLink
from backbeat.engine.graph import Lane
from backbeat.steps.host import COMPUTE
from backbeat.steps.sharded_units import ROOT, ShardedChain, ShardedCost

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
    >>> from backbeat.steps.sharded_units import chain_of
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


_COPY_IN: tuple[Lane, ...] = ("copy in",)
_GATHER, _SCATTER, _REPLICATE = ((("communicator", number),) for number in range(3))


@dataclass(frozen=True, kw_only=True)
class UnitStep:
    """What a sharded step is made of."""

    chain: ShardedChain
    cost: ShardedCost
    update_s: float
    """Of the own shard."""
    micro_batches: int = 1
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    """Of computation beside collectives, by transport."""
    transports: tuple[str, str] = ("network", "network")
    """Of collectives among shards, and of those among copies of the model."""


@dataclass(frozen=True, slots=True)
class UnitGraph:
    graph: Graph
    calls: list[Call]
    """The call that issued each op."""
    chain: ShardedChain

    def on(self, cost: ShardedCost, slowdowns: Mapping[str, float] | None = None) -> Graph:
        """The same step where collectives cost this, as on a quieter network."""
        prices = _LinkTimes(self.chain, cost)
        sent = ((op, self.calls[op]) for op in self.graph.sent)
        times = {op: (*prices.of(call.event, call.unit), None) for op, call in sent}
        return self.graph.retimed(times, SharedLink.of(cost.sharing), slowdowns)


class _LinkTimes:
    """Latency and transfer of a unit's collectives: the same in every micro-batch."""

    def __init__(self, chain: ShardedChain, cost: ShardedCost) -> None:
        self.chain, self.cost = chain, cost
        self.known: dict[tuple[str, int], tuple[float, float]] = {}

    def of(self, event: str, unit: int) -> tuple[float, float]:
        if (event, unit) not in self.known:
            self.known[event, unit] = self.cost.unit_times(event, unit, self.chain.elements[unit])
        return self.known[event, unit]


def unit_graph(step: UnitStep) -> UnitGraph:
    """One step."""
    steps = UnitSteps(step)
    steps.add()
    return UnitGraph(steps.graph, steps.calls, step.chain)


class UnitSteps:
    """A graph to which one step after the other is added: ops of the calls so far, and what later ones will wait
    for."""

    def __init__(self, step: UnitStep) -> None:
        self.step, self.chain, self.cost = step, step.chain, step.cost
        self.graph = Graph()
        self.calls: list[Call] = []
        self.kind = self.graph.kind(step.slowdowns)
        shared = (self.graph.link(SharedLink.of(step.cost.sharing)),)
        self.replica_links = shared if step.cost.one_link else (self.graph.link(SharedLink.of(step.cost.sharing)),)
        self.shard_links = shared
        self.scatter_lane = _SCATTER if step.chain.sharding.separate_reduce_scatter else _GATHER
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
        self.link_times = _LinkTimes(step.chain, step.cost)

    def add(self) -> int:
        """The update that ends the step."""
        self.issue(calls(self.step.chain, self.step.micro_batches))
        return len(self.graph) - 1

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
            self._compute(call, self.step.update_s)

    def _compute(self, call: Call, seconds: float, *after: int, cause: str = "") -> int:
        waits, self.compute_waits_for = self.compute_waits_for, []
        return self._put(call, COMPUTE, seconds, (*after, *waits), kind=self.kind, cause=cause)

    def _send(self, call: Call, lane: tuple[Lane, ...], after: int) -> int:
        seconds, work = self.link_times.of(call.event, call.unit)
        among_copies = lane is _REPLICATE
        return self._put(
            call,
            lane,
            seconds,
            (after,),
            work_s=work,
            links=self.replica_links if among_copies else self.shard_links,
            transport=self.step.transports[among_copies],
        )

    def _put(
        self,
        call: Call,
        lane: tuple[Lane, ...],
        seconds: float,
        after: tuple[int, ...],
        *,
        work_s: float = 0.0,
        links: tuple[int, ...] = (),
        transport: str | None = None,
        kind: int = 0,
        cause: str = "",
    ) -> int:
        if self.cost.blocking and self.calls:
            after = (*after, len(self.calls) - 1)
        self.calls.append(call)
        return self.graph.add(
            lane,
            seconds,
            after=after,
            work_s=work_s,
            links=links,
            transport=transport,
            kind=kind,
            label=("{} {}", call.event, call.unit),
            cause=cause or call.event,
        )
