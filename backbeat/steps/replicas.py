"""What data parallelism adds to a step: gradients reduced, parameters updated and gathered, by ZeRO stage and overlap.

Replicas of a dense parameter are dp · cp ranks, tp apart. Those of an expert are the tp · cp · dp ranks of a stage over
ep, ep apart. Without sharded gradients (ZeRO 0 and 1) a stage's last backward, and the first forward of the next step,
are a step with buckets as of any data parallelism (`steps/bucket_graph.py`): with accumulation only the last
micro-batch's backward can hide a reduction. With ZeRO 2 and 3 every micro-batch gathers and scatters (`unit_passes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from backbeat.cost import MessageTimes
from backbeat.cost.collectives import Collective
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Traffic
from backbeat.engine import run
from backbeat.engine.graph import check_size
from backbeat.model.architecture import Architecture
from backbeat.model.cluster import Cluster
from backbeat.model.framework import Framework
from backbeat.model.layout import Layout
from backbeat.steps.bucket_graph import BucketStep, bucket_graph
from backbeat.steps.host import COMPUTE
from backbeat.steps.rank_parameters import (
    GradientBucket,
    RankParameters,
    dense_buckets,
    equal_buckets,
    rank_modules,
    rank_parameters,
    unit_parameters,
)
from backbeat.steps.schedule import Schedule
from backbeat.steps.stage_graph import StageTimes
from backbeat.steps.stage_layers import StageLayers
from backbeat.steps.unit_passes import UnitPasses, UnitRunner, UnitTraffic

_UPDATE_BYTES = 34
"""Moved for each parameter that Adam updates: its gradient (read for the norm as well), master copy and two moments in
fp32, and the copy that is computed with."""


class PassDelay(NamedTuple):
    """What communication adds to a pass."""

    seconds: float = 0.0
    slower_s: float = 0.0
    """Of it, computation that takes longer beside it."""


MOST_MESSAGES = 10_000
"""Of experts' gradients of 671 billion parameters there are more: joined to so many, each is complete a ten-thousandth
of backward later."""


class GradientMessage(NamedTuple):
    """A bucket on its way."""

    travel_s: float
    ready: float
    """The share of backward that is done when it is complete."""
    bytes: float


@dataclass(frozen=True, slots=True)
class StageEnds:
    """The first forward and the last backward of a stage, beside which buckets travel."""

    forward_s: float
    backward_s: float
    slowdown: float = 1.0
    """Of computation beside them."""
    simulated: bool = True
    """Otherwise as a recursion, without slowing anything down."""

    def reduced(self, messages: Sequence[GradientMessage], *, overlaps: bool = True) -> PassDelay:
        """What buckets add to backward. They travel one after the other, each once it is complete.

        >>> fast, slow = ([GradientMessage(each, 0.5, 1), GradientMessage(each, 1.0, 1)] for each in (1.0, 3.0))
        >>> StageEnds(1.0, 4.0).reduced(fast), StageEnds(1.0, 4.0).reduced(slow)
        (PassDelay(seconds=1.0, slower_s=0.0), PassDelay(seconds=4.0, slower_s=0.0))
        """
        if not messages:
            return PassDelay()
        if not overlaps:
            return PassDelay(sum(each.travel_s for each in messages))
        if not self.simulated:
            done_s = 0.0
            for each in messages:
                done_s = max(done_s, each.ready * self.backward_s) + each.travel_s
            return PassDelay(max(done_s - self.backward_s, 0.0))
        joined = [
            GradientMessage(sum(one.travel_s for one in each), each[-1].ready, sum(one.bytes for one in each))
            for each in _neighbours(messages)
        ]
        seconds, ready, sizes = (np.array(column) for column in zip(*joined, strict=True))
        return self._run(BucketStep(
            schedule=Schedule(ready * self.backward_s, sizes, [0] * len(joined)),
            times=MessageTimes(seconds, seconds, np.zeros(len(joined))),
            forward_s=0.0, backward_s=self.backward_s, update_s=0.0, slowdowns={"network": self.slowdown},
        ))  # fmt: skip

    def gathered(self, gathers: Sequence[tuple[float, float]], *, ahead: bool, copies_s: float = 0.0) -> PassDelay:
        """What gathers of parameters add to forward: each takes so long, and is needed by such a share of forward.

        >>> StageEnds(2.0, 4.0).gathered([(1.0, 0.5), (1.5, 0.5)], ahead=True)
        PassDelay(seconds=1.5, slower_s=0.0)
        """
        if not gathers:
            return PassDelay()
        if not ahead:
            return PassDelay(copies_s + sum(seconds for seconds, _ in gathers))
        if not self.simulated:
            first, rest = gathers[0][0], sum(seconds for seconds, _ in gathers[1:])
            return PassDelay(copies_s + first + max(0.0, rest - self.forward_s))
        nothing = np.zeros(0)
        joined = [(sum(one for one, _ in each), sum(share for _, share in each)) for each in _neighbours(gathers)]
        found = self._run(BucketStep(
            schedule=Schedule(nothing, nothing, []), times=MessageTimes(nothing, nothing, nothing),
            forward_s=self.forward_s, backward_s=0.0, update_s=0.0, slowdowns={"network": self.slowdown},
            gathers=[(seconds, share * self.forward_s) for seconds, share in joined], gathers_ahead=True,
        ))  # fmt: skip
        return found._replace(seconds=found.seconds + copies_s)

    def _run(self, step: BucketStep) -> PassDelay:
        graph = bucket_graph(step).graph
        check_size(graph)
        times = run(graph)
        computing = [op for op, lanes in enumerate(graph.lanes) if lanes == COMPUTE]
        own = sum(graph.seconds[op] for op in computing)
        slower_s = sum(times.ends[op] - times.starts[op] for op in computing) - own
        delay_s = max(times.end_s - own, 0.0)
        return PassDelay(delay_s, min(max(slower_s, 0.0), delay_s) if self.slowdown > 1 else 0.0)


_Sent = TypeVar("_Sent")


def _neighbours(sent: Sequence[_Sent]) -> list[Sequence[_Sent]]:
    """What travels one by one, or, where that is too much to simulate, in the same number of neighbours each."""
    each = -(-len(sent) // MOST_MESSAGES)
    return [sent[first : first + each] for first in range(0, len(sent), each)]


class ReplicaTimes(NamedTuple):
    """What data parallelism adds to a stage's own passes: gradients reduced, parameters updated and gathered."""

    reduce: PassDelay
    update_s: float
    gather: PassDelay


