"""A step of data parallelism with buckets as a graph: computation, the messages it makes ready, the update.

| lane | its ops, in the order of issue |
|---|---|
| compute | forward, backward from one bucket's last gradient to the next one's, compression, the update |
| communicator 0, 1, … | gathers of parameters before forward, then buckets |
| launch | buckets on several communicators leave in plan order: one no earlier than the one before it |

Backward is cut where a bucket becomes ready. On one communicator the messages are a recursion,
F_k = max(R_k, F_(k-1)) + T(M_k); on several they share the link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from backbeat.cost import LinkCost, MessageTimes
from backbeat.engine import Graph, GraphTimes, SharedLink
from backbeat.model.reduction import Overlap
from backbeat.simulate.schedule import Flow, Schedule

COMPUTE = ("compute",)
_LAUNCH = ("launch",)


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
    link: SharedLink = field(default_factory=SharedLink)
    transport: str = "network"
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    """Of computation beside messages, by transport."""
    compress_s: Sequence[float] | None = None
    """Compressing each bucket, on the compute stream, once it is ready."""
    micro_batches: int = 1
    overlap: Overlap = "last"
    """Which backward passes messages overlap with."""
    before_s: float = 0.0
    """What is sent before forward, such as module buffers."""
    gathers: Sequence[tuple[float, float]] = ()
    """Parameters gathered for the first forward: what each message takes, and the forward that needs it."""
    gathers_ahead: bool = False
    """Each is sent while forward works on the one before it; otherwise forward waits for all."""


@dataclass(frozen=True, slots=True)
class BucketGraph:
    """The graph, and where to find ops in it."""

    graph: Graph
    forward: int
    """The last op before the backward that messages overlap with last."""
    backward: int
    """The last op of that backward, compression included."""
    messages: list[int]
    """Of each bucket, in launch order, beside that backward."""
    update: int
    """The last op of the step."""

    def flow(self, times: GraphTimes) -> Flow:
        """When those buckets travel, after that backward begins."""
        begun = times.ends[self.forward]
        starts, on_link, ends = (
            np.array([column[number] - begun for number in self.messages])
            for column in (times.starts, times.on_link, times.ends)
        )
        return Flow(starts, on_link, ends)

    def backward_s(self, times: GraphTimes) -> float:
        return times.ends[self.backward] - times.ends[self.forward]

    def on(self, message_times: MessageTimes) -> Graph:
        """The same step where messages take other times, as on a quieter network."""
        return self.graph.retimed(dict(zip(self.messages, _op_times(message_times), strict=True)))


def link_of(cost: LinkCost) -> SharedLink:
    """How messages of this cost share their link.

    >>> from backbeat.cost import Curve
    >>> link_of(LinkCost(Curve.affine(1e-3, 1e-9), None, {2: 0.8})).efficiency(2)
    0.8
    """
    return SharedLink(cost.efficiency if cost.efficiencies else None, cost.stretch if cost.stretches else None)


def bucket_graph(step: BucketStep) -> BucketGraph:
    """One step.

    Two buckets of 1 MB, ready 0 and 1 ms into a backward of 3 ms, each 1 ms + 1 ns/byte, on one communicator:

    >>> from backbeat.cost import Curve
    >>> from backbeat.engine import run
    >>> cost = LinkCost(Curve.affine(1e-3, 1e-9))
    >>> two = Schedule(np.array([0.0, 1e-3]), np.array([1e6, 1e6]), [0, 0])
    >>> made = bucket_graph(BucketStep(
    ...     schedule=two, times=cost.times(two.sizes), link=link_of(cost), forward_s=1e-3, backward_s=3e-3,
    ...     update_s=1e-3))
    >>> times = run(made.graph)
    >>> made.flow(times).finishes.round(6).tolist(), round(times.end_s, 6)
    ([0.002, 0.004], 0.006)
    """
    return BucketSteps(step).add()


class BucketSteps:
    """A graph to which one step after the other is added."""

    def __init__(self, step: BucketStep) -> None:
        self.step, self.graph = step, Graph()
        self.link = (self.graph.link(step.link),)
        self.kind = self.graph.kind(step.slowdowns)
        self.message_times = _op_times(step.times)
        self.several = len({*step.schedule.communicators}) > 1

    def add(self) -> BucketGraph:
        step = self.step
        overlapping = step.micro_batches if step.overlap == "every" else 1
        forward = self._first_forward()
        messages: list[int] = []
        for number in range(step.micro_batches):
            if number:
                forward = self._compute(step.forward_s, "forward", messages)
            if number < step.micro_batches - overlapping:
                self._compute(step.backward_s, "backward")
            else:
                backward, messages = self._backward(forward)
        update = self.graph.add(COMPUTE, step.update_s, after=messages, label="update", cause="update")
        return BucketGraph(self.graph, forward, backward, messages, update)

    def _compute(self, seconds: float, label: str, after: Sequence[int] = ()) -> int:
        return self.graph.add(COMPUTE, seconds, after=after, kind=self.kind, label=label, cause=label)

    def _first_forward(self) -> int:
        """With what is sent before it."""
        step, lane = self.step, ("communicator", 0)
        if step.before_s:
            sent = self.graph.add((lane,), step.before_s, label="buffers", cause="buffers")
            self.graph.add(COMPUTE, 0.0, after=(sent,))
        if not step.gathers:
            return self._compute(step.forward_s, "forward")
        gathers: list[int] = []
        forward = self._compute(0.0, "forward")
        for index, (seconds, _) in enumerate(step.gathers):
            if step.gathers_ahead and index > 1:
                forward = self._compute(step.gathers[index - 2][1], "forward", gathers[-2:-1])
            gathers.append(
                self.graph.add(
                    (lane,), seconds, after=(forward,), transport=step.transport, cause="all-gather",
                    label=f"all-gather {index + 1} of {len(step.gathers)}",
                )
            )  # fmt: skip
        if not step.gathers_ahead:
            return self._compute(step.forward_s, "forward", gathers[-1:])
        for index, (_, seconds) in list(enumerate(step.gathers))[-2:]:
            forward = self._compute(seconds, "forward", gathers[index : index + 1])
        return forward

    def _backward(self, forward: int) -> tuple[int, list[int]]:
        """Its last op, and the messages."""
        step, graph = self.step, self.graph
        ready, compress_s = step.schedule.ready.tolist(), step.compress_s
        made_by: dict[int, int] = {}
        done, last = 0.0, forward
        for index in sorted(range(len(ready)), key=ready.__getitem__):
            if ready[index] > done and step.overlap != "none":
                last = self._compute(ready[index] - done, "backward")
                done = ready[index]
            if compress_s is not None and compress_s[index]:
                last = self._compute(compress_s[index], "compression")
            made_by[index] = last
        if step.backward_s > done:
            last = self._compute(step.backward_s - done, "backward")
        messages: list[int] = []
        launched: int | None = None
        last_of: dict[int, int] = {}
        for index, communicator in enumerate(step.schedule.communicators):
            after = [last if step.overlap == "none" else made_by[index]]
            before = last_of.get(communicator)
            if self.several:
                held = [*after] if before is None else [*after, before]
                if launched is not None and before != messages[-1]:
                    after.append(launched)
                launched = graph.add(_LAUNCH, 0.0, after=held)
            own, work, behind = self.message_times[index]
            message = graph.add(
                (("communicator", communicator),), own, after=after, work_s=work, behind_s=behind, links=self.link,
                transport=step.transport, label=("bucket {}", index), cause="all-reduce",
                bytes=float(step.schedule.sizes[index]),
            )  # fmt: skip
            last_of[communicator] = message
            messages.append(message)
        return last, messages


def _op_times(times: MessageTimes) -> list[tuple[float, float, float | None]]:
    """Latency, work, and latency right behind another: the same on networks where that was not measured."""
    return [
        (alone - work, work, None if alone == busy else busy - work)
        for alone, busy, work in zip(*(column.tolist() for column in times), strict=True)
    ]
