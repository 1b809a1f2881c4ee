"""What holds a prediction back and what would help, in words, and how far the curve pays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from backbeat.model import Gradient, Prediction, Profile
from backbeat.planners import SHARDED
from backbeat.simulate.predict import knee
from backbeat.units import format_bytes

LIMITS = {
    "compute": "Nothing: communication is hidden behind computation. A faster network would not help.",
    "bandwidth": "The network's bandwidth: there are more bytes to send than fit behind the backward pass. "
    "A faster network, fewer bytes (--reduce-dtype bf16) or more computation per step (larger batch, accumulation) "
    "help; other buckets help little.",
    "latency": "The latency of messages: too many small ones in a row. "
    "Fewer, larger buckets help, or several communicators.",
    "waiting": "Late gradients: communication is held back until the last gradients are ready. "
    "Smaller buckets at the end help, or hiding it behind the next forward pass.",
    "stragglers": "The slowest worker: in every step all others wait for it. Steadier workers help, "
    "a schedule does not.",
    "copies": "Copying parameters out of gathered buffers and gradients into those to reduce. Larger units do "
    "not help; keeping parameters after forward (zero2) copies them out once instead of twice.",
    "buffers": "Broadcasting buffers before every forward pass. `broadcast_buffers=False` removes it, "
    "where the statistics in them may differ between workers.",
    "host": "The host, which issues work slower than the GPU does it. Compiling (torch.compile), a larger batch or a "
    "faster CPU help; a faster network or other buckets do not.",
    "contention": "Communication slows computation down: it takes multiprocessors and memory bandwidth from it. What "
    "helps is fewer bytes (--reduce-dtype bf16) or fewer channels (NCCL_MAX_CTAS); other buckets help little.",
    "gather": "Gathering updated parameters, which the sharded optimizer needs before every forward. Gathering them "
    "behind it helps (Megatron's --overlap-param-gather), or an optimizer that is not sharded, where memory allows.",
}
SMALL_SHARES = (
    "Small batches: a GPU computes its share of the global batch more slowly, sample by sample, than all of it. A "
    "larger global batch helps; a faster network does not."
)
"""Of strong scaling, where communication is hidden."""
_BUCKETS_HELP = 0.01
"""A plan closer to its bound than this gains nothing from other buckets."""
_LAST = 0.02
"""Gradients that are ready in this last share of backward are called last."""


def limit(prediction: Prediction, profile: Profile, *, reduce_dtype: str | None = None) -> str:
    """What holds it back and what helps; nothing that this prediction itself refutes."""
    kind = prediction.bottleneck
    sentence = LIMITS[kind]
    if profile.element_bytes <= 2:
        reduce_dtype = profile.gradient_dtype
    if reduce_dtype is not None:
        sentence = sentence.replace("fewer bytes (--reduce-dtype bf16)", "smaller gradients (compression)")
    if re.split("[: ]", prediction.strategy)[0] in SHARDED:
        return sentence.replace("; other buckets help little", "").replace("buckets", "units")
    if kind not in ("latency", "waiting") or prediction.gap >= _BUCKETS_HELP:
        return sentence
    fewer = "fewer bytes (--reduce-dtype bf16)" if reduce_dtype is None else "a faster network"
    late = late_tensor(prediction, profile) if kind == "waiting" else None
    if late is not None:
        return (
            f"Late gradients: {late.name} ({format_bytes(late.bytes)}) is ready last, and nothing is left to hide it "
            f"behind. Other buckets do not help; {fewer} or more computation per step (accumulation) do."
        )
    cause = (
        "The latency of messages" if kind == "latency" else "Late gradients: the last ones have nothing to hide behind"
    )
    return f"{cause}. No other buckets help: these are as good as any; {fewer} or more computation per step do."


def late_tensor(prediction: Prediction, profile: Profile) -> Gradient | None:
    """The one gradient that is ready last and makes up most of what is sent last."""
    sent = [span for span in prediction.timeline if span.carries_gradients]
    if not sent:
        return None
    after = (1 - _LAST) * profile.gradients[-1].ready_s
    largest = max((one for one in profile.gradients if one.ready_s >= after), key=lambda one: one.bytes)
    return largest if 2 * largest.bytes > max(sent, key=lambda span: span.end_s).bytes else None


def above_linear(predictions: Iterable[Prediction]) -> str:
    """Why some scale by more than 100 %, where one does; otherwise empty."""
    for one in predictions:
        quiet = one.network_band.quiet_scaling_factor if one.network_band else 0.0
        if max(one.scaling_factor, quiet) >= 1.0005:  # as printed
            return "Above 100%: a sharded GPU updates its share of the parameters, one GPU alone all of them."
    return ""


def knee_sentence(curve: Sequence[Prediction]) -> str:
    """How far added GPUs pay, counted from one."""
    bend, top = knee(curve), max(point.workers for point in curve)
    if bend is None:
        return f"There is no knee up to {top} GPUs: each added one still brings more than half of its own work."
    if bend == 1:
        return "There is no knee: from the first GPU on, an added one brings less than half of its own work."
    return f"The knee lies at {bend} GPUs: beyond, an added one brings less than half of its own work."
