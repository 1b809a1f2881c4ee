"""The answer in words, for the page: how it scales, what limits it, what to do, and what that is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from backbeat.model import Network, Prediction, Profile, Source
from backbeat.planners.best import SIMPLER_WITHIN
from backbeat.report.study import STOCK, Study, chosen, frontier
from backbeat.report.words.commands import Settings, sharding_lines, wrapping_lines
from backbeat.report.words.decision import (
    Verdict,
    gain,
    judged,
    percent,
    stock_name,
    way_headline,
    way_sentences,
)
from backbeat.report.words.limits import limit
from backbeat.report.words.numbers import SAME, format_number, gpu_hours, lowered, over_bound, scaling_range, units_line
from backbeat.simulate.predict import knee
from backbeat.units import counted, format_seconds

_WORTH_SAYING = 1e-3
"""Savings below this share of a run are not called savings."""

_DAY_S = 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """One strategy's cost of a run."""

    label: str
    hours: float
    gpu_hours: float
    money: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something to change, with the line of code."""

    title: str
    text: str
    code: str = ""


_KEEP = Action(
    title="Keep stock DDP as it is",
    text="No schedule compared here is at least 1 % faster. What is left to gain lies elsewhere: see what limits it.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    verdict: Verdict
    headline: str
    scales: str
    limit: str
    memory: str
    """Whether it fits the device; empty where nobody knows."""
    actions: tuple[Action, ...]
    worth: tuple[Worth, ...]
    worth_text: str
    samples: int
    """The run that `worth` is about."""
    caveats: tuple[str, ...]


def answer(study: Study, settings: Settings | None = None, *, command: Callable[[str], str] | None = None) -> Answer:
    """`command` makes the plan of a label, and is empty where none can; without it, the one in the settings does."""
    asked = settings or Settings()
    price, samples = asked.price, asked.samples
    best = study.best
    # Where stock DDP does not fit, nothing can be compared with it.
    base = STOCK if STOCK in study.fitting else study.best_label
    count = samples or max(round(study.at_top[base].samples_per_s * _DAY_S), 1)
    fit = study.fits[study.best_label]
    verdict, headline = judged(study)
    inside = [f"the network {study.network.name} was measured inside one node"] if study.network.one_node else []
    worth = tuple(
        Worth(
            label=label,
            hours=gpu_hours(prediction, count) / prediction.workers,
            gpu_hours=gpu_hours(prediction, count),
            money=None if price is None else gpu_hours(prediction, count) * price,
        )
        for label, prediction in {base: study.at_top[base], study.best_label: best}.items()
    )
    return Answer(
        verdict=verdict,
        headline=headline,
        scales=_scales(study),
        limit=_limit(study),
        memory=f"One GPU needs {fit}." if fit is not None else "",
        actions=_all_actions(study, asked, command or partial(asked.plan_command, workers=study.top)),
        worth=worth,
        worth_text=f"{_worth_text(worth, count, price, a_day=samples is None)} On {counted(study.top, 'GPU')}: "
        f"{units_line(best, study.profile, price=price, epoch_samples=asked.epoch_samples)}.",
        samples=count,
        caveats=tuple(
            dict.fromkeys([*unmeasured(study.profile, study.network), *inside, *best.notes, *study.stock.notes])
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
            f"the network {network.name} names no transport: computation is taken not to slow down beside communication"
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
    lines += [
        f"* {note.removeprefix(about)}"
        for note in dict.fromkeys(best.notes)
        if every or not note.startswith(about) or "joined by" in note
    ]
    return lines if every or len(lines) <= 4 else [*lines[:3], f"* and {len(lines) - 3} more: {shown_by} shows them"]


def _scales(study: Study) -> str:
    stock, best = study.stock, study.best
    if study.top == 1:
        return f"An iteration takes {format_seconds(best.iteration_s)}."
    digits = 0 if f"{stock.scaling_factor:.0%}" != f"{best.scaling_factor:.0%}" else 1
    text = (
        f"One iteration takes {format_seconds(best.single_s)} on one GPU. On {study.top} it takes "
        f"{format_seconds(stock.iteration_s)} with stock DDP, {stock.scaling_factor:.{digits}%} of perfect scaling"
        f"{'' if STOCK in study.fitting else ', if it fitted'}"
    )
    if study.best_label == STOCK or gain(stock, best) < SAME:
        text += ", and no strategy compared here is faster."
    else:
        text += (
            f", and {format_seconds(best.iteration_s)} with the plan {study.best_label!r}, "
            f"{best.scaling_factor:.{digits}%}."
        )
    if edges := scaling_range(best):
        text += f" From a busy to a quiet cluster it is {edges.replace('–', ' to ').replace('%', ' %')}."
    bend = knee(frontier(study.curves))
    if bend is not None:
        where = f"Beyond {bend} GPUs an added" if bend > 1 else "Every added"
        text += f" {where} one brings less than half of its own throughput."
    if best.band is not None:
        low, high = format_seconds(best.band.p10_s), format_seconds(best.band.p90_s)
        if low != high:
            text += f" Single iterations vary from {low} to {high} (10th to 90th percentile)."
    return text


def _limit(study: Study) -> str:
    """What holds the best plan back, and stock DDP where that is something else."""
    stock, best = study.stock, study.best
    if study.top == 1:
        return "One worker has nobody to talk to."
    own, other = (limit(one, study.profile, reduce_dtype=study.reduce_dtype) for one in (best, stock))
    if stock.bottleneck == best.bottleneck:
        return own
    return f"With stock DDP: {lowered(other)} With {study.best_label!r}: {lowered(own)}"


def _all_actions(study: Study, settings: Settings, command: Callable[[str], str]) -> tuple[Action, ...]:
    """What to do with the gradients, unless DDP does not fit, then how to hold the model."""
    taken = chosen(study.ways)
    fits = not study.ways or study.ways[0].fits
    gradients = _actions(study, settings, command) if fits else ()
    code = ""
    if taken is not None and taken.sharded:
        code = _script(command(taken.label), sharding_lines("plan.json", study.profile.optimizer))
    elif study.top > 1 and fits and not gradients:
        gradients = (_KEEP,)
    if not study.ways:
        return gradients
    holding = Action(
        title=f"DDP, FSDP or HSDP? {way_headline(study.ways)}", text=" ".join(way_sentences(study.ways)), code=code
    )
    return (*gradients, holding)


def _actions(study: Study, settings: Settings, command: Callable[[str], str]) -> tuple[Action, ...]:
    if study.top == 1:
        return ()
    stock, best, found = study.stock, study.best, []
    faster = gain(stock, best)
    if study.best_label != STOCK and study.plans[study.best_label].sharding is None and faster >= SIMPLER_WITHIN:
        label, file = study.best_label, settings.plan_files.get(study.best_label)
        communicators = f" on {best.communicators} communicators" if best.communicators > 1 else ""
        found.append(
            Action(
                title=f"Run the plan: {percent(faster)} faster than stock DDP",
                text=f"It sends the gradients in {best.buckets} buckets{communicators} instead of {stock.buckets}. "
                f"No schedule that ends within the iteration can beat {format_seconds(best.bound_s)}; this one is "
                f"{over_bound(best):.1%} above it.",
                code=_script("" if file else command(label), wrapping_lines(file or "plan.json", study.reduce_dtype)),
            )
        )
    # The smallest bucket where several are equally fast.
    size, prediction = min(study.buckets, key=lambda pair: pair[1].iteration_s, default=(25, stock))
    if gain(stock, prediction) >= SIMPLER_WITHIN:
        found.append(
            Action(
                title=f"{'Or change' if found else 'Change'} one argument of stock DDP: "
                f"{percent(gain(stock, prediction))} faster",
                text=f"With buckets of {size} MiB instead of 25 an iteration takes "
                f"{format_seconds(prediction.iteration_s)}. No other bucket size that was tried is faster.",
                code=f"model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb={size})",
            )
        )
    return tuple(found)


def _script(command: str, lines: str) -> str:
    """Lines of the training script, behind the command that makes their plan, where there is one."""
    once = f"# once, on any machine:\n{command}\n\n" if command else ""
    return f"{once}# in the training script:\n{lines}"


def _worth_text(worth: tuple[Worth, ...], samples: int, price: float | None, *, a_day: bool) -> str:
    stock, best = worth[0], worth[-1]
    name = stock_name(stock.label)
    money = f", ${format_number(stock.money)} at ${price:,.2f} each" if stock.money is not None else ""
    cost = f"{format_number(stock.gpu_hours)} GPU-hours{money}"
    text = (
        f"What {name} trains in a day ({cost})"
        if a_day
        else f"Training on {samples:,} samples takes {name} {_hours(stock.hours)} ({cost})"
    )
    if best.gpu_hours >= stock.gpu_hours * (1 - _WORTH_SAYING):
        return f"{text}{f' is {samples:,} samples' if a_day else ''}; no plan compared here takes less."
    text += (
        f"{' takes' if a_day else '; it takes'} {best.label!r} {_hours(best.hours)} and "
        f"{format_number(best.gpu_hours)} GPU-hours. That saves {_hours(stock.hours - best.hours)} and "
        f"{format_number(stock.gpu_hours - best.gpu_hours)} GPU-hours"
    )
    if stock.money is not None and best.money is not None:
        text += f", ${format_number(stock.money - best.money)}"
    return f"{text}{' every day' if a_day else ''}."


def _hours(hours: float) -> str:
    """
    >>> _hours(30), _hours(0.5), _hours(0.002)
    ('30.0 hours', '30.0 minutes', '7.20 seconds')
    """
    if hours >= 1:
        return f"{format_number(hours)} hours"
    return f"{format_number(hours * 60)} minutes" if hours * 60 >= 1 else f"{format_number(hours * 3600)} seconds"
