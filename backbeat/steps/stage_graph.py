"""The passes of a pipeline as a graph: each stage does what its program says (`stage_programs`).

A transfer starts when both of its ends have posted it and come to it, so that schedules differ in how many of their
sends a step waits for. An end comes to what it posted together once it is done with what it posted before in the same
queue: one for each neighbour and direction, for each neighbour, or for all (`Streams`). Where receivers have buffers, a
transfer starts when its sender comes to it; all but what is left then arrives, and the sender is done.

On one *connection* a stage tells its neighbour that it is ready to receive behind what it has to send there. Of two
that swap, one's word is already on its way: the gradient goes first, then the activation.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from backbeat.engine import Graph, GraphTimes
from backbeat.engine.graph import Label
from backbeat.model.framework import Streams
from backbeat.model.layout import PipelineSchedule
from backbeat.steps.stage_programs import Operation, Transfer, programs


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One micro-batch through a stage, a chunk of it, or a piece."""

    forward_s: float = 0.0
    input_s: float = 0.0
    """Backward until the stage before can go on."""
    weight_s: float = 0.0
    """The rest of backward."""
    causes: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Where the time of all three goes, by parts of a `Breakdown`."""

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(
            self.forward_s + other.forward_s,
            self.input_s + other.input_s,
            self.weight_s + other.weight_s,
            causes_added(self.causes, other.causes),
        )

    def times(self, count: float) -> StageTimes:
        passes = (self.forward_s * count, self.input_s * count, self.weight_s * count)
        return StageTimes(*passes, {cause: seconds * count for cause, seconds in self.causes.items()})


def causes_added(*causes: Mapping[str, float]) -> dict[str, float]:
    """What several passes put down to each cause.

    >>> causes_added({"matmul": 1.0, "tensor": 0.5}, {"matmul": 2.0})
    {'matmul': 3.0, 'tensor': 0.5}
    """
    found: dict[str, float] = {}
    for each in causes:
        for cause, seconds in each.items():
            found[cause] = found.get(cause, 0.0) + seconds
    return found


@dataclass(frozen=True, slots=True)
class StageGraph:
    graph: Graph
    ops: list[dict[Operation, int]]
    """Of each stage, in the order in which it computes."""
    last: list[tuple[int, ...]]
    """What each stage computes last, and the sends that it waits for after that."""

    def on(self, chunks: Sequence[StageTimes], send_s: float) -> Graph:
        """The same passes where chunks and sends take other times; each transfer is one op, with NICs of its own.

        >>> from backbeat.engine import run
        >>> made = stage_graph("1f1b", 2, 2, [StageTimes(1.0, 1.0, 1.0)] * 2, 0.0)
        >>> run(made.on([StageTimes(2.0, 2.0, 2.0)] * 2, 1.0)).end_s
        21.0
        """
        stages = len(self.ops)
        split = any(operation.kind == "W" for operation in self.ops[0])
        found = copy.copy(self.graph)
        found.seconds = [send_s] * len(self.graph)
        for stage, own in enumerate(self.ops):
            each = [_seconds(one, split=split) for one in chunks[stage::stages]]
            for (kind, _, chunk), op in own.items():
                found.seconds[op] = each[chunk][kind]
        return found

    def ends(self, times: GraphTimes) -> tuple[float, ...]:
        """When each stage is done."""
        return tuple(max([times.ends[op] for op in last]) for last in self.last)

    def last_backward(self, times: GraphTimes) -> tuple[float, ...]:
        """When each stage begins the backward pass of its last micro-batch, in the chunk that comes first: from then on
        gradients become complete."""
        last = max(operation.micro_batch for operation in self.ops[0])
        return tuple(
            next(times.starts[op] for operation, op in own.items() if operation[:2] == ("B", last)) for own in self.ops
        )


def stage_graph(
    schedule: PipelineSchedule,
    stages: int,
    count: int,
    chunks: Sequence[StageTimes],
    send_s: float,
    streams: Streams = "direction",
    late_s: float | None = None,
) -> StageGraph:
    """`count` micro-batches. `chunks` are in the order of layers: chunk c of stage s is c·stages + s. `late_s` is what
    is left of a send whose receiver is ready only after its buffer has taken what it can; None where nothing is sent
    before a receiver is ready.

    Two equal stages, two micro-batches, no sends:

    >>> from backbeat.engine import run
    >>> made = stage_graph("gpipe", 2, 2, [StageTimes(1.0, 1.0, 1.0)] * 2, 0.0)
    >>> made.ends(run(made.graph))
    (9.0, 7.0)
    """
    building = _StageBuilding(stages, send_s, streams, late_s)
    split = schedule == "zero-bubble" and stages > 1
    seconds = [_seconds(each, split=split) for each in chunks]
    acts = programs(schedule, stages, count, len(chunks) // stages, early=streams == "direction")
    found: list[dict[Operation, int]] = []
    last: list[tuple[int, ...]] = []
    for stage, program in enumerate(acts):
        own: dict[Operation, int] = {}
        # What the stage has waited for since it last computed, and that.
        reached: tuple[int, ...] = ()
        for verb, what in program:
            if isinstance(what, Operation):
                own[what] = building.compute(stage, what, seconds[what.chunk * stages + stage][what.kind], reached)
                reached = (own[what],)
            elif verb == "wait":
                reached += tuple(building.done[transfer, stage] for transfer in what)
            else:
                building.post(stage, what, reached)
        found.append(own)
        last.append(reached)
    return StageGraph(building.graph, found, last)


def _seconds(each: StageTimes, *, split: bool) -> dict[str, float]:
    return {"F": each.forward_s, "B": each.input_s if split else each.input_s + each.weight_s, "W": each.weight_s}


class _StageBuilding:
    def __init__(self, stages: int, send_s: float, streams: str, late_s: float | None) -> None:
        self.stages, self.streams = stages, streams
        self.late_s = None if late_s is None else min(late_s, send_s)
        self.send_s = send_s
        self.graph = Graph()
        self.nics = [(self.graph.link(), self.graph.link()) for _ in range(stages)] if streams != "direction" else []
        """Out of each stage, and into it."""
        self.queues: dict[Hashable, list[int]] = {}
        """What was posted last in each."""
        self.done: dict[tuple[Transfer, int], int] = {}
        """The op after which each end is done with a transfer."""

    def compute(self, stage: int, operation: Operation, seconds: float, after: Sequence[int]) -> int:
        kind, micro, chunk = operation
        label = ("{}{} of chunk {}, stage {}", kind, micro, chunk, stage)
        return self.graph.add((("stage", stage),), seconds, after=after, label=label, cause="compute")

    def post(self, stage: int, transfers: Sequence[Transfer], after: Sequence[int]) -> None:
        batches: dict[Hashable, list[int]] = {}
        for transfer in transfers:
            to = transfer[2] % self.stages
            origin = (to + (-1 if transfer[0] == "F" else 1)) % self.stages
            peer = origin if stage == to else to
            queue: Hashable = stage if self.streams == "rank" else (stage, peer)
            if self.streams in ("direction", "connection"):
                queue = stage, peer, stage == to
            waits = (*after, *self.queues.get(queue, ()))
            if self.streams == "connection" and stage == to:
                # Of what leaves with it, only an activation waits for a gradient.
                leaving = batches if transfer[0] == "F" else {}
                waits += (*self.queues.get((stage, peer, False), ()), *leaving.get((stage, peer, False), ()))
            done = self._end(transfer, origin, to, waits, sends=stage == origin)
            self.done[transfer, stage] = done
            batches.setdefault(queue, []).append(done)
        self.queues.update(batches)

    def _end(self, transfer: Transfer, origin: int, to: int, after: Sequence[int], *, sends: bool) -> int:
        """One end of a transfer; the op after which it is done."""
        label = ("{}{} from stage {} to stage {}", transfer[0], transfer[1], origin, to)
        if self.late_s is None:
            return self._travel(transfer, self.send_s, after, origin, to, label)
        if sends:
            sent = self._travel(None, self.send_s - self.late_s, after, origin, to, label)
            self._travel(transfer, self.late_s, (sent,), origin, to, label)
            return sent
        return self._travel(transfer, self.late_s, after, origin, to, label)

    def _travel(
        self, key: Transfer | None, seconds: float, after: Sequence[int], origin: int, to: int, label: Label
    ) -> int:
        """On the NICs that it shares with others, where it does."""
        links: tuple[int, ...] = ()
        own, work = seconds, 0.0
        if self.nics:
            links, own, work = (self.nics[origin][0], self.nics[to][1]), 0.0, seconds
        if key is None:
            return self.graph.add((), own, after=after, work_s=work, links=links, label=label, cause="send")
        return self.graph.meet(key, own, after=after, work_s=work, links=links, label=label, cause="send")
