"""What data parallelism adds to a step: gradients reduced, parameters updated and gathered, by ZeRO stage and overlap.

Replicas of a dense parameter are dp · cp ranks, tp apart. Those of an expert are the tp · cp · dp ranks of a stage over
ep, ep apart. With accumulation only the last micro-batch's backward can hide a reduction. With sharded gradients (ZeRO
2 and 3) each micro-batch reduces its own. Computation takes longer beside either.

Gradients travel tensor by tensor in buckets, in the order that backward completes them. A bucket is full once its
tensors reach the cap, and no tensor is cut. So a matrix larger than the cap travels by itself, and the embedding, whose
gradient is complete when backward ends, hides behind nothing.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from backbeat.cost.collectives import Collective
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Traffic
from backbeat.layouts.layout import Layout
from backbeat.layouts.sharded_stage import Added, units_added
from backbeat.layouts.stage_layers import StageLayers
from backbeat.layouts.stage_times import StageTimes
from backbeat.layouts.transformer import Transformer, weights
from backbeat.model.cluster import Cluster
from backbeat.model.framework import Framework
from backbeat.model.slowdown import least_s
from backbeat.steps.schedule import capped

_UPDATE_BYTES = 34
"""Moved for each parameter that Adam updates: its gradient (read for the norm as well), master copy and two moments in
fp32, and the copy that is computed with."""


class RankParameters(NamedTuple):
    """Parameters that one rank of a stage holds, before replicas shard them."""

    dense: float
    expert: float


def rank_parameters(model: Transformer, layout: Layout, *chunks: StageLayers) -> RankParameters:
    """Of a stage that holds these chunks.

    >>> from backbeat.layouts.architectures import transformer
    >>> from backbeat.layouts.stage_layers import split_layers
    >>> llama, layout = transformer("llama-3-70b"), Layout(tp=4, pp=2)
    >>> held = [sum(rank_parameters(llama, layout, stage)) for stage in split_layers(llama, layout)]
    >>> round(4 * sum(held) / llama.parameters, 3)
    1.0
    """
    units = [unit for chunk in chunks for unit in _units(model, layout.tp, layout.ep, chunk)]
    return RankParameters(
        sum(count * held.dense for held, count in units), sum(count * held.expert for held, count in units)
    )


def unit_parameters(model: Transformer, layout: Layout, chunk: StageLayers) -> list[RankParameters]:
    """The same by what is sharded on its own: embedding, layers, head, in the order of forward.

    >>> tiny = Transformer(name="tiny", layers=2, hidden=8, heads=1, ffn=8, vocab=100)
    >>> [unit.dense for unit in unit_parameters(tiny, Layout(), StageLayers(2, 0, True, True))]
    [800.0, 464.0, 464.0, 800.0]
    """
    return [held for held, count in _units(model, layout.tp, layout.ep, chunk) for _ in range(count)]


@lru_cache(maxsize=1024)
def _units(model: Transformer, tp: int, ep: int, chunk: StageLayers) -> list[tuple[RankParameters, int]]:
    both = sum(each.held(tp) for each in model.attention) + model.norms * model.norm_parameters
    dense = both + model.mlp_parameters(model.ffn) / tp
    sparse = both + (model.router.parameters + model.mlp_parameters(model.shared_ffn) / tp)
    # A tied head on a stage of its own is a copy of the embedding there.
    head = 0.0 if model.tied and chunk.first else model.head.parameters / tp
    return [
        (RankParameters(model.embedding_parameters / tp, 0.0), int(chunk.first)),
        (RankParameters(dense, 0.0), chunk.dense),
        (RankParameters(sparse, model.expert_parameters / ep), chunk.sparse),
        (RankParameters(head, 0.0), int(chunk.last)),
    ]


class GradientBucket(NamedTuple):
    """Gradients that travel together."""

    elements: float
    ready: float
    """The share of backward that is done when they are complete."""


class GradientModule(NamedTuple):
    """A layer, the head or the embedding."""

    tensors: tuple[float, ...]
    """Elements of each that one rank holds."""
    weight: float
    """Elements that a token is multiplied by: how long its backward takes beside the others'."""


