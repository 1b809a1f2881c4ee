"""The first and the last words of an answer: the verdict, and the decision with what to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backbeat.answer.answer import Answer
from backbeat.answer.decision import Measure
from backbeat.answer.row import AnswerRow
from backbeat.answer.ways import OURS as RUNTIME
from backbeat.model.gpu_memory import kinds_in_words
from backbeat.show.words.numbers import capitalised, format_count, format_hours, format_money, format_number
from backbeat.units import counted, format_bytes, format_seconds

NAMES = {
    "ddp": "stock DDP",
    "fsdp": "FSDP",
    "hsdp": "HSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "best": "DDP with planned buckets",
    "sharded": "planned sharding",
    "horovod": "Horovod",
}
"""What people call ways."""
_SAME = 5e-4
"""Two times closer than this print alike."""
_MEASURE: Mapping[Measure, str] = {
    "network": "the network: `torchrun … -m backbeat calibrate -o network.json` on it, and ask with that file",
    "run": "one step of your own: time any way there, and ask with --measured {way}@{gpus}=SECONDS",
    "profile": "the model on one of these GPUs: `backbeat profile`, and ask with that file",
}


def called(way: str) -> str:
    """
    >>> called("hsdp:8"), called("tp=8+pp=2")
    ('HSDP in groups of 8', 'tp=8+pp=2')
    """
    name, _, shards = way.partition(":")
    return NAMES.get(name, way if not shards else name) + (f" in groups of {shards}" if shards else "")


def headed(way: str) -> str:
    """To begin a line; a layout's word stays as it is."""
    return way if "=" in way else capitalised(called(way))


def mesh_words(mesh: Mapping[str, int]) -> str:
    """
    >>> mesh_words({"replicate": 8, "shard": 64})
    'replicate 8 × shard 64'
    """
    return " × ".join(f"{name} {size}" for name, size in mesh.items())