@dataclass(frozen=True)
class ReplicaTimer:
    """Times what replicas exchange and update, for one model, layout and cluster."""

    model: Architecture
    layout: Layout
    cluster: Cluster
    operators: OperatorModel
    framework: Framework

    @property
    def reduction(self) -> Framework:
        return self.framework.staged(self.layout.zero)

    def unit_passes(self, pieces: Sequence[tuple[StageTimes, int]], stage: StageLayers) -> UnitPasses:
        """A chunk's passes, from what it runs, where each micro-batch gathers parameters or scatters gradients."""
        layout, zero = self.layout, self.layout.zero
        times = sum((each.times(count) for each, count in pieces), StageTimes())
        groups = (layout.dense_group, layout.expert_group)
        if zero < 2 or not pieces or all(workers == 1 for workers, _ in groups):
            return UnitPasses(times)
        width = self.reduction.reduced_bytes
        known: dict[RankParameters, UnitTraffic] = {}
        units = unit_parameters(self.model, layout, stage)
        for unit in dict.fromkeys(units):
            gather_s, scatter_s = self._unit_s("all_gather", unit, 2), self._unit_s("reduce_scatter", unit, width)
            known[unit] = UnitTraffic(sum(unit), gather_s, scatter_s)
        runner = UnitRunner(
            pieces=[one for one, count in pieces for _ in range(count)],
            traffic=[known[unit] for unit in units],
            zero=zero,
            shards=layout.dense_group[0],
            reduce_bytes=width,
            accelerator=self.cluster.accelerator,
            slowdown=self.slowdown(times),
            has_head=stage.last,
            splits=layout.schedule == "zero-bubble" and layout.pp > 1,
            piped=layout.pp > 1,
        )
        return runner.passes()

    def slowdown(self, times: StageTimes) -> float:
        """How many times as long a stage's passes take beside collectives of its replicas."""
        whole = times.total_s or 1.0
        names = ("matmul", "recompute", "attention", "memory")
        matmul, again, attention, memory = (times.causes.get(name, 0.0) / whole for name in names)
        group = self.layout.dense_group
        return self.cluster.slowdown(*group, matmul=matmul + again, attention=attention, memory=memory)

    def after(
        self, chunks: Sequence[StageLayers], window_s: float, passes: StageTimes, *, simulated: bool = True
    ) -> ReplicaTimes:
        """The times for a stage that holds these chunks. Its gradients become complete during its last `window_s`."""
        zero, reduction = self.layout.zero, self.reduction
        held = rank_parameters(self.model, self.layout, *chunks)
        reduce = gather = PassDelay()
        ends = StageEnds(passes.forward_s, window_s, self.slowdown(passes), simulated)
        if zero < 2:
            found = [
                ends.reduced(messages, overlaps=reduction.overlapped != "none")
                for messages in self._messages(chunks, held.expert)
            ]
            # Without overlap all wait for all; otherwise links do not wait for each other.
            if reduction.overlapped == "none":
                reduce = PassDelay(sum(each.seconds for each in found))
            else:
                reduce = max(found, key=lambda each: each.seconds, default=reduce)
        if zero == 1:
            copies_s = self._slices_s(chunks, held.dense) if self.framework.copies_slices else 0.0
            gathers = self._gathers(chunks, held.expert)
            gather = ends.gathered(gathers, ahead=reduction.hides_gathers, copies_s=copies_s)
        return ReplicaTimes(reduce._replace(seconds=reduce.seconds + self._tied(chunks)), self.update_s(held), gather)

    def _buckets(
        self, chunks: Sequence[StageLayers], expert: float, cap: int | None
    ) -> list[tuple[tuple[int, int], tuple[GradientBucket, ...]]]:
        """Groups of ranks, and what travels in each."""
        found = []
        for group, dense in ((self.layout.dense_group, True), (self.layout.expert_group, False)):
            most = None if cap is None else self.reduction.cap(cap, group[0])
            made = (
                dense_buckets(self.model, self.layout.tp, tuple(chunks), most) if dense else equal_buckets(expert, most)
            )
            if group[0] > 1 and made:
                found.append((group, made))
        return found

    def _messages(self, chunks: Sequence[StageLayers], expert: float) -> list[list[GradientMessage]]:
        """Gradients of experts and all others travel in groups of their own. Groups that cross the same link take turns
        on it, in the order in which buckets are complete; beside each other they share one backward pass."""
        kind, width = self.reduction.collective, self.reduction.reduced_bytes
        by_link: defaultdict[bool, list[GradientMessage]] = defaultdict(list)
        for group, buckets in self._buckets(chunks, expert, self.reduction.layout_cap):
            travel_s = self._travel_s(kind, width, group, buckets)
            by_link[self.cluster.inside(*group)] += [
                GradientMessage(travel_s[each.elements], each.ready, width * each.elements) for each in buckets
            ]
        return [sorted(messages, key=lambda each: each.ready) for messages in by_link.values()]

    def _travel_s(
        self, kind: Collective, width: int, group: tuple[int, int], buckets: Sequence[GradientBucket]
    ) -> dict[float, float]:
        """By elements: most buckets are alike."""
        return {size: self._sent_s(kind, width * size, *group) for size in {one.elements for one in buckets}}

    def _sent_s(self, kind: Collective, size: float, replicas: int, stride: int) -> float:
        """Where groups of replicas shard, each scatters and gathers by itself, and shards are added up between them."""
        shards = self.layout.shards(replicas)
        if kind == "all_reduce" or shards in (1, replicas):
            return self.cluster.collective_s(kind, size, replicas, stride)
        seconds = self.cluster.collective_s(kind, size, shards, stride)
        if kind == "reduce_scatter":
            seconds += self.cluster.collective_s("all_reduce", size / shards, replicas // shards, stride * shards)
        return seconds

    def _tied(self, chunks: Sequence[StageLayers]) -> float:
        """The first and the last stage add up the gradients of an embedding that is the head as well."""
        ends = [chunk for chunk in chunks if chunk.first or chunk.last]
        if not self.model.tied or self.layout.pp == 1 or not ends or (ends[0].first and ends[-1].last):
            return 0.0
        size = self.reduction.reduced_bytes * self.model.head.parameters / self.layout.tp
        # Of two ranks each sends as much as it has: one half to add up, the other half added up.
        return self.cluster.send_s(size, 2, self.layout.stage_stride * (self.layout.pp - 1))

    def _gathers(self, chunks: Sequence[StageLayers], expert: float) -> list[tuple[float, float]]:
        """Parameters of each bucket, in the order of forward: what they take, and the share of forward that needs them
        next. Forward begins with the bucket that backward ends with."""
        found = []
        for group, buckets in self._buckets(chunks, expert, self.reduction.gather_elements):
            travel_s = self._travel_s("all_gather", 2, group, buckets)
            found += [(1 - one.ready, travel_s[one.elements]) for one in reversed(buckets)]
        found.sort(key=lambda each: each[0])
        begins = [0.0, *(begin for begin, _ in found[1:])]
        ends = [*begins[1:], 1.0]
        return [(seconds, end - begin) for (_, seconds), begin, end in zip(found, begins, ends, strict=False)]

    def _slices_s(self, chunks: Sequence[StageLayers], dense: float) -> float:
        """Launches of one copy for each tensor and replica, and three copies of all parameters."""
        replicas, _ = self.layout.dense_group
        launches = replicas * sum(
            len(each.tensors) for each in rank_modules(self.model, self.layout.tp, 1, tuple(chunks))
        )
        copied = self.operators.seconds(Traffic("pointwise", 3 * 2 * 2 * dense, 2))
        return 2 * self.operators.host.view_s * launches + copied if replicas > 1 else 0.0

    def _unit_s(self, kind: Collective, unit: RankParameters, width: int) -> float:
        groups = (self.layout.dense_group, self.layout.expert_group)
        return sum(
            self.cluster.collective_s(kind, elements * width, *group)
            for elements, group in zip(unit, groups, strict=True)
        )

    def update_s(self, held: RankParameters) -> float:
        dense, expert = held
        shards = self.layout.shards
        dense, expert = dense / shards(self.layout.dense_group[0]), expert / shards(self.layout.expert_group[0])
        kept = Traffic("pointwise", self.framework.kept_bytes * sum(held), 4)
        updated = Traffic("update/fused/adam", _UPDATE_BYTES * (dense + expert))
        return self.operators.seconds(updated) + (self.operators.seconds(kept) if kept.bytes else 0.0)
