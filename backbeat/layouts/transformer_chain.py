"""A transformer under a layout as a chain of pieces: the embedding, the layers, the head.

One rank's share of each: what tensor, context and expert parallelism leave it, without their collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from msgspec import structs

from backbeat.layouts.layout_memory import LayerMemory
from backbeat.layouts.rank_parameters import modules_of, rank_parameters
from backbeat.layouts.replicas import ReplicaTimer
from backbeat.layouts.stage_layers import StageLayers
from backbeat.layouts.stage_times import PartSeconds, StageTimer, StageTimes
from backbeat.model.profile import ComputeShares
from backbeat.steps.model_chain import (
    ChainGradient,
    ChainPiece,
    KeptUnder,
    ModelChain,
)

_POLICIES: tuple[KeptUnder, ...] = ("none", "selective", "full")


def chain_of_layers(timer: StageTimer, layers: StageLayers) -> ModelChain:
    """These layers, as `timer` says what they take; with its layout's recomputation in backward.

    >>> from backbeat.layouts import Layout
    >>> from backbeat.model.layout import Job
    >>> from backbeat.layouts.predict_layout import predictor_of
    >>> predictor = predictor_of("llama-3-8b", "dgx-h100", Job(global_batch=8, sequence=4096))
    >>> chain = chain_of_layers(predictor.timer(Layout(dp=8)), StageLayers(32, 0, True, True))
    >>> len(chain.pieces), round(chain.elements / 1e9, 2)
    (34, 8.03)
    """
    pieces, shares = [], PartSeconds()
    for name, times, sparse in _runs(timer, layers):
        shares = shares.plus(times.parts)
        pieces.append(
            ChainPiece(
                name,
                times.forward_s,
                times.input_s,
                times.weight_s,
                kept_bytes={} if sparse is None else _kept(timer, sparse=sparse),
                expert_elements=timer.model.expert_parameters / timer.layout.ep if sparse else 0.0,
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
    replicas = ReplicaTimer(timer.model, timer.layout, timer.cluster, timer.operators, timer.framework)
    return ModelChain(
        name=timer.model.name,
        pieces=tuple(pieces),
        gradients=tuple(gradients),
        update_s=replicas.update_s(rank_parameters(timer.model, timer.layout, layers)) * timer.compute_factor,
        shares=_shares(shares),
    )


def _runs(timer: StageTimer, layers: StageLayers) -> Iterator[tuple[str, StageTimes, bool | None]]:
    """Name and times of each piece, and whether it is a layer with experts; None where it is no layer."""
    if layers.first:
        yield "embedding", timer.piece("embedding", alone=True), None
    number = 0
    for (sparse, windowed), count in layers.kinds.items():
        times = timer.layer(sparse=sparse, windowed=windowed, alone=True)
        for _ in range(count):
            yield f"layers.{number}", times, sparse
            number += 1
    if layers.last:
        yield "head", timer.piece("head", alone=True), None


def _kept(timer: StageTimer, *, sparse: bool) -> dict[KeptUnder, float]:
    found: dict[KeptUnder, float] = {}
    for policy in _POLICIES:
        layout = structs.replace(timer.layout, recompute=policy)
        memory = LayerMemory(timer.model, layout, timer.job, timer.framework, timer.imbalance)
        found[policy] = memory.kept(sparse=sparse)
    return found


def _shares(seconds: PartSeconds) -> ComputeShares | None:
    """Of computation; time in which the device waits for the host is none."""
    matmul, attention, memory = seconds.matmul + seconds.recompute, seconds.attention, seconds.memory
    whole = matmul + attention + memory
    if whole <= 0:
        return None
    return ComputeShares(matmul=matmul / whole, attention=attention / whole, memory=memory / whole)