def percent(share: float) -> str:
    """
    >>> percent(0.0312), percent(0.125)
    ('3.1 %', '12 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def faster(gain: float, name: str) -> str:
    """
    >>> faster(1.036, "stock DDP"), faster(2.55, "stock DDP"), faster(1.0001, "FSDP")
    ('3.6 % faster than stock DDP', '2.5 times as fast as stock DDP', 'as fast as FSDP')
    """
    if gain >= 2:
        return f"{gain:.1f} times as fast as {name}"
    if abs(gain - 1) < _SAME:
        return f"as fast as {name}"
    return f"{percent(gain - 1)} faster than {name}" if gain > 1 else f"{percent(1 - gain)} slower than {name}"


def figures(row: AnswerRow) -> str:
    """Speed and memory of a row, in one line."""
    one = row.prediction
    low, high = row.range_s
    reach = f" (the median in {format_seconds(low)} to {format_seconds(high)})" if high > low * (1 + _SAME) else ""
    rate, unit = (one.tokens_per_s, "tokens/s") if one.tokens_per_s is not None else (one.samples_per_s, "samples/s")
    parts = [f"{format_seconds(row.step_s)} a step{reach}", f"{format_count(rate)} {unit}"]
    if one.mfu is not None:
        parts.append(f"{one.mfu:.0%} MFU".replace("%", " %"))
    if (peak := row.peak) is not None:
        has = f" of {format_bytes(one.device_bytes)}" if one.device_bytes else ""
        parts.append(f"{format_bytes(peak)}{has}" + (", tight" if one.fits == "tight" else ""))
    return ", ".join(parts)


def headline(answer: Answer) -> str:
    """Whether that many GPUs pay, and how much work they do."""
    found, taken = answer.decision, answer.taken
    if answer.best is None:
        return nothing_fits(answer)
    if taken.gpus == 1:
        return f"One GPU works alone, and communicates with nobody: {figures(taken)}."
    work = format_number(min(taken.scaling_factor, 1.0) * taken.gpus)
    if taken.scaling_factor > 1.0005:
        work += " and more (each updates only its share of the parameters)"
    top = max(answer.curve, default=taken.gpus)
    if found.meets_deadline is not None:
        hours = format_hours(answer.question.deadline / 3600) if answer.question.deadline else ""
        what = f"{counted(taken.gpus, 'GPU')} {'meet' if found.meets_deadline else 'come nearest to'} {hours}"
    elif found.knee is None:
        what = "Worth it" if top == taken.gpus or taken.scaling_factor >= 0.8 else f"{taken.gpus} GPUs pay"
    elif found.knee == 1:
        what = "Do not spread this job over this network"
    else:
        what = f"Not worth it beyond {found.knee} GPUs"
    return f"{what}: {counted(taken.gpus, 'GPU')} do the work of {work} with {called(taken.way)}."


def nothing_fits(answer: Answer) -> str:
    least = answer.taken
    one = least.prediction
    has = f" of {format_bytes(one.device_bytes)}" if one.device_bytes else ""
    kinds = f" ({kinds_in_words(one.memory.by_kind)})" if one.memory is not None else ""
    return (
        f"Nothing fits one GPU{has} on {counted(least.gpus, 'GPU')}: {called(least.way)} takes least, "
        f"{format_bytes(least.peak or 0)}{kinds}."
    )


def advice_where_nothing_fits(answer: Answer) -> str:
    """What would make it fit: only what was tried."""
    found = answer.decision.remedies
    advice = f"Any of these does: {', '.join(found)}." if found else "A smaller --sequence, or --way tp+pp, may."
    if not any(one.startswith("--gpus") for one in found):
        advice += " More GPUs do not help: what one GPU computes is too large by itself."
    return f"Decision: make it fit first. {advice}"


def decision_text(answer: Answer) -> str:
    """What to do, why, and what that rests on; the lines to copy are `Decision.do`."""
    found, taken = answer.decision, answer.taken
    if answer.best is None:
        return advice_where_nothing_fits(answer)
    name, where = called(taken.way), counted(taken.gpus, "GPU")
    how = f" ({mesh_words(taken.mesh)})" if len(taken.mesh) > 1 else ""
    first = f"Decision: {name}{how} on {where}"
    if found.knee == 1 and taken.gpus > 1:
        first = f"Decision: keep to one GPU. If it is spread all the same: {name}{how} on {where}"
    if found.over is not None:
        level = [answer.rows[index] for index in answer.level]
        against = called(found.over)
        among = any(row.way == found.over for row in level)
        if among and found.over_gain <= 1 + _SAME:
            first += f", the simplest of {len(level)} ways that are level"
        elif among:
            first += f", {faster(found.over_gain, against)}, which is level"
        else:
            first += f", {faster(found.over_gain, against)}"
    lines = [f"{first}."]
    lines += [text for text in (_size(answer), _money(answer), doubt(answer)) if text]
    return " ".join(lines)


def _size(answer: Answer) -> str:
    """How many GPUs, and what another number would bring."""
    found, taken = answer.decision, answer.taken
    parts = []
    if found.meets_deadline is False:
        parts.append("No number of GPUs asked for meets the deadline.")
    if found.knee is not None and 1 < found.knee < taken.gpus and found.meets_deadline is None:
        parts.append(f"Beyond {counted(found.knee, 'GPU')} an added one brings less than half of its own work.")
    if found.cheapest not in (None, taken.gpus):
        cheap = next(row for row in answer.rows if row.gpus == found.cheapest)
        more = taken.gpu_seconds / cheap.gpu_seconds - 1
        if more >= 0.005:
            parts.append(f"{counted(cheap.gpus, 'GPU')} need {percent(1 - 1 / (1 + more))} fewer GPU-hours.")
    return " ".join(parts)


def _money(answer: Answer) -> str:
    cost, question = answer.taken.cost, answer.question
    if cost is None:
        return ""
    money = "" if cost.money is None else f", {format_money(cost.money)}"
    lasts = f"The training takes {format_hours(cost.hours)}, {format_number(cost.gpu_hours)} GPU-hours{money}"
    if question.goodput is None:
        return f"{lasts}, if every hour makes progress (--goodput 0.9 counts what does not)."
    return f"{lasts}, of which {question.goodput:.0%} makes progress.".replace("%", " %")


def doubt(answer: Answer) -> str:
    """What the range decides nothing of, and what to measure first."""
    found, taken = answer.decision, answer.taken
    if not found.doubts:
        return ""
    what = {
        "level": "which way is fastest (more than half are level)",
        "fits": f"whether it fits ({format_bytes(taken.peak or 0)} is tight)",
        "gpus": "how many GPUs pay",
        "deadline": "whether it meets the deadline",
    }
    listed = " and ".join(what[one] for one in found.doubts)
    text = f"Too uncertain to say {listed}."
    if found.measure is not None:
        text += f" Measure first {_MEASURE[found.measure].format(way=taken.way, gpus=taken.gpus)}."
    return text


def do_heading(by: str | None, lines: Sequence[str]) -> str:
    """Where the lines go."""
    if by in ("torch", RUNTIME, "horovod"):
        first = bool(lines) and lines[0].startswith("backbeat ")
        return "Make the plan, then in the training script:" if first else "In the training script:"
    if by is not None and by.startswith("not in "):
        return f"It is {by}; its plan, for what runs it:"
    return f"What {by} is given:"