@lru_cache(maxsize=4096)
def dense_buckets(
    model: Transformer, tp: int, chunks: tuple[StageLayers, ...], cap: float | None
) -> tuple[GradientBucket, ...]:
    """Those of a stage that holds these chunks, without experts; no cap is one bucket.

    Of two layers each fills a bucket of 400, and so do the head, complete first, and the embedding, complete last:

    >>> tiny = Transformer(name="tiny", layers=2, hidden=8, heads=1, ffn=8, vocab=100)
    >>> whole = (StageLayers(2, 0, True, True),)
    >>> [(each.elements, round(each.ready, 2)) for each in dense_buckets(tiny, 1, whole, 400)]
    [(800.0, 0.47), (464.0, 0.74), (464.0, 1.0), (808.0, 1.0)]
    """
    modules = modules_of(model, tp, chunks)
    whole = sum(module.weight for module in modules) or 1.0
    done = itertools.accumulate(module.weight for module in modules)
    ready = [(size, at / whole) for module, at in zip(modules, done, strict=True) for size in module.tensors if size]
    sizes = [size for size, _ in ready]
    ends = capped(sizes, [float("inf") if cap is None else cap])
    return tuple(
        GradientBucket(sum(sizes[first:last]), ready[last - 1][1]) for first, last in itertools.pairwise([0, *ends])
    )


def equal_buckets(elements: float, cap: float | None) -> tuple[GradientBucket, ...]:
    """The same where tensors are many and small: those of experts.

    >>> equal_buckets(10.0, 5.0)
    (GradientBucket(elements=5.0, ready=0.5), GradientBucket(elements=5.0, ready=1.0))
    """
    if not elements:
        return ()
    count = max(1, round(elements / cap)) if cap is not None else 1
    return tuple(GradientBucket(elements / count, (index + 1) / count) for index in range(count))


class GradientMessage(NamedTuple):
    """A bucket on its way."""

    travel_s: float
    ready: float


def overlapped_with_backward(messages: Sequence[GradientMessage], backward_s: float, slowdown: float) -> Added:
    """What messages add to the backward pass they overlap with.

    They travel one after the other, each once it is complete. Computation beside them takes `slowdown` times as long.

    >>> fast, slow = ([GradientMessage(each, 0.5), GradientMessage(each, 1.0)] for each in (1.0, 3.0))
    >>> overlapped_with_backward(fast, 4.0, 1.0), overlapped_with_backward(slow, 4.0, 1.0)
    (Added(exposed_s=1.0, slower_s=0.0, beside_s=0.0), Added(exposed_s=4.0, slower_s=0.0, beside_s=0.0))
    """
    alone, beside = (_finished(messages, backward_s, factor) for factor in (1.0, slowdown))
    return Added(alone - backward_s, beside - alone)


def _finished(messages: Sequence[GradientMessage], backward_s: float, slowdown: float) -> float:
    now = in_flight = done = 0.0
    for travel_s, ready in (*messages, GradientMessage(0.0, 1.0)):
        computing = (ready - done) * backward_s
        # While messages are in flight computation is slower; what is left of it afterwards is not.
        passed = least_s(computing, min(in_flight, computing * slowdown), slowdown)
        now, done = now + passed, ready
        in_flight = max(0.0, in_flight - passed) + travel_s
    return now + in_flight


