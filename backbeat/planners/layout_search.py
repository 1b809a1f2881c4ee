"""Rank every layout of a job on a number of GPUs: those that fit, fastest first.

All are predicted in closed form, and the best are simulated. Recomputing costs time, so it is tried only where a layout
does not fit without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import msgspec

from backbeat.errors import InputError
from backbeat.model.layout import Layout, job_of
from backbeat.model.possible_layout import impossible
from backbeat.model.prediction import Prediction
from backbeat.planners.layout_ways import MICRO_BATCHES, MOST_CHUNKS, RECOMPUTE, SIMULATED, divisors, rank
from backbeat.steps.predict_layout import ClusterInput, LayoutPredictor, ModelInput, predictor_of
from backbeat.steps.slow_ranks import check_stragglers


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
    **options: Any,
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
                weighed.append(layout)
                break
    weighed.sort(key=lambda one: rank(one, predictor.step_s(one)))
    best = [(one, predictor.predict(one, timeline=False)) for one in weighed[: max(SIMULATED, most)]]
    best.sort(key=lambda each: rank(each[0], each[1].step_s))
    return [predictor.ranged(one) for _, one in best[:most]]


def least_memory(predictor: LayoutPredictor, gpus: int, zero: Sequence[int] = (1,)) -> Prediction | None:
    """The layout that takes least memory, whether it fits or not; None where no layout is possible."""
    found = (msgspec.structs.replace(base, recompute="full") for base in _candidates(predictor, gpus, zero))
    least = min(found, key=lambda one: (predictor.memory(one).peak_bytes, one.label), default=None)
    return None if least is None else predictor.predict(least, "closed-form")


def _candidates(predictor: LayoutPredictor, gpus: int, zero: Sequence[int]) -> Iterator[Layout]:
    """Every possible layout, without choosing what it recomputes."""
    model, job = predictor.model, predictor.job
    for tp, pp, cp in product(divisors(gpus), repeat=3):
        too_wide = tp > max(predictor.cluster.per_node, 8) or (cp > 1 and job.sequence < 4096 * cp)
        if gpus % (tp * pp * cp) or too_wide:
            continue
        base = Layout(dp=gpus // (tp * pp * cp), tp=tp, pp=pp, cp=cp)
        experts = divisors(base.stage_gpus) if model.experts else [1]
        for ep, micro, stage in product(experts, MICRO_BATCHES, zero):
            one = msgspec.structs.replace(base, ep=ep, micro_batch=micro, zero=stage)
            if impossible(model, one, job) is not None:
                continue
            yield one
            if pp > 1 and one.micro_batches(job) % pp == 0 and predictor.framework.interleaves:
                for chunks in range(2, MOST_CHUNKS + 1):
                    if model.layers % (pp * chunks) == 0:
                        yield msgspec.structs.replace(one, schedule="interleaved", chunks=chunks)
