"""A step of data parallelism with buckets as a graph: computation, the messages it makes ready, the update.

| lane | its ops, in the order of issue |
|---|---|
| compute | forward, backward from one bucket's last gradient to the next one's, compression, the update |
| communicator 0, 1, … | gathers of parameters before forward, then buckets |
| host | where it is given, the issue of each piece's forward and backward, and of the update |

Backward is cut where a bucket becomes ready. On one communicator the messages are a recursion,
F_k = max(R_k, F_(k-1)) + T(M_k); on several they share the link, and leave in plan order. One leaves no earlier than
the one before it: not before what any bucket so far in the plan waited for, its gradients or its communicator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np

from backbeat.cost import LinkCost, MessageTimes
from backbeat.engine import Graph, GraphTimes, SharedLink, run
from backbeat.engine.graph import NO_OP
from backbeat.model.framework import OverlappedPasses
from backbeat.steps.host import COMPUTE, HOST, HostIssue, IssuedPass
from backbeat.steps.schedule import Flow, Schedule, one_by_one, with_compression


@dataclass(frozen=True, kw_only=True)
class BucketStep:
    """What a step with buckets is made of."""

    schedule: Schedule
    """Buckets in launch order. `ready` counts from the start of backward, without compression."""
    times: MessageTimes
    """Of each bucket's message."""
    forward_s: float
    backward_s: float
    update_s: float
    link: SharedLink | None = None
    """None where it is shared perfectly, or not at all."""
    transport: str = "network"
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    """Of computation beside messages, by transport."""
    compress_s: Sequence[float] | None = None
    """Compressing each bucket, on the compute stream, once it is ready."""
    micro_batches: int = 1
    overlap: OverlappedPasses = "last"
    """Which backward passes messages overlap with."""
    before_s: float = 0.0
    """What is sent before forward, such as module buffers."""
    gathers: Sequence[tuple[float, float]] = ()
    """Parameters gathered for the first forward: what each message takes, and the forward that needs it."""
    gathers_ahead: bool = False
    """Each is sent while forward works on the one before it; otherwise forward waits for all."""
    host: HostIssue | None = None
    """None where the host is always ahead."""


class BucketGraph(NamedTuple):
    """The graph, and where the last backward that messages overlap with is in it."""

    graph: Graph
    forward: int
    """The last op before it."""
    backward: int
    """Its last op, compression included."""
    messages: list[int]
    """Of each bucket, in launch order."""
    update: int
    """The last op of the step."""

    def flow(self, times: GraphTimes) -> tuple[Flow, float]:
        """When those buckets travel, and when that backward ends, after it begins."""
        begun = times.ends[self.forward]
        starts, on_link, ends = (
            np.array([column[number] - begun for number in self.messages])
            for column in (times.starts, times.on_link, times.ends)
        )
        return Flow(starts, on_link, ends), times.ends[self.backward] - begun


def bucket_graph(step: BucketStep) -> BucketGraph:
    """One step.

    Two buckets of 1 MB, ready 0 and 1 ms into a backward of 3 ms, each 1 ms + 1 ns/byte, on one communicator:

    >>> from backbeat.cost import Curve
    >>> from backbeat.engine import run
    >>> cost = LinkCost(Curve.affine(1e-3, 1e-9))
    >>> two = Schedule(np.array([0.0, 1e-3]), np.array([1e6, 1e6]), [0, 0])
    >>> made = bucket_graph(BucketStep(
    ...     schedule=two, times=cost.times(two.sizes), forward_s=1e-3, backward_s=3e-3, update_s=1e-3))
    >>> times = run(made.graph)
    >>> made.flow(times)[0].finishes.round(6).tolist(), round(times.end_s, 6)
    ([0.002, 0.004], 0.006)
    """
    return BucketSteps(step).add()