@lru_cache(maxsize=1024)
def modules_of(model: Transformer, tp: int, chunks: tuple[StageLayers, ...]) -> tuple[GradientModule, ...]:
    """In the order of backward; of a stage with both kinds, layers with experts are taken to stand last."""
    attention = [each.held(tp) for each in model.attention]
    norm = float(model.norm_parameters)
    norms = (norm,) * model.norms
    dense, shared = ([each.parameters / tp for each in model.mlp(inner)] for inner in (model.ffn, model.shared_ffn))
    router = float(model.router.parameters)
    taken = model.experts_per_token * weights(model.mlp(model.expert_ffn)) / tp
    each_dense = GradientModule((*dense[::-1], *norms[1:], *attention[::-1], *norms[:1]), sum(attention) + sum(dense))
    sparse = (*(shared[::-1] if model.shared_ffn else ()), router, *norms[1:], *attention[::-1], *norms[:1])
    each_sparse = GradientModule(sparse, sum(attention) + sum(shared) + router + taken)
    head = model.head.parameters / tp
    found: list[GradientModule] = []
    for chunk in reversed(chunks):
        if chunk.last:
            # A tied head is the embedding, where a stage has both.
            found.append(GradientModule((norm,) if model.tied and chunk.first else (head, norm), head))
        found += [each_sparse] * chunk.sparse + [each_dense] * chunk.dense
        if chunk.first:
            found.append(GradientModule((model.embedding_parameters / tp,), 0.0))
    return tuple(found)


class ReplicaTimes(NamedTuple):
    """What data parallelism adds to a stage's own passes: gradients reduced, parameters updated and gathered."""

    reduce: Added
    update_s: float
    gather: Added


