"""Parameters that a rank of a stage holds, by unit and by module, and the buckets that their gradients travel in.

Gradients travel tensor by tensor in buckets, in the order that backward completes them. A bucket is full once its
tensors reach the cap, and no tensor is cut. So a matrix larger than the cap travels by itself, and the embedding, whose
gradient is complete when backward ends, hides behind nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from backbeat.model.architecture import Architecture, Linear, weights
from backbeat.model.layout import Layout
from backbeat.steps.schedule import capped
from backbeat.steps.stage_layers import StageLayers


class RankParameters(NamedTuple):
    """Parameters that one rank of a stage holds, before replicas shard them."""

    dense: float
    expert: float


class RankModule(NamedTuple):
    """A layer, the head or the embedding."""

    tensors: tuple[float, ...]
    """Elements of each that one rank holds, without experts, in the order in which backward completes them."""
    expert: float
    weight: float
    """Elements that a token is multiplied by: how long its backward takes beside the others'."""

    @property
    def held(self) -> RankParameters:
        return RankParameters(sum(self.tensors), self.expert)


@lru_cache(maxsize=1024)
def rank_modules(model: Architecture, tp: int, ep: int, chunks: tuple[StageLayers, ...]) -> tuple[RankModule, ...]:
    """In the order of backward; of a stage with both kinds, layers with experts are taken to stand last.

    >>> tiny = Architecture(name="tiny", layers=2, hidden=8, heads=1, ffn=8, vocab=100)
    >>> [one.held.dense for one in rank_modules(tiny, 1, 1, (StageLayers(2, 0, True, True),))]
    [808.0, 464.0, 464.0, 800.0]
    """

    def each(linears: Iterable[Linear]) -> list[float]:
        sizes = ((one.held(tp), one.cut(tp)[1] if model.bias else 0.0) for one in linears)
        return [float(size) for both in sizes for size in both if size]

    def layer(mlp: list[float], expert: float, taken: float) -> RankModule:
        tensors = (*mlp[::-1], *norms[1:], *attention[::-1], *norms[:1])
        return RankModule(tensors, expert, sum(attention) + sum(mlp) + taken)

    attention, norm = each(model.attention), float(model.norm_parameters)
    norms, head = (norm,) * model.norms, model.head.parameters / tp
    shared = each(model.mlp(model.shared_ffn)) if model.shared_ffn else []
    taken = model.experts_per_token * weights(model.mlp(model.expert_ffn)) / tp
    dense = layer(each(model.mlp(model.ffn)), 0.0, 0.0)
    sparse = layer([float(model.router.parameters), *shared], model.expert_parameters / ep, taken)
    found: list[RankModule] = []
    for chunk in reversed(chunks):
        if chunk.last:
            # A tied head is the embedding where a stage has both; elsewhere it is a copy.
            found.append(RankModule((norm,) if model.tied and chunk.first else (head, norm), 0.0, head))
        found += [sparse] * chunk.sparse + [dense] * chunk.dense
        if chunk.first:
            found.append(RankModule((model.embedding_parameters / tp,), 0.0, 0.0))
    return tuple(found)


@lru_cache(maxsize=1024)
def rank_parameters(model: Architecture, layout: Layout, *chunks: StageLayers) -> RankParameters:
    """Of a stage that holds these chunks.

    >>> from backbeat.model.architecture import BUNDLED
    >>> from backbeat.steps.stage_layers import split_layers
    >>> llama, layout = BUNDLED["llama-3-70b"], Layout(tp=4, pp=2)
    >>> held = [sum(rank_parameters(llama, layout, stage)) for stage in split_layers(llama, layout)]
    >>> round(4 * sum(held) / llama.parameters, 3)
    1.0
    """
    held = [one.held for one in rank_modules(model, layout.tp, layout.ep, chunks)]
    return RankParameters(sum(one.dense for one in held), sum(one.expert for one in held))


def unit_parameters(model: Architecture, layout: Layout, chunk: StageLayers) -> list[RankParameters]:
    """The same by what is sharded on its own: embedding, layers, head, in the order of forward."""
    return [one.held for one in reversed(rank_modules(model, layout.tp, layout.ep, (chunk,)))]


class GradientBucket(NamedTuple):
    """Gradients that travel together."""

    elements: float
    ready: float
    """The share of backward that is done when they are complete."""


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
    modules = rank_modules(model, tp, 1, chunks)
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
