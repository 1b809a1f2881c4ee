"""A transformer under a layout as a chain of pieces: the embedding, the layers, the head.

One rank's share of each: what tensor, context and expert parallelism leave it, and the collectives between.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from msgspec import structs

from backbeat.layouts.layer_work import LayerWork, PartSeconds
from backbeat.layouts.layout_memory import LayerMemory
from backbeat.layouts.replicas import ReplicaTimer, modules_of, rank_parameters
from backbeat.layouts.stage_times import StageLayers, StageTimer
from backbeat.model.profile import ComputeShares
from backbeat.steps.model_chain import (
    ChainGradient,
    ChainPiece,
    InnerCollective,
    InnerKind,
    KeptUnder,
    ModelChain,
    Pass,
)

_POLICIES: tuple[KeptUnder, ...] = ("none", "selective", "full")
_BOTH: tuple[Pass, ...] = ("forward", "backward")


def chain_of_layers(timer: StageTimer, layers: StageLayers) -> ModelChain:
    """These layers, as `timer` says what they take; with its layout's recomputation in backward.

    >>> from backbeat.layouts import Layout
    >>> from backbeat.layouts.layout import Job
    >>> from backbeat.layouts.predict_layout import predictor_of
    >>> predictor = predictor_of("llama-3-8b", "dgx-h100", Job(global_batch=8, sequence=4096))
    >>> chain = chain_of_layers(predictor.timer(Layout(dp=8)), StageLayers(32, 0, True, True))
    >>> len(chain.pieces), round(chain.elements / 1e9, 2)
    (34, 8.03)
    """
    pieces, shares = [], PartSeconds()
    for work, name, kind in _works(timer, layers):
        forward, inputs, weights = timer.computed(work)
        again = PartSeconds()
        if kind != "end" and timer.layout.recompute == "full":
            again = forward
        elif kind != "end" and timer.layout.recompute == "selective":
            again = timer.computed(LayerWork(forward=work.core))[0]
        shares = shares.plus(forward, inputs, weights, again)
        pieces.append(
            ChainPiece(
                name,
                sum(forward),
                sum(inputs) + sum(again),
                sum(weights),
                kept_bytes={} if kind == "end" else _kept(timer, sparse=kind == "sparse"),
                expert_elements=timer.model.expert_parameters / timer.layout.ep if kind == "sparse" else 0.0,
                inner=_inner(timer, kind, name),
            )
        )
    held = modules_of(timer.model, timer.layout.tp, (layers,))
    # From the last piece to the first, as `modules_of` lists them.
    own = [module.tensors for module in reversed(held)]
    pieces = [replace(piece, elements=tensors) for piece, tensors in zip(pieces, own, strict=True)]
    done = list(accumulate(piece.backward_s for piece in reversed(pieces)))
    gradients: list[ChainGradient] = []
    for number, at in zip(reversed(range(len(pieces))), done, strict=True):
        piece = pieces[number]
        rows = [(f"{piece.name}.{tensor}", size) for tensor, size in enumerate(piece.elements) if size]
        gradients += [ChainGradient(name, size, at, number) for name, size in rows]
        if piece.expert_elements:
            gradients.append(ChainGradient(f"{piece.name}.experts", piece.expert_elements, at, number, expert=True))
    replicas = ReplicaTimer(timer.model, timer.layout, timer.cluster, timer.operators, timer.conventions)
    return ModelChain(
        name=timer.model.name,
        pieces=tuple(pieces),
        gradients=tuple(gradients),
        update_s=replicas.update_s(rank_parameters(timer.model, timer.layout, layers)) * timer.compute_factor,
        shares=_shares(shares),
    )


def _works(timer: StageTimer, layers: StageLayers) -> list[tuple[LayerWork, str, str]]:
    found = [(timer.builder.embedding(), "embedding", "end")] if layers.first else []
    for (sparse, windowed), count in layers.kinds.items():
        work = timer.builder.layer(sparse=sparse, windowed=windowed)
        first = len(found) - layers.first
        found += [(work, f"layers.{number}", "sparse" if sparse else "dense") for number in range(first, first + count)]
    return [*found, *([(timer.builder.head(), "head", "end")] if layers.last else [])]


def _kept(timer: StageTimer, *, sparse: bool) -> dict[KeptUnder, float]:
    found: dict[KeptUnder, float] = {}
    for policy in _POLICIES:
        layout = structs.replace(timer.layout, recompute=policy)
        memory = LayerMemory(timer.model, layout, timer.job, timer.conventions, timer.imbalance)
        found[policy] = memory.kept(sparse=sparse)
    return found


def _inner(timer: StageTimer, kind: str, name: str) -> tuple[InnerCollective, ...]:
    """In the order in which they run."""
    layout, size = timer.layout, timer.builder.activation_bytes
    if kind == "end":
        if layout.tp == 1:
            return ()
        words: tuple[InnerKind, InnerKind] = ("all_reduce", "all_reduce")
        if layout.shards_sequence:
            words = ("reduce_scatter", "all_gather") if name == "embedding" else ("all_gather", "reduce_scatter")
        return tuple(InnerCollective("tensor", word, size, where) for word, where in zip(words, _BOTH, strict=True))
    found: list[InnerCollective] = []
    for where in _BOTH:
        if layout.cp > 1:
            found += _context(timer, where)
        if layout.tp > 1:
            found += _tensor(timer, where, sparse=kind == "sparse")
        if layout.ep > 1 and kind == "sparse":
            found += [InnerCollective("expert", "all_to_all", timer.dispatched_bytes, where)] * 2
    return tuple(found)


def _tensor(timer: StageTimer, where: Pass, *, sparse: bool) -> list[InnerCollective]:
    """Around attention, and around an MLP that all tokens take."""
    size, pairs = timer.builder.activation_bytes, 1 if sparse and not timer.model.shared_ffn else 2
    if not timer.layout.sequence_parallel:
        return [InnerCollective("tensor", "all_reduce", size, where)] * pairs
    kinds: list[InnerCollective] = []
    for _ in range(pairs):
        kinds.append(InnerCollective("tensor", "all_gather", size, where))
        kinds.append(InnerCollective("tensor", "reduce_scatter", size, where))
    if where == "backward" and timer.conventions.gathers_again:
        kinds += [InnerCollective("tensor", "all_gather", size, where)] * pairs
    return kinds


def _context(timer: StageTimer, where: Pass) -> list[InnerCollective]:
    if timer.conventions.context_exchange == "all-to-all":
        return [InnerCollective("context", "all_to_all", timer.swapped_bytes, where)]
    sends = (timer.layout.cp - 1) * (1 if where == "forward" else 2)
    return [InnerCollective("context", "send", timer.passed_bytes, where)] * sends


def _shares(seconds: PartSeconds) -> ComputeShares | None:
    """Of computation; time in which the device waits for the host is none."""
    matmul, attention, memory = seconds.matmul, seconds.attention, seconds.memory
    whole = matmul + attention + memory
    if whole <= 0:
        return None
    return ComputeShares(matmul=matmul / whole, attention=attention / whole, memory=memory / whole)
