"""The answer in words: how it scales, what limits it, what to do, and what that is worth. The page shows all of it, the
terminal parts of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from backbeat.model import Gradient, Network, Prediction, Profile, Source
from backbeat.model.prediction import knee
from backbeat.model.rule import PLANS as SIMPLER_WITHIN
from backbeat.planners import SHARDED
from backbeat.show.study import STOCK, Study, chosen
from backbeat.show.study_row import DeviceFit
from backbeat.show.words.commands import Settings, sharding_lines, wrapping_lines
from backbeat.show.words.decision import (
    Verdict,
    faster_than,
    gain,
    judged,
    sharding_headline,
    sharding_sentences,
    stock_name,
)
from backbeat.show.words.notes import worded
from backbeat.show.words.numbers import SAME, figures_line, format_number, gpu_hours, lowered, over_bound
from backbeat.units import format_bytes, format_seconds

_WORTH_SAYING = 1e-3
"""Savings below this share of a run are not called savings."""
_DAY_S = 86400
LIMITS = {
    "compute": "Nothing: communication is hidden behind computation. A faster network would not help.",
    "bandwidth": "The network's bandwidth: there are more bytes to send than fit behind the backward pass. "
    "A faster network, {fewer} or more computation per step (larger batch, accumulation) help{other}.",
    "latency": "The latency of messages: too many small ones in a row. "
    "Fewer, larger {parts} help, or several communicators.",
    "waiting": "Late gradients: communication is held back until the last gradients are ready. "
    "Smaller {parts} at the end help, or hiding it behind the next forward pass.",
    "stragglers": "The slowest worker: in every step all others wait for it. Steadier workers help, "
    "a schedule does not.",
    "copies": "Copying parameters out of gathered buffers and gradients into those to reduce. Larger units do "
    "not help; keeping parameters after forward (zero2) copies them out once instead of twice.",
    "buffers": "Broadcasting buffers before every forward pass. `broadcast_buffers=False` removes it, "
    "where the statistics in them may differ between workers.",
    "host": "The host, which issues work slower than the GPU does it. Compiling (torch.compile), a larger batch or a "
    "faster CPU help; a faster network or other {parts} do not.",
    "contention": "Communication slows computation down: it takes multiprocessors and memory bandwidth from it. What "
    "helps is {fewer} or fewer channels (NCCL_MAX_CTAS){other}.",
    "memory": "The memory budget: activations that are not kept are computed again or wait on the host. A larger "
    "budget, a smaller batch or sharding over more GPUs help; a faster network does not.",
    "gather": "Gathering updated parameters, which the sharded optimizer needs before every forward. Gathering them "
    "behind it helps (Megatron's --overlap-param-gather), or an optimizer that is not sharded, where memory allows.",
}
"""What limits a job and what helps. `{parts}` are what travels, buckets or units; `{fewer}` is how to send fewer bytes,
and `{other}` what is to be said of other buckets."""
_SMALL_SHARES = (
    "Small batches: a GPU computes its share of the global batch more slowly, sample by sample, than all of it. A "
    "larger global batch helps; a faster network does not."
)
"""Of strong scaling, where communication is hidden."""
_GOOD_SHARE = 0.95
"""Of the whole batch's speed; below it small shares are what limits a job that waits for nothing else."""
_BUCKETS_HELP = 0.01
"""A plan closer to its bound than this gains nothing from other buckets."""
_LAST = 0.02
"""Gradients that are ready in this last share of backward are called last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something to change, with the line of code."""

    title: str
    text: str
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    verdict: Verdict
    headline: str
    scales: str
    limit: str
    memory: str
    """Whether it fits the device; empty where nobody knows."""
    actions: tuple[Action, ...]
    gpu_hours: tuple[float, float]
    """Of a run of `samples`: with stock DDP, or the best where that does not fit, and with the best."""
    worth_text: str
    samples: int
    caveats: tuple[str, ...]


def answer(study: Study, settings: Settings | None = None, *, command: Callable[[str], str] | None = None) -> Answer:
    """`command` makes the plan of a label, and is empty where none can; without it, the one in the settings does."""
    asked = settings or Settings()
    best = study.best
    # Where stock DDP does not fit, nothing can be compared with it.
    base = STOCK if STOCK in study.fitting else study.best_label
    count = asked.samples or max(round(study.at_top[base].samples_per_s * _DAY_S), 1)
    fit = study.fits[study.best_label]
    verdict, headline = judged(study)
    inside = [f"the network {study.network.name} was measured inside one node"] if study.network.one_node else []
    worth = gpu_hours(study.at_top[base], count), gpu_hours(best, count)
    return Answer(
        verdict=verdict,
        headline=headline,
        scales=_scales(study, asked),
        limit=_limit(study),
        memory=f"One GPU needs {fit}." if fit is not None else "",
        actions=_actions(study, asked, command or partial(asked.plan_command, workers=study.top)),
        gpu_hours=worth,
        worth_text=_worth_text(study, base, count, worth, asked),
        samples=count,
        caveats=tuple(
            dict.fromkeys(
                [*unmeasured(study.profile, study.network), *inside, *worded([*best.notes, *study.stock.notes])]
            )
        ),
    )