@dataclass(frozen=True)
class ReplicaTimer:
    """Times what replicas exchange and update, for one model, layout and cluster."""

    model: Transformer
    layout: Layout
    cluster: Cluster
    operators: OperatorModel
    conventions: Framework

    @property
    def reduction(self) -> Framework:
        return self.conventions.staged(self.layout.zero)

    def sharded_passes(self, pieces: Sequence[tuple[StageTimes, int]], stage: StageLayers) -> StageTimes:
        """A chunk's passes, from what it runs, where each micro-batch gathers parameters (ZeRO 3) and scatters
        gradients (ZeRO 2 and 3), by units. Under the zero-bubble schedule, which takes backward in two, gradients of
        inputs need the parameters, and those of weights are what is scattered."""
        times = sum((each.times(count) for each, count in pieces), StageTimes())
        zero, layout = self.layout.zero, self.layout
        if zero < 2 or not pieces:
            return times
        units = unit_parameters(self.model, layout, stage)
        gathers = [self._unit_s("all_gather", unit, 2) if zero == 3 else 0.0 for unit in units]
        scatters = [self._unit_s("reduce_scatter", unit, self.reduction.reduced_bytes) for unit in units]
        each = [one for one, count in pieces for _ in range(count)]
        slowdown, none = self._slowdown(times), [0.0] * len(units)
        forward = units_added([one.forward_s for one in each], gathers, none, slowdown)
        # Backward begins with the head, which stays gathered.
        again = [0.0 if stage.last else gathers[-1], *gathers[-2::-1]]
        each, scatters = each[::-1], scatters[::-1]
        if layout.schedule == "zero-bubble" and layout.pp > 1:
            inputs = units_added([one.input_s for one in each], again, none, slowdown)
            weights = units_added([one.weight_s for one in each], none, scatters, slowdown)
        else:
            inputs, weights = units_added([one.backward_s for one in each], again, scatters, slowdown), Added()
        contention = times.parts.contention + (forward.slower_s + inputs.slower_s + weights.slower_s)
        return StageTimes(
            times.forward_s + forward.total_s,
            times.input_s + inputs.total_s,
            times.weight_s + weights.total_s,
            times.parts._replace(contention=contention),
        )

    def _slowdown(self, times: StageTimes) -> float:
        """How many times as long a stage's passes take beside collectives of its replicas."""
        spent, whole = times.parts, times.total_s or 1.0
        return self.cluster.slowdown(
            *self.layout.dense_group,
            matmul=spent.matmul / whole + spent.recompute / whole,
            attention=spent.attention / whole,
            memory=spent.memory / whole,
        )

    def after(self, chunks: Sequence[StageLayers], window_s: float, passes: StageTimes) -> ReplicaTimes:
        """The times for a stage that holds these chunks. Its gradients become complete during its last `window_s`."""
        zero = self.layout.zero
        held = rank_parameters(self.model, self.layout, *chunks)
        reduce = gather = Added()
        slowdown = self._slowdown(passes)
        if zero < 2:
            reduce = self._reduce(chunks, held.expert, window_s, slowdown)
        if zero in (1, 2):
            gather = self._gather(chunks, held, passes.forward_s, slowdown)
        return ReplicaTimes(reduce.plus(self._tied(chunks)), self.update_s(held), gather)

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

    def _reduce(self, chunks: Sequence[StageLayers], expert: float, window_s: float, slowdown: float) -> Added:
        """Gradients of experts and all others travel in groups of their own. Groups that cross the same link take turns
        on it, in the order in which buckets are complete; beside each other they share one backward pass."""
        kind, width = self.reduction.collective, self.reduction.reduced_bytes
        by_link: defaultdict[bool, list[GradientMessage]] = defaultdict(list)
        for group, buckets in self._buckets(chunks, expert, self.reduction.layout_cap):
            travel_s = {size: self.cluster.collective_s(kind, width * size, *group) for size, _ in set(buckets)}
            by_link[self.cluster.inside(*group)] += [
                GradientMessage(travel_s[each.elements], each.ready) for each in buckets
            ]
        links = [sorted(messages, key=lambda each: each.ready) for messages in by_link.values()]
        if self.reduction.overlapped == "none":
            return Added(sum(each.travel_s for messages in links for each in messages))
        found = [overlapped_with_backward(messages, window_s, slowdown) for messages in links]
        return max(found, key=lambda each: each.total_s, default=Added())

    def _tied(self, chunks: Sequence[StageLayers]) -> float:
        """The first and the last stage add up the gradients of an embedding that is the head as well."""
        ends = [chunk for chunk in chunks if chunk.first or chunk.last]
        if not self.model.tied or self.layout.pp == 1 or not ends or (ends[0].first and ends[-1].last):
            return 0.0
        size = self.reduction.reduced_bytes * self.model.head.parameters / self.layout.tp
        # Of two ranks each sends as much as it has: one half to add up, the other half added up.
        return self.cluster.send_s(size, 2, self.layout.stage_gpus * (self.layout.pp - 1))

    def _gather(self, chunks: Sequence[StageLayers], held: RankParameters, forward_s: float, slowdown: float) -> Added:
        total = first = 0.0
        for group, buckets in self._buckets(chunks, held.expert, self.reduction.gather_elements):
            each = [self.cluster.collective_s("all_gather", 2 * one.elements, *group) for one in buckets]
            total, first = total + sum(each), max(first, each[-1])
        if self.conventions.copies_slices:
            total += self._slices_s(chunks, held.dense)
        if not self.reduction.hides_gathers:
            return Added(total)
        # Forward starts with the first bucket, backward's last; the others travel beside it.
        return Added.overlapped(forward_s, total - first, slowdown).plus(first)

    def _slices_s(self, chunks: Sequence[StageLayers], dense: float) -> float:
        """Launches of one copy for each tensor and replica, and three copies of all parameters."""
        replicas, _ = self.layout.dense_group
        launches = replicas * sum(len(each.tensors) for each in modules_of(self.model, self.layout.tp, tuple(chunks)))
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
        if self.layout.zero:
            dense, expert = dense / self.layout.dense_group[0], expert / self.layout.expert_group[0]
        kept = Traffic("pointwise", self.conventions.kept_bytes * sum(held), 4)
        updated = Traffic("update/fused/adam", _UPDATE_BYTES * (dense + expert))
        return self.operators.seconds(updated) + (self.operators.seconds(kept) if kept.bytes else 0.0)