class BucketTravel:
    """Buckets beside a backward alone.

    On one communicator every bucket starts when it is ready and the one before it is done: a recursion, as long as
    nothing slows computation down. Otherwise the engine runs their graph.

    Two buckets of 1 MB ready together on two communicators, each 1 ms of latency and 1 ms of link: the latencies
    overlap, the transfers share the link, and both end after 1 + 2 ms.

    >>> from backbeat.cost import Curve, LinkCost
    >>> two = BucketTravel(Schedule(np.array([0.0, 0.0]), np.array([1e6, 1e6]), [0, 1]), 0.0)
    >>> two.at(LinkCost(Curve.affine(1e-3, 1e-9)))[0].finishes.round(6).tolist()
    [0.003, 0.003]
    """

    def __init__(self, schedule: Schedule, backward_s: float, compress_s: Sequence[float] | None = None) -> None:
        self.schedule, self.backward_s, self.compress_s = schedule, backward_s, compress_s
        self.several = len({*schedule.communicators}) > 1
        self.computed_s = backward_s + sum(compress_s or ())
        """Backward and compression."""
        self.ready = schedule.ready if compress_s is None else with_compression(schedule.ready, compress_s)

    def at(self, cost: LinkCost, slowdown: float = 1.0) -> tuple[Flow, float]:
        """Dense messages at this cost."""
        return self.on(cost.times(self.schedule.sizes), SharedLink.of(cost) if self.several else None, slowdown)

    def on(self, times: MessageTimes, link: SharedLink | None = None, slowdown: float = 1.0) -> tuple[Flow, float]:
        """When messages that take these times travel, and when computation ends that takes `slowdown` times as long
        beside them."""
        if not self.several and slowdown == 1:
            return one_by_one(self.ready, times), self.computed_s
        made, computing = self._made
        retimed = dict(zip(made.messages, _op_times(times), strict=True))
        if self._in_ready_order:
            parts = np.diff(self.ready, prepend=0.0, append=max(self.backward_s, self.ready[-1])).tolist()
            retimed.update((op, (seconds, 0.0, None)) for op, seconds in zip(computing, parts, strict=True))
        return made.flow(run(made.graph.retimed(retimed, link or SharedLink(), {"network": slowdown})))

    @cached_property
    def _in_ready_order(self) -> bool:
        return self.compress_s is None and bool((np.diff(self.ready) >= 0).all())

    @cached_property
    def _made(self) -> tuple[BucketGraph, list[int]]:
        """With whatever times; and what of it computes."""
        schedule = self.schedule
        if self._in_ready_order:
            # Sent in the order in which they are ready, so many buckets have the same graph whatever they hold.
            return _in_ready_order(tuple(schedule.communicators))
        return _backward_alone(schedule, self.backward_s, self.compress_s)

    def least_s(self, cost: LinkCost) -> float:
        """When all messages are done at the earliest: each as if it had the link to itself, and the link as if it
        always did the most. A search need not run what cannot be better.

        >>> two = BucketTravel(Schedule(np.array([0.0, 0.0]), np.array([1e6, 1e6]), [0, 1]), 0.0)
        >>> from backbeat.cost import Curve
        >>> round(two.least_s(LinkCost(Curve.affine(1e-3, 1e-9))), 6)
        0.003
        """
        columns = _columns(cost.times(self.schedule.sizes))
        rows = zip(self.schedule.communicators, self.ready.tolist(), *columns, strict=True)
        free: dict[int, float] = {}
        arrivals, left, last, before = [], -np.inf, -np.inf, None
        for communicator, ready, alone, busy, work in rows:
            # Right behind another on its communicator it takes what was measured of that.
            floor, idle = ready if communicator == before else max(ready, left), free.get(communicator, -np.inf)
            left, before = max(left, ready, idle), communicator
            free[communicator] = done = max(floor + alone, idle + busy)
            arrivals.append((max(done - work, left), min(work, alone)))
            last = max(last, done)
        most, on_link = cost.best_efficiency(max(len(free), 1)), -np.inf
        for arrival, work in sorted(arrivals):
            on_link = max(on_link, arrival) + work / most
        return max(last, on_link)


@lru_cache(maxsize=256)
def _in_ready_order(communicators: tuple[int, ...]) -> tuple[BucketGraph, list[int]]:
    """One bucket after the other, with computation before each and after the last."""
    count = len(communicators)
    return _backward_alone(Schedule(np.arange(1.0, count + 1), np.ones(count), communicators), count + 1.0)


def _backward_alone(
    schedule: Schedule, backward_s: float, compress_s: Sequence[float] | None = None
) -> tuple[BucketGraph, list[int]]:
    """With whatever times of messages; and its parts."""
    made = bucket_graph(BucketStep(
        schedule=schedule, times=MessageTimes(*[np.ones(len(schedule.sizes))] * 3), compress_s=compress_s,
        forward_s=0.0, backward_s=backward_s, update_s=0.0,
    ))  # fmt: skip
    return made, [op for op, cause in enumerate(made.graph.causes) if cause == "backward"]


def _columns(times: MessageTimes) -> list[list[float]]:
    return [column.tolist() for column in times]


