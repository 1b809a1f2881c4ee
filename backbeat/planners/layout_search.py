"""Rank every layout of a job on a number of GPUs: those that fit, fastest first.

All are predicted in closed form, and the best are simulated. Recomputing costs time, so it is tried only where a layout
does not fit without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Unpack

import msgspec

from backbeat.errors import InputError
from backbeat.model.layout import Layout, Recompute, job_of
from backbeat.model.possible_layout import impossible
from backbeat.model.prediction import Prediction
from backbeat.steps.predict_layout import ClusterInput, LayoutPredictor, ModelInput, PredictorOptions, predictor_of
from backbeat.steps.slow_ranks import check_stragglers

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_SIMULATED = 16
"""The best in closed form, which are then simulated and ranked by that."""
_MICRO_BATCHES = (1, 2, 4, 8)
_MOST_CHUNKS = 8


def search(
    model: ModelInput,
    cluster: ClusterInput,
    *,
    gpus: int,
    global_batch: int,
    sequence: int,
    precision: str = "bf16",
    zero: Sequence[int] = (1,),
    most: int = 10,
    **options: Unpack[PredictorOptions],
) -> list[Prediction]:
    """The `most` best layouts that fit, fastest first; ties go to the simpler one. An empty list: none fits. Their
    timelines are empty: `predict` draws one.

    >>> best = search("llama-3-8b", "dgx-h100", gpus=16, global_batch=64, sequence=4096)
    >>> best[0].gpus, all(one.fits == "yes" for one in best), best == sorted(best, key=lambda one: one.step_s)
    (16, True, True)
    """
    if gpus < 1:
        raise InputError(f"gpus is {gpus}: a job has at least one")
    predictor = predictor_of(model, cluster, job_of(global_batch, sequence, precision), **options)
    check_stragglers(predictor.stragglers, gpus, predictor.cluster.per_node)
    weighed = []
    for base in _candidates(predictor, gpus, zero):
        # Less recomputation is faster: the first that fits is the best of its kind.
        for recompute in RECOMPUTE:
            layout = msgspec.structs.replace(base, recompute=recompute)
            if predictor.fits(layout):
                weighed.append((layout, predictor.predict(layout, "closed-form")))
                break
    weighed.sort(key=_rank)
    best = [(layout, predictor.predict(layout, timeline=False)) for layout, _ in weighed[: max(_SIMULATED, most)]]
    best.sort(key=_rank)
    return [predictor.ranged(one) for _, one in best[:most]]


def least_memory(predictor: LayoutPredictor, gpus: int, zero: Sequence[int] = (1,)) -> Prediction | None:
    """The layout that takes least memory, whether it fits or not; None where no layout is possible."""
    found = (msgspec.structs.replace(base, recompute="full") for base in _candidates(predictor, gpus, zero))
    least = min(found, key=lambda one: (predictor.memory(one).peak_bytes, one.label), default=None)
    return None if least is None else predictor.predict(least, "closed-form")


def _rank(found: tuple[Layout, Prediction]) -> tuple[Any, ...]:
    layout, one = found
    return (one.step_s, layout.pp, layout.tp, layout.cp, layout.ep, layout.chunks, layout.micro_batch, layout.label)


def _candidates(predictor: LayoutPredictor, gpus: int, zero: Sequence[int]) -> Iterator[Layout]:
    """Every possible layout, without choosing what it recomputes."""
    model, job = predictor.model, predictor.job
    for tp, pp, cp in product(_divisors(gpus), repeat=3):
        too_wide = tp > max(predictor.cluster.per_node, 8) or (cp > 1 and job.sequence < 4096 * cp)
        if gpus % (tp * pp * cp) or too_wide:
            continue
        base = Layout(dp=gpus // (tp * pp * cp), tp=tp, pp=pp, cp=cp)
        experts = _divisors(base.stage_gpus) if model.experts else [1]
        for ep, micro, stage in product(experts, _MICRO_BATCHES, zero):
            one = msgspec.structs.replace(base, ep=ep, micro_batch=micro, zero=stage)
            if impossible(model, one, job) is not None:
                continue
            yield one
            if pp > 1 and one.micro_batches(job) % pp == 0 and predictor.framework.interleaves:
                for chunks in range(2, _MOST_CHUNKS + 1):
                    if model.layers % (pp * chunks) == 0:
                        yield msgspec.structs.replace(one, schedule="interleaved", chunks=chunks)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
