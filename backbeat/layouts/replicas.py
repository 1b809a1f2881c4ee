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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Traffic
from backbeat.layouts.cluster import GpuCluster, LayoutCollective
from backbeat.layouts.conventions import Conventions
from backbeat.layouts.layout import Layout
from backbeat.layouts.stage_times import Added, StageLayers, StageTimes
from backbeat.layouts.transformer import Transformer, weights
from backbeat.model.reduction import Reduction
from backbeat.simulate.contention import least_s
from backbeat.simulate.schedule import capped

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
    >>> from backbeat.layouts.stage_times import split_layers
    >>> llama, layout = transformer("llama-3-70b"), Layout(tp=4, pp=2)
    >>> held = [sum(rank_parameters(llama, layout, stage)) for stage in split_layers(llama, layout)]
    >>> round(4 * sum(held) / llama.parameters, 3)
    1.0
    """
    tp = layout.tp
    both = sum(each.held(tp) for each in model.attention) + model.norms * model.norm_parameters
    each_dense = both + model.mlp_parameters(model.ffn) / tp
    each_sparse = both + (model.router.parameters + model.mlp_parameters(model.shared_ffn) / tp)
    dense = expert = 0.0
    for chunk in chunks:
        held = chunk.dense * each_dense + chunk.sparse * each_sparse
        if chunk.first:
            held += model.embedding_parameters / tp
        if chunk.last and not (model.tied and chunk.first):
            # A tied head on a stage of its own is a copy of the embedding there.
            held += model.head.parameters / tp
        dense += held
        expert += chunk.sparse * model.expert_parameters / layout.ep
    return RankParameters(dense, expert)


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


def overlapped_with_backward(
    buckets: Sequence[GradientBucket], backward_s: float, travel_s: Mapping[float, float], slowdown: float
) -> Added:
    """What buckets add to the backward pass they overlap with; `travel_s` is by their elements.

    They travel one after the other, each once it is complete. Computation beside them takes `slowdown` times as long.

    >>> halves = equal_buckets(2.0, 1.0)
    >>> overlapped_with_backward(halves, 4.0, {1.0: 1.0}, 1.0), overlapped_with_backward(halves, 4.0, {1.0: 3.0}, 1.0)
    (Added(exposed_s=1.0, slower_s=0.0), Added(exposed_s=4.0, slower_s=0.0))
    """
    alone, beside = (_finished(buckets, backward_s, travel_s, factor) for factor in (1.0, slowdown))
    return Added(alone - backward_s, beside - alone)


def _finished(
    buckets: Sequence[GradientBucket], backward_s: float, travel_s: Mapping[float, float], slowdown: float
) -> float:
    now = in_flight = done = 0.0
    for bucket in (*buckets, GradientBucket(0.0, 1.0)):
        computing = (bucket.ready - done) * backward_s
        # While messages are in flight computation is slower; what is left of it afterwards is not.
        passed = least_s(computing, min(in_flight, computing * slowdown), slowdown)
        now, done = now + passed, bucket.ready
        in_flight = max(0.0, in_flight - passed) + (travel_s[bucket.elements] if bucket.elements else 0.0)
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
    cluster: GpuCluster
    operators: OperatorModel
    conventions: Conventions

    @property
    def reduction(self) -> Reduction:
        return self.conventions.reduction(self.layout.zero)

    def sharded_passes(self, times: StageTimes, stage: StageLayers) -> StageTimes:
        """A stage's passes where each micro-batch gathers parameters (ZeRO 3) and scatters gradients (ZeRO 2 and 3).
        What a layer exchanges overlaps with the layer before it."""
        zero = self.layout.zero
        if zero < 2 or stage.layers == 0:
            return times
        held = rank_parameters(self.model, self.layout, stage)
        gather = self._layerwise("all_gather", held, 2, stage.layers) if zero == 3 else 0.0
        scatter = self._layerwise("reduce_scatter", held, self.conventions.reduced_bytes(zero), stage.layers)
        slowdown = self._slowdown(times)
        forward = Added.overlapped(times.forward_s, gather, slowdown).plus(gather / stage.layers)
        backward = Added.overlapped(times.backward_s, gather + scatter, slowdown).plus(scatter / stage.layers)
        contention = times.parts.contention + (forward.slower_s + backward.slower_s)
        return replace(
            times,
            forward_s=times.forward_s + forward.total_s,
            input_s=times.input_s + backward.total_s,
            parts=times.parts._replace(contention=contention),
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
        if zero in (1, 2) and self.reduction.gather_dtype is not None:
            gather = self._gather(chunks, held, passes.forward_s, slowdown)
        return ReplicaTimes(reduce.plus(self._tied(chunks)), self.update_s(held), gather)

    def _buckets(
        self, chunks: Sequence[StageLayers], expert: float, cap: int | None
    ) -> list[tuple[tuple[int, int], tuple[GradientBucket, ...]]]:
        """Groups of ranks, and what travels in each."""
        found = []
        for group, dense in ((self.layout.dense_group, True), (self.layout.expert_group, False)):
            most = None if cap is None else max(cap, self.reduction.bucket_elements_per_worker * group[0])
            made = (
                dense_buckets(self.model, self.layout.tp, tuple(chunks), most) if dense else equal_buckets(expert, most)
            )
            if group[0] > 1 and made:
                found.append((group, made))
        return found

    def _reduce(self, chunks: Sequence[StageLayers], expert: float, window_s: float, slowdown: float) -> Added:
        found = Added()
        kind, width = self.reduction.collective, self.conventions.reduced_bytes(self.layout.zero)
        cap = self.reduction.bucket_elements
        if cap is None and self.reduction.bucket_bytes:
            cap = self.reduction.bucket_bytes[-1] // 2
        for group, buckets in self._buckets(chunks, expert, cap):
            sizes = {bucket.elements for bucket in buckets}
            travel_s = {size: self.cluster.collective_s(kind, width * size, *group) for size in sizes}
            if self.reduction.overlap == "none":
                found = found.plus(sum(travel_s[bucket.elements] for bucket in buckets))
            else:
                found = found.plus(*overlapped_with_backward(buckets, window_s, travel_s, slowdown))
        return found

    def _tied(self, chunks: Sequence[StageLayers]) -> float:
        """The first and the last stage add up the gradients of an embedding that is the head as well."""
        ends = [chunk for chunk in chunks if chunk.first or chunk.last]
        if not self.model.tied or self.layout.pp == 1 or not ends or (ends[0].first and ends[-1].last):
            return 0.0
        size = self.conventions.reduced_bytes(self.layout.zero) * self.model.head.parameters / self.layout.tp
        # Of two ranks each sends as much as it has: one half to add up, the other half added up.
        return self.cluster.send_s(size, 2, self.layout.stage_gpus * (self.layout.pp - 1))

    def _gather(self, chunks: Sequence[StageLayers], held: RankParameters, forward_s: float, slowdown: float) -> Added:
        total = first = 0.0
        for group, buckets in self._buckets(chunks, held.expert, self.reduction.gather_elements):
            each = [self.cluster.collective_s("all_gather", 2 * one.elements, *group) for one in buckets]
            total, first = total + sum(each), max(first, each[-1])
        if self.conventions.copies_slices:
            total += self._slices_s(chunks, held.dense)
        if not self.reduction.gather_overlap:
            return Added(total)
        # Forward starts with the first bucket, backward's last; the others travel beside it.
        return Added.overlapped(forward_s, total - first, slowdown).plus(first)

    def _slices_s(self, chunks: Sequence[StageLayers], dense: float) -> float:
        """Launches of one copy for each tensor and replica, and three copies of all parameters."""
        replicas, _ = self.layout.dense_group
        launches = replicas * sum(len(each.tensors) for each in modules_of(self.model, self.layout.tp, tuple(chunks)))
        copied = self.operators.seconds(Traffic("pointwise", 3 * 2 * 2 * dense, 2))
        return 2 * self.operators.host.view_s * launches + copied if replicas > 1 else 0.0

    def _layerwise(self, kind: LayoutCollective, held: RankParameters, width: int, layers: int) -> float:
        """All layers of a stage, each in a collective of its own."""
        groups = (self.layout.dense_group, self.layout.expert_group)
        return sum(
            layers * self.cluster.collective_s(kind, elements * width / layers, *group)
            for elements, group in zip(held, groups, strict=True)
        )

    def update_s(self, held: RankParameters) -> float:
        dense, expert = held
        if self.layout.zero:
            dense, expert = dense / self.layout.dense_group[0], expert / self.layout.expert_group[0]
        kept = Traffic("pointwise", self.conventions.kept_bytes * sum(held), 4)
        updated = Traffic("update/fused/adam", _UPDATE_BYTES * (dense + expert))
        return self.operators.seconds(updated) + (self.operators.seconds(kept) if kept.bytes else 0.0)
