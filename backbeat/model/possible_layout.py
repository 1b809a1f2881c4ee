"""Which layouts of a model and a job cannot be."""

from __future__ import annotations

from backbeat.errors import InputError
from backbeat.model.architecture import Architecture
from backbeat.model.layout import Job, Layout


def check_layout(model: Architecture, layout: Layout, job: Job, gpus: int | None = None) -> None:
    """Refuse a layout that cannot be, with the equation that fails.

    >>> check_layout(Architecture(name="small", layers=4, hidden=64, heads=4, ffn=256, vocab=100), Layout(dp=2, tp=3),
    ...       Job(global_batch=8, sequence=128), gpus=8)
    Traceback (most recent call last):
    backbeat.errors.InputError: dp(2) * tp(3) * pp(1) * cp(1) = 6 != gpus(8): choose factors whose product is 8
    """
    problem = impossible(model, layout, job, gpus)
    if problem is not None:
        raise InputError(problem)


def impossible(model: Architecture, layout: Layout, job: Job, gpus: int | None = None) -> str | None:
    """Why a layout cannot be; None where it can."""
    dp, tp, pp, cp, ep = layout.dp, layout.tp, layout.pp, layout.cp, layout.ep
    if gpus is not None and layout.gpus != gpus:
        return (
            f"dp({dp}) * tp({tp}) * pp({pp}) * cp({cp}) = {layout.gpus} != gpus({gpus}): "
            f"choose factors whose product is {gpus}"
        )
    stages, names = pp * layout.chunks, f"pp({pp}) * chunks({layout.chunks})"
    micro = layout.micro_batch
    rules = (
        (f"heads({model.heads})", model.heads, f"tp({tp})", tp),
        (f"ffn({model.ffn})", model.ffn, f"tp({tp})", tp),
        (f"shared_ffn({model.shared_ffn})", model.shared_ffn, f"tp({tp})", tp),
        (f"experts({model.experts})", model.experts or ep, f"ep({ep})", ep),
        (f"(tp({tp}) * cp({cp}) * dp({dp}))", layout.stage_gpus, f"ep({ep})", ep),
        (f"global_batch({job.global_batch})", job.global_batch, f"(dp({dp}) * micro_batch({micro}))", dp * micro),
        (f"sequence({job.sequence})", job.sequence, f"(2 * cp({cp}))", cp * 2 if cp > 1 else 1),
        (f"sequence({job.sequence})", job.sequence, f"(cp({cp}) * tp({tp}))", cp * tp if layout.shards_sequence else 1),
    )
    for whole, value, parts, divisor in rules:
        if value % divisor:
            return f"{whole} % {parts} = {value % divisor} != 0: choose a divisor of {value}"
    if stages > model.layers:
        return f"layers({model.layers}) < {names} = {stages}: a stage needs a layer; choose fewer stages or chunks"
    if model.key_heads % tp and tp % model.key_heads:
        return f"kv_heads({model.key_heads}) % tp({tp}) != 0 and tp({tp}) % kv_heads({model.key_heads}) != 0"
    if layout.zero_group:
        replicas = [group for group, _ in (layout.dense_group, layout.expert_group) if group % layout.zero_group]
        if layout.zero != 1 or replicas:
            why = f"{replicas[0]} replicas" if replicas else "what else it shards, all replicas share"
            return f"zero={layout.zero}:{layout.zero_group} is of zero=1 and of whole groups of replicas, not {why}"
    if layout.stages_first and cp * ep > 1:
        return f"order={layout.order} is predicted without cp and ep, not with cp({cp}) and ep({ep}): leave it out"
    if ep > 1 and not model.experts:
        return f"ep({ep}) > 1, but {model.name} has no experts: leave ep out"
    count = layout.micro_batches(job)
    if layout.chunks > 1 and (layout.schedule != "interleaved" or pp == 1):
        return f"chunks({layout.chunks}) > 1 needs schedule=interleaved and pp > 1, not {layout.schedule} and pp({pp})"
    if layout.schedule == "interleaved" and pp > 1 and layout.chunks == 1:
        return "schedule=interleaved with chunks(1) is 1f1b: give each stage several chunks, like chunks=2"
    if layout.schedule == "interleaved" and pp > 1 and count % pp:
        return f"micro-batches({count}) % pp({pp}) != 0: the interleaved schedule takes them in rounds of pp"
    return None