def unmeasured(profile: Profile, network: Network) -> list[str]:
    """Which figures of the two were never measured, and which facts they leave out."""
    lines = []
    if isinstance(network.source, Source) and network.source.method in ("assumed", "published"):
        method = "from a publication" if network.source.method == "published" else "assumed"
        lines.append(f"the network {network.name} is {method}, not measured")
    if network.topology.gpus_per_node > 1 and network.topology.transport is None and network.slowdown is None:
        lines.append(
            f"the network {network.name} names no transport: computation is taken not to slow down beside "
            "communication; give `backbeat network --transport`, or write `transport` into the file's topology"
        )
    if profile.source is None:
        lines.append(f"the profile {profile.name} does not say where its figures come from")
    return lines


def caveats(
    best: Prediction, network: Network, profile: Profile, *, every: bool = False, shown_by: str = "--wide"
) -> list[str]:
    """What is not measured, in four lines; or `every` note, those of a calibration too, which were shown when it was
    made. `shown_by` shows the rest."""
    lines = [f"* {line}" for line in unmeasured(profile, network)]
    about = f"network {network.name}: "
    told = worded(note for note in best.notes if every or note.kind != "network")
    lines += [f"* {line.removeprefix(about)}" for line in told]
    return lines if every or len(lines) <= 4 else [*lines[:3], f"* and {len(lines) - 3} more: {shown_by} shows them"]


def memory_line(fit: DeviceFit | None, largest_batch: int | None) -> str | None:
    """Whether it fits the device, and which batches would; None where nobody knows."""
    if fit is None:
        return None
    return f"Memory: {fit}." + (f" Batches of up to {largest_batch:,} per GPU fit." if largest_batch else "")


def _scales(study: Study, settings: Settings) -> str:
    best, fit = study.best, study.fits[study.best_label]
    compared = len(study.curves) > 1
    alike = compared and study.best_label != STOCK and abs(gain(study.stock, best)) < SAME
    label = STOCK if alike else study.best_label
    which = f" with {stock_name(label)}" if compared else ""
    if fit is not None and not fit.fits:
        which += ", if it fitted"
    said = [figures_line(best, study.given, settings, which)]
    others = [prediction for _, prediction in study.buckets]
    others += [row.prediction for row in study.shardings if row.fits]
    if compared and label == STOCK and study.top > 1 and all(gain(best, one) < SIMPLER_WITHIN for one in others):
        said.append(f"No strategy compared here{' that fits' if study.too_big else ''} is faster.")
    if study.top > 1:
        said.append(knee_sentence(study.frontier))
    if best.band is not None:
        low, high = format_seconds(best.band.p10_s), format_seconds(best.band.p90_s)
        said += [f"Single iterations vary from {low} to {high} (10th to 90th percentile)."] if low != high else []
    return " ".join(said)


def _limit(study: Study) -> str:
    """What holds the best plan back, and stock DDP where that is something else."""
    stock, best = study.stock, study.best
    if study.top == 1:
        return "One worker has nobody to talk to."
    own, other = (limit_of(study, one) for one in (best, stock))
    if stock.bottleneck == best.bottleneck:
        return own
    return f"With stock DDP: {lowered(other)} With {study.best_label!r}: {lowered(own)}"


def _actions(study: Study, settings: Settings, command: Callable[[str], str]) -> tuple[Action, ...]:
    """What to do with the gradients, unless DDP does not fit, then how to hold the model."""
    taken, found = chosen(study.shardings), list[Action]()
    shards = taken is not None and taken.sharded
    if study.top > 1 and (not study.shardings or study.shardings[0].fits):
        found += _sending(study, settings, command)
        if not found and not shards:
            text = "No schedule compared here is at least 1 % faster. What is left to gain lies elsewhere: see what "
            found.append(Action(title="Keep stock DDP as it is", text=f"{text}limits it."))
    if study.shardings:
        title = f"DDP, FSDP or HSDP? {sharding_headline(study.shardings)}"
        lines = sharding_lines("plan.json", study.profile.optimizer)
        code = _script(command(taken.label), lines) if taken is not None and shards else ""
        found.append(Action(title=title, text=" ".join(sharding_sentences(study.shardings)), code=code))
    return tuple(found)


