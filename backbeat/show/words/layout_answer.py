"""Layouts in words: what to do, what limits it and what helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from backbeat.errors import InputError
from backbeat.model import Network
from backbeat.model.layout import Layout, job_of
from backbeat.model.possible_layout import impossible
from backbeat.model.prediction import Prediction
from backbeat.planners.layout_ways import MICRO_BATCHES, MOST_CHUNKS, RECOMPUTE, SIMULATED, divisors, rank
from backbeat.show.words.numbers import lowered
from backbeat.steps.predict_layout import ClusterInput, LayoutPredictor, ModelInput, predictor_of
from backbeat.steps.slow_ranks import check_stragglers
from backbeat.units import counted, format_bytes, format_seconds

HELP = {
    "compute": "Arithmetic: it runs as fast as the matrix products allow. Only fewer or cheaper FLOPs help (fp8).",
    "memory": "Memory-bound work between the products: fused kernels help, or a wider tp that shards it.",
    "host": "The host, which submits operators more slowly than the GPU runs them: larger micro-batches help, or CUDA "
    "graphs.",
    "recompute": "Recomputation, which memory forces: more GPUs, more stages{shard} help.",
    "tensor": "Collectives of tensor parallelism: a smaller tp helps where memory allows, or hiding them behind the "
    "products (overlap dp+tp).",
    "context": "The ring of keys and values: a smaller cp helps.",
    "expert": "All-to-alls between experts: an ep inside one node helps.",
    "contention": "Communication, which takes multiprocessors and memory bandwidth from the computation beside it: "
    "fewer bytes help, or fewer of NCCL's channels (NCCL_MAX_CTAS).",
    "parameters": "Gathering and scattering sharded parameters in every pass: a lower zero helps where memory allows.",
    "bubble": "The pipeline's bubble: more micro-batches a step help (a larger global batch, fewer replicas), or "
    "interleaved stages.",
    "reduce": "Reducing gradients: more micro-batches a step help, or a framework that overlaps them.",
    "update": "The update of parameters: sharding it (zero=1) helps.",
    "gather": "Gathering updated parameters: gathering them behind the next forward helps.",
    "stragglers": "Ranks that compute more slowly than others: everybody waits for them. Replacing them helps.",
}


def nothing_fits(
    model: Any, network: Network, gpus: int, job: Mapping[str, Any], zero: Sequence[int] = (1,)
) -> tuple[Any | None, str]:
    """The layout that takes least, and what to do, where none fits. `job` is as `layouts.search` takes it."""
    names = ("framework", "overlap", "dispatcher", "accelerator", "imbalance")
    known = {name: job[name] for name in names if name in job}
    asked = job_of(job["global_batch"], job["sequence"], job["precision"])
    predictor = predictor_of(model, network, asked, **known)
    least, sharded = (least_memory(predictor, gpus, stages) for stages in (zero, (3,)))
    if least is None:
        return None, f"No layout of {gpus} GPUs can be: their factors divide neither heads, layers nor batch."
    advice = ", or shard parameters as well (--zero 3)" if sharded is not None and sharded.fits == "yes" else ""
    return least, (
        f"No layout fits on {counted(gpus, 'GPU')}: {least.strategy} takes least, "
        f"{format_bytes(least.peak_bytes or 0)} of {format_bytes(least.device_bytes or 0)}. Take more GPUs{advice}."
    )


def compared(best: Any, found: Sequence[Any]) -> list[str]:
    """What other numbers of GPUs give."""
    return [
        f"On {counted(one.gpus, 'GPU')} a step takes {format_seconds(one.step_s)}: {best.step_s / one.step_s:.2f} "
        f"times as fast as {best.gpus}, for {one.step_s * one.gpus / (best.step_s * best.gpus) - 1:.1%} more GPU time."
        for one in found
        if one is not best
    ]


def layout_answer(best: Any) -> str:
    """What to do, in words."""
    return (
        f"Use {best.strategy}: {format_seconds(best.step_s)} a step, {best.tokens_per_s:,.0f} tokens/s on "
        f"{best.gpus} GPUs, {best.mfu:.0%} MFU, {format_bytes(best.peak_bytes)} of {format_bytes(best.device_bytes)}."
        f"\n{limit_line(best)}"
    )


def limit_line(one: Any) -> str:
    """What holds it back and what helps."""
    shard = " or sharded parameters (zero=3)" if one.layout.zero < 3 else ""
    return f"Limited by {lowered(HELP[one.bottleneck].format(shard=shard))}"


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
