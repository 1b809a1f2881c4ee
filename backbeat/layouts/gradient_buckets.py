"""The gradients of a stage as they travel: tensor by tensor into buckets, in the order that backward completes them.

A bucket is full once its tensors reach the cap, and no tensor is cut. So a matrix larger than the cap travels by
itself, and the embedding, whose gradient is complete when backward ends, hides behind nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from backbeat.layouts.stage_times import Added, StageLayers
from backbeat.layouts.transformer import Transformer, weights


class GradientBucket(NamedTuple):
    """Gradients that travel together."""

    elements: float
    ready: float
    """The share of backward that is done when they are complete."""


class _Module(NamedTuple):
    """A layer, the head or the embedding."""

    tensors: tuple[float, ...]
    """Elements of each that one rank holds."""
    weight: float
    """Elements that a token is multiplied by: how long its backward takes beside the others'."""


def dense_tensors(model: Transformer, tp: int, chunks: Sequence[StageLayers]) -> int:
    """How many a rank of a stage holds, without experts."""
    return sum(len(module.tensors) for module in _modules(model, tp, tuple(chunks)))


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
    modules = _modules(model, tp, chunks)
    whole = sum(module.weight for module in modules) or 1.0
    found: list[GradientBucket] = []
    held = done = 0.0
    for module in modules:
        done += module.weight
        for tensor in module.tensors:
            held += tensor
            if cap is not None and held >= cap:
                found.append(GradientBucket(held, done / whole))
                held = 0.0
    return (*found, GradientBucket(held, 1.0)) if held else tuple(found)


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
        passed = computing + min(in_flight, computing * slowdown) * (1 - 1 / slowdown)
        now, done = now + passed, bucket.ready
        in_flight = max(0.0, in_flight - passed) + (travel_s[bucket.elements] if bucket.elements else 0.0)
    return now + in_flight


@lru_cache(maxsize=1024)
def _modules(model: Transformer, tp: int, chunks: tuple[StageLayers, ...]) -> tuple[_Module, ...]:
    """In the order of backward."""
    attention = [each.held(tp) for each in model.attention]
    norm = float(model.norm_parameters)
    dense, shared = ([each.parameters / tp for each in model.mlp(inner)] for inner in (model.ffn, model.shared_ffn))
    router = float(model.router.parameters)
    taken = model.experts_per_token * weights(model.mlp(model.expert_ffn)) / tp
    each_dense = _Module((*dense[::-1], norm, *attention[::-1], norm), sum(attention) + sum(dense))
    sparse = (*(shared[::-1] if model.shared_ffn else ()), router, norm, *attention[::-1], norm)
    each_sparse = _Module(sparse, sum(attention) + sum(shared) + router + taken)
    head = model.head.parameters / tp
    found: list[_Module] = []
    for chunk in reversed(chunks):
        if chunk.last:
            # A tied head is the embedding, where a stage has both.
            found.append(_Module((norm,) if model.tied and chunk.first else (head, norm), head))
        found += [each_sparse] * chunk.sparse + [each_dense] * chunk.dense
        if chunk.first:
            found.append(_Module((model.embedding_parameters / tp,), 0.0))
    return tuple(found)