def _sending(study: Study, settings: Settings, command: Callable[[str], str]) -> list[Action]:
    stock, best, found = study.stock, study.best, []
    faster = gain(stock, best)
    if study.best_label != STOCK and study.plans[study.best_label].sharding is None and faster >= SIMPLER_WITHIN:
        label, file = study.best_label, settings.plan_files.get(study.best_label)
        communicators = f" on {best.communicators} communicators" if best.communicators > 1 else ""
        found.append(
            Action(
                title=f"Run the plan: {faster_than(faster, 'stock DDP')}",
                text=f"It sends the gradients in {best.buckets} buckets{communicators} instead of {stock.buckets}. "
                f"No schedule that ends within the iteration can beat {format_seconds(best.bound_s or 0.0)}; this one "
                f"is {over_bound(best):.1%} above it.",
                code=_script("" if file else command(label), wrapping_lines(file or "plan.json", study.reduce_dtype)),
            )
        )
    # The smallest bucket where several are equally fast.
    size, prediction = min(study.buckets, key=lambda pair: pair[1].iteration_s, default=(25, stock))
    if gain(stock, prediction) >= SIMPLER_WITHIN:
        found.append(
            Action(
                title=f"{'Or change' if found else 'Change'} one argument: "
                f"{faster_than(gain(stock, prediction), 'stock DDP')}",
                text=f"With buckets of {size} MiB instead of 25 an iteration takes "
                f"{format_seconds(prediction.iteration_s)}. No other bucket size that was tried is faster.",
                code=f"model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb={size})",
            )
        )
    return found


def _script(command: str, lines: str) -> str:
    """Lines of the training script, behind the command that makes their plan, where there is one."""
    once = f"# once, on any machine:\n{command}\n\n" if command else ""
    return f"{once}# in the training script:\n{lines}"


def _worth_text(study: Study, base: str, samples: int, worth: tuple[float, float], settings: Settings) -> str:
    stock, best = worth
    name, price, a_day = stock_name(base), settings.price, settings.samples is None
    money = f", ${format_number(stock * price)} at ${price:,.2f} each" if price is not None else ""
    cost = f"{format_number(stock)} GPU-hours{money}"
    text = (
        f"What {name} trains in a day ({cost})"
        if a_day
        else f"Training on {samples:,} samples takes {name} {_hours(stock / study.top)} ({cost})"
    )
    if best >= stock * (1 - _WORTH_SAYING):
        return f"{text}{f' is {samples:,} samples' if a_day else ''}; no plan compared here takes less."
    text += (
        f"{' takes' if a_day else '; it takes'} {study.best_label!r} {_hours(best / study.top)} and "
        f"{format_number(best)} GPU-hours. That saves {_hours((stock - best) / study.top)} and "
        f"{format_number(stock - best)} GPU-hours"
    )
    if price is not None:
        text += f", ${format_number((stock - best) * price)}"
    return f"{text}{' every day' if a_day else ''}."


def _hours(hours: float) -> str:
    """
    >>> _hours(30), _hours(0.5), _hours(0.002)
    ('30.0 hours', '30.0 minutes', '7.20 seconds')
    """
    if hours >= 1:
        return f"{format_number(hours)} hours"
    return f"{format_number(hours * 60)} minutes" if hours * 60 >= 1 else f"{format_number(hours * 3600)} seconds"


def limit_of(study: Study, row: Prediction) -> str:
    """What holds one of its rows back and what helps."""
    small = study.global_batch is not None and row.bottleneck == "compute" and row.scaling_factor < _GOOD_SHARE
    return _SMALL_SHARES if small else limit(row, study.profile, reduce_dtype=study.reduce_dtype)


def limit(prediction: Prediction, profile: Profile, *, reduce_dtype: str | None = None) -> str:
    """What holds it back and what helps; nothing that this prediction itself refutes."""
    kind = prediction.bottleneck
    sharded = re.split("[: ]", prediction.strategy)[0] in SHARDED
    whole = profile.element_bytes > 2 and reduce_dtype is None and prediction.strategy != "compressed"
    if prediction.strategy == "compressed":
        fewer = "fewer elements (plan --density)"
    else:
        fewer = "fewer bytes (--reduce-dtype bf16)" if whole else "smaller gradients (compression)"
    if sharded or kind not in ("latency", "waiting") or prediction.gap >= _BUCKETS_HELP:
        parts, other = ("units", "") if sharded else ("buckets", "; other buckets help little")
        return LIMITS[kind].format(fewer=fewer, parts=parts, other=other)
    fewer = fewer if whole else "a faster network"
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
