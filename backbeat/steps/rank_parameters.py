"""Parameters that a rank of a stage holds, by unit and by module, and the buckets that their gradients travel in.

Gradients travel tensor by tensor in buckets, in the order that backward completes them. A bucket is full once its
tensors reach the cap, and no tensor is cut. So a matrix larger than the cap travels by itself, and the embedding, whose
gradient is complete when backward ends, hides behind nothing.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

from backbeat.model.architecture import Architecture, weights
from backbeat.model.layout import Layout
from backbeat.steps.schedule import capped
from backbeat.steps.stage_layers import StageLayers


class RankParameters(NamedTuple):
    """Parameters that one rank of a stage holds, before replicas shard them."""

    dense: float
    expert: float


def rank_parameters(model: Architecture, layout: Layout, *chunks: StageLayers) -> RankParameters:
    """Of a stage that holds these chunks.

    >>> from backbeat.model.architecture import BUNDLED
    >>> from backbeat.steps.stage_layers import split_layers
    >>> llama, layout = BUNDLED["llama-3-70b"], Layout(tp=4, pp=2)
    >>> held = [sum(rank_parameters(llama, layout, stage)) for stage in split_layers(llama, layout)]
    >>> round(4 * sum(held) / llama.parameters, 3)
    1.0
    """
    units = [unit for chunk in chunks for unit in _units(model, layout.tp, layout.ep, chunk)]
    return RankParameters(
        sum(count * held.dense for held, count in units), sum(count * held.expert for held, count in units)
    )


def unit_parameters(model: Architecture, layout: Layout, chunk: StageLayers) -> list[RankParameters]:
    """The same by what is sharded on its own: embedding, layers, head, in the order of forward.

    >>> tiny = Architecture(name="tiny", layers=2, hidden=8, heads=1, ffn=8, vocab=100)
    >>> [unit.dense for unit in unit_parameters(tiny, Layout(), StageLayers(2, 0, True, True))]
    [800.0, 464.0, 464.0, 800.0]
    """
    return [held for held, count in _units(model, layout.tp, layout.ep, chunk) for _ in range(count)]


@lru_cache(maxsize=1024)
def _units(model: Architecture, tp: int, ep: int, chunk: StageLayers) -> list[tuple[RankParameters, int]]:
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
    model: Architecture, tp: int, chunks: tuple[StageLayers, ...], cap: float | None
) -> tuple[GradientBucket, ...]:
    """Those of a stage that holds these chunks, without experts; no cap is one bucket.

    Of two layers each fills a bucket of 400, and so do the head, complete first, and the embedding, complete last:

    >>> tiny = Architecture(name="tiny", layers=2, hidden=8, heads=1, ffn=8, vocab=100)
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


@lru_cache(maxsize=1024)
def modules_of(model: Architecture, tp: int, chunks: tuple[StageLayers, ...]) -> tuple[GradientModule, ...]:
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