class BucketSteps:
    """A graph to which one step after the other is added."""

    def __init__(self, step: BucketStep) -> None:
        self.step, self.graph = step, Graph()
        self.link = (self.graph.link(step.link or SharedLink()),)
        self.kind = self.graph.kind(step.slowdowns)
        self.message_times = _op_times(step.times)
        self.several = len({*step.schedule.communicators}) > 1
        self.status: list[int] = []
        """Messages of the step before."""

    def add(self) -> BucketGraph:
        step, host = self.step, self.step.host
        overlapping = step.micro_batches if step.overlap == "every" else 1
        forward, _ = self.first_forward()
        messages: list[int] = []
        for number in range(step.micro_batches):
            if number:
                forward = self._pass("forward", messages).finish(step.forward_s)
            if host is not None:
                # The wrapper reads the status of the step before when its own backward opens.
                opens_s = host.opens_s if number == step.micro_batches - 1 else 0.0
                self.graph.add(HOST, opens_s, after=() if number else self.status, cause="host")
            if number < step.micro_batches - overlapping:
                self._pass("backward").finish(step.backward_s)
            else:
                backward, messages = self._backward(forward)
        waits = [*messages]
        if host is not None:
            waits.append(self.graph.add(HOST, host.update_s, label="issue the update", cause="host"))
        update = self.graph.add(COMPUTE, step.update_s, after=waits, label="update", cause="update")
        self.status = messages
        return BucketGraph(self.graph, forward, backward, messages, update)

    def first_forward(self) -> tuple[int, list[int]]:
        """Its last op, and the gathers of parameters for it."""
        step, graph, lane = self.step, self.graph, ("communicator", 0)
        if step.before_s:
            sent = graph.add(("buffers",), step.before_s, label="buffers", cause="buffers")
            graph.add(COMPUTE, 0.0, after=(sent,))
        forward, now = self._pass("forward"), 0.0
        gathers: list[int] = []
        if not step.gathers:
            return forward.finish(step.forward_s), gathers
        reached = graph.add(COMPUTE, 0.0)
        for index, (seconds, _) in enumerate(step.gathers):
            if step.gathers_ahead and index > 1:
                now += step.gathers[index - 2][1]
                reached = forward.until(now, gathers[-2:-1])
            label = ("all-gather {} of {}", index + 1, len(step.gathers))
            gathers.append(
                graph.add((lane,), seconds, after=(reached,), transport=step.transport, label=label, cause="all-gather")
            )
        if step.gathers_ahead and len(gathers) > 1:
            forward.until(now + step.gathers[-2][1], gathers[-2:-1])
        return forward.finish(step.forward_s, gathers[-1:]), gathers

    def _pass(self, label: Literal["forward", "backward"], after: Sequence[int] = ()) -> IssuedPass:
        host = self.step.host
        works = None if host is None else host.forward if label == "forward" else host.backward
        return IssuedPass(self.graph, self.kind, label, works, after)

    def _backward(self, forward: int) -> tuple[int, list[int]]:
        """Its last op, and the messages."""
        step, graph = self.step, self.graph
        ready, compress_s = step.schedule.ready.tolist(), step.compress_s
        sending = _Sending(self)
        made_by: dict[int, int] = {}
        last, under_way = forward, self._pass("backward")
        for index in sorted(range(len(ready)), key=ready.__getitem__):
            if step.overlap != "none" and ready[index] > under_way.done_s:
                last = under_way.until(ready[index])
            if compress_s is not None and compress_s[index]:
                last = graph.add(COMPUTE, compress_s[index], kind=self.kind, label="compression", cause="compression")
            if step.overlap != "none":
                made_by[index] = last
                # As soon as all before it in the plan have left, so that messages stand behind what makes them ready.
                sending.all_made(made_by)
        if step.backward_s > under_way.done_s or under_way.left:
            last = under_way.finish(step.backward_s)
        sending.all_made({index: made_by.get(index, last) for index in range(len(ready))})
        return last, sending.messages


class _Sending:
    """Messages in plan order."""

    def __init__(self, steps: BucketSteps) -> None:
        self.steps, self.schedule = steps, steps.step.schedule
        self.messages: list[int] = []
        self.made = NO_OP
        """The last computation that a message so far waits for."""
        self.last_of: dict[int, int] = {}
        """The last message of each communicator."""
        self.held_by: dict[int, int] = {}
        """Of each communicator, the last message that another waits for."""

    def all_made(self, made_by: Mapping[int, int]) -> None:
        while len(self.messages) < len(self.schedule.communicators) and len(self.messages) in made_by:
            self._send(len(self.messages), made_by[len(self.messages)])

    def _send(self, index: int, made_by: int) -> None:
        graph, step = self.steps.graph, self.steps.step
        communicator, after = self.schedule.communicators[index], [made_by]
        if self.steps.several:
            before = self.last_of.get(communicator)
            self.made = max(self.made, made_by)
            if before is None or before != self.messages[-1]:
                after = [self.made, *self.held_by.values()]
            if before is not None:
                self.held_by[communicator] = before
        own, work, behind = self.steps.message_times[index]
        message = graph.add(
            (("communicator", communicator),), own, after=after, work_s=work, behind_s=behind, links=self.steps.link,
            transport=step.transport, label=("bucket {}", index), cause="all-reduce",
            bytes=float(self.schedule.sizes[index]),
        )  # fmt: skip
        self.last_of[communicator] = message
        self.messages.append(message)


def _op_times(times: MessageTimes) -> list[tuple[float, float, float | None]]:
    """Latency, work, and latency right behind another: the same on networks where that was not measured."""
    return [
        (alone - work, work, None if alone == busy else busy - work)
        for alone, busy, work in zip(*_columns(times), strict=True)
    ]
