"""Whether that many GPUs are worth renting, how to hold the model on them, and what to do: the first and the last lines
of every answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Literal

from backbeat.model import Plan, Prediction
from backbeat.model.batches import strong_scaling
from backbeat.model.prediction import knee
from backbeat.model.rule import PLANS as SIMPLER_WITHIN
from backbeat.show.study import PLANNED, STOCK, Study, chosen
from backbeat.show.study_row import DeviceFit, StudyRow, study_row
from backbeat.show.words.commands import Settings, sharding_lines
from backbeat.show.words.numbers import SAME, capitalised, format_number, load_range
from backbeat.units import counted, format_bytes, format_seconds

Verdict = Literal["yes", "partly", "no", "alone", "memory"]

_ALONE = "Decision: nothing to decide for one GPU; ask for more with --workers."
_GOOD = 0.8
"""From this scaling factor on, workers are called worth it without a but."""
_HALF = 0.5
"""From this scaling factor on, an added GPU brings at least half of its own work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    headline: str
    """The verdict, and how many GPUs' work is done."""
    row: StudyRow | None
    """What it is about, on the most workers; None where nothing fits."""
    text: str
    """What to do, with what to copy."""


def decide(study: Study, settings: Settings, *, sharding: bool) -> Decision:
    """What to do now: how to send gradients or, with `sharding`, whether and how to shard the model."""
    if sharding:
        return _decide_sharding(study, settings)
    best = next(row for row in study.rows if row.prediction is study.best)
    return Decision(headline=judged(study)[1], row=best, text=_decide_sending(study, settings))


def judged(study: Study) -> tuple[Verdict, str]:
    """Whether that many GPUs are worth it, in one sentence."""
    best, stock, fit = study.best, study.baseline, study.fits[study.best_label]
    if fit is not None and not fit.fits:
        return "memory", f"Does not fit: {fit.too_much()}."
    if study.top == 1:
        return "alone", "One GPU works alone: nothing is communicated."
    work, ranged = _work(best)
    worth = f"{counted(study.top, 'GPU')} do the work of {work}"
    worth += ", depending on how busy the cluster is" if ranged else ""
    if stock in study.too_big:
        worth += f"; {stock_name(stock)} does not fit the memory"
    elif len(study.curves) > 1 and stock in study.curves:
        plain = study.at_top[stock]
        worth += f"; {stock_name(stock)} {'too' if best is plain else _work(plain)[0]}"
    verdict, words = worth_it(study.frontier, _where(study))
    return verdict, f"{words}: {worth}."


def worth_it(curve: Sequence[Prediction], where: str = "on this network") -> tuple[Verdict, str]:
    """Whether the largest number of GPUs on a curve is worth it, in a few words."""
    bend, best = bend_of(curve), curve[-1]
    if bend is not None:
        return "no", f"Not worth it {f'beyond {bend} GPUs' if bend > 1 else where}"
    good = best.scaling_factor >= _GOOD
    if good and best.on_busy.scaling_factor >= _GOOD:
        return "yes", "Worth it"
    if good or _busy_knee(curve) is not None:
        return "partly", "Worth it unless the cluster is busy"
    return "partly", "Worth it only if time matters more than cost"


def _where(study: Study, on: str = "on") -> str:
    """What a verdict against more GPUs is about."""
    return f"{on} this network" if study.global_batch is None else "for this global batch"


def bend_of(curve: Sequence[Prediction]) -> int | None:
    """The knee; None where the largest number of GPUs pays, however the curve came there."""
    return None if curve[-1].scaling_factor >= _GOOD else knee(curve)


def stock_name(label: str) -> str:
    return "stock DDP" if label == STOCK else label


def _decide_sending(study: Study, settings: Settings) -> str:
    """How many GPUs to rent, and what to run on them."""
    curve, stock, stock_bf16 = study.frontier, study.baseline, _stock_bf16(study)
    best, bend = study.best, bend_of(curve)
    verdict, _ = judged(study)
    if verdict == "alone":
        return _ALONE
    if verdict == "memory":
        what = "make it fit first: shard it (--strategy fsdp), or let `backbeat plan --memory` choose what to keep"
    elif bend is None:
        what = f"{counted(best.workers, 'GPU')} are worth renting" if verdict == "yes" else _partly(curve)
    elif bend > 1:
        busy = _busy_knee(curve) or bend
        what = f"rent at most {bend} GPUs {_where(study)}" + (f", {busy} while it is busy" if busy < bend else "")
    else:
        better = stock_bf16 is not None and stock_bf16.scaling_factor >= _HALF
        what = f"do not spread this job {_where(study, 'over')}{' as it is' if better else ''}"
    lines = [f"Decision: {what}."]
    if bend != 1 and verdict != "memory" and stock in study.curves:
        taken = best if bend is None else next((point for point in curve if point.workers == bend), best)
        lines.append(_run(study, settings, next(row for row in study.rows if row.prediction is taken)))
    if stock_bf16 is not None and verdict != "memory" and gain(best, stock_bf16) >= SIMPLER_WITHIN:
        lines.append(
            "With gradients sent as bf16, if training bears it, stock DDP alone is "
            f"{faster_than(gain(best, stock_bf16), 'this')}: {counted(best.workers, 'GPU')} do the work of "
            f"{_work(stock_bf16)[0]}. Ask again with --reduce-dtype bf16."
        )
    return "\n".join(lines)


def _stock_bf16(study: Study) -> Prediction | None:
    """Stock DDP with gradients in bf16 on the most workers; None where they are already, where sending them is not what
    costs, or where it does not fit."""
    best = study.best
    costly = best.workers > 1 and best.bottleneck in ("bandwidth", "waiting") and study.given.element_bytes > 2
    if study.reduce_dtype is not None or study.global_batch is not None or not costly:
        return None
    network = study.network.at(workers=best.workers)
    row = study_row(STOCK, {"strategy": STOCK}, study.given, network, replace(study, reduce_dtype="bf16"))
    return row.prediction if row.fits else None


def _run(study: Study, settings: Settings, taken: StudyRow) -> str:
    """What to run in place of stock DDP, or of what the job runs today, if anything."""
    stock = study.baseline
    name, too_big = stock_name(stock), stock in study.too_big
    if len(study.curves) > 1 and set(study.curves) - {stock} <= study.too_big:
        return f"Keep {name}: nothing else here fits."
    plain = next(point for point in study.curves[stock] if point.workers == taken.workers)
    faster = gain(plain, taken.prediction)
    if not too_big and faster < SIMPLER_WITHIN:
        return (
            f"Keep {name}: {'the plan is not' if PLANNED in study.curves else 'nothing asked for here is'} 1 % faster."
        )
    ddp = _ddp_as_fast(study, taken)
    if ddp is not None and not too_big:
        more = gain(plain, ddp)
        if more < SIMPLER_WITHIN:
            return f"Keep {name}: stock DDP is not 1 % faster, and a plan gains nothing more."
        return f"Run stock DDP, {faster_than(more, name)}; a plan gains nothing more."
    made = _command(study, settings, taken)
    what = "the plan" if made else stock_name(taken.label)
    why = f"; {name} does not fit" if too_big else f", {faster_than(faster, name)}"
    return f"Run {what}{why}:\n  {made}" if made else f"Run {what}{why}."


def _ddp_as_fast(study: Study, taken: StudyRow) -> Prediction | None:
    """Stock DDP, where the plan taken in place of what the job runs today gains nothing on it, and it fits."""
    if study.baseline == STOCK or taken.label == STOCK or taken.plan is None or taken.sharded:
        return None
    profile = study.given
    if study.global_batch is not None:
        profile = strong_scaling(profile, study.global_batch, taken.workers, accumulation=study.accumulation)
    row = study_row(STOCK, {"strategy": STOCK}, profile, study.network.at(workers=taken.workers), study)
    return row.prediction if row.fits and gain(row.prediction, taken.prediction) < SIMPLER_WITHIN else None


def _command(study: Study, settings: Settings, taken: StudyRow) -> str:
    """What makes or runs the plan that was predicted; what a framework or stock DDP does needs none."""
    if taken.plan is None or taken.label == STOCK:
        return ""
    if taken.label in settings.plan_files:
        return f"DistributedDataParallel(model, plan={settings.plan_files[taken.label]!r})   # of backbeat.runtime"
    profile = None
    if study.global_batch is not None:
        batch = study.global_batch // taken.workers // (study.accumulation or study.given.accumulation)
        profile = f"PROFILE_AT_BATCH_{batch}" if batch != study.given.batch_size else None
    return settings.plan_command(taken.label, taken.workers, profile)


def _partly(curve: Sequence[Prediction]) -> str:
    """For GPUs that are worth renting only sometimes: when."""
    best, busy = curve[-1], _busy_knee(curve)
    gpus = counted(best.workers, "GPU")
    if busy is not None:
        pays = f"at most {counted(busy, 'GPU')}" if busy > 1 else "none"
        return f"{gpus} only if the cluster is not busy; on a busy one {pays}"
    if best.scaling_factor >= _GOOD:
        return f"{gpus} are worth renting; on a busy cluster only if time matters more than money"
    return f"{gpus} only if time matters more than money"


def _busy_knee(curve: Sequence[Prediction]) -> int | None:
    return knee([point.on_busy for point in curve])


def gain(stock: Prediction, other: Prediction) -> float:
    return stock.iteration_s / other.iteration_s - 1 if other.iteration_s > 0 else 0.0


def faster_than(share: float, name: str) -> str:
    """
    >>> faster_than(0.036, "stock DDP"), faster_than(1.55, "stock DDP")
    ('3.6% faster than stock DDP', '2.5 times as fast as stock DDP')
    """
    return f"{percent(share)} faster than {name}" if share < 1 else f"{1 + share:.1f} times as fast as {name}"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def _work(prediction: Prediction) -> tuple[str, bool]:
    """How many GPUs' work it does: one number, or a range from a busy cluster to a quiet one where these print apart;
    and whether it is a range."""
    low, high = (format_number(prediction.workers * share) for share in load_range(prediction))
    if low != high:
        return f"{low} to {high}", True
    return format_number(prediction.workers * prediction.scaling_factor), False


def _decide_sharding(study: Study, settings: Settings) -> Decision:
    """How to hold the model on the most GPUs, or on as many as are worth it."""
    rows = study.rows_at(study.top)
    taken, verdict, only = chosen(rows), "", ""
    if taken is None:
        return Decision(headline=_nothing_fits(rows), row=None, text="Decision: make it fit first.")
    if study.top == 1:
        text = _sharding_text(study, settings, rows)
    else:
        each = [chosen(study.rows_at(count)) for count in study.workers]
        curve = [row.prediction for row in each if row is not None]
        bend, (worth, verdict) = bend_of(curve), worth_it(curve, _where(study))
        if bend is not None:
            only = f": rent at most {bend} GPUs {_where(study)}"
        elif worth == "partly":
            only = f": {_partly(curve)}"
        text = f"Decision: do not spread this job {_where(study, 'over')}."
        if bend != 1:
            text = _sharding_text(study, settings, rows if bend is None else study.rows_at(bend), only)
    return Decision(headline=_work_headline(rows, taken, verdict), row=taken, text=text)


def _sharding_text(study: Study, settings: Settings, rows: Sequence[StudyRow], only: str = "") -> str:
    """What to do, with the lines to write; `only` is how many GPUs to take where that is not all."""
    taken = chosen(rows)
    assert taken is not None  # there is a chosen row wherever the curve has a point
    stock = next((row for row in rows if row.label == "fsdp" and row.fits), None)
    more = 0.0 if stock is None else gain(stock.prediction, taken.prediction)
    faster = f", {faster_than(more, 'FSDP with a unit for each block')}" if more >= SAME else ""
    if taken.label == STOCK:
        return f"Decision: no need to shard: keep stock DDP{faster}{only}."
    made = indent(_command(study, settings, taken), "  ")
    if not taken.sharded:
        return f"Decision: no need to shard: run {taken.name}{faster}{only}.\n{made}"
    file = settings.plan_files.get(taken.label)
    first = f"Write the plan, then in the training script:\n{made}" if file is None else "In the training script:"
    where = "" if only else f" on {counted(taken.workers, 'GPU')}"
    lines = sharding_lines(file or "plan.json", study.given.optimizer)
    return f"Decision: {taken.name}{where}{faster}{only}. {first}\n{indent(lines, '  ')}"


def _work_headline(rows: Sequence[StudyRow], taken: StudyRow, verdict: str) -> str:
    """How many GPUs' work is done with the row taken, behind a verdict on that, and what does not fit."""
    large = [row.name for row in rows if not row.fits]
    listed = " and ".join([", ".join(large[:-1]), large[-1]]) if len(large) > 1 else "".join(large)
    said = f" {listed} {'do' if len(large) > 1 else 'does'} not fit." if large else ""
    work, ranged = _work(taken.prediction)
    work += ", from a busy cluster to a quiet one" if ranged else ""
    do = "does" if taken.workers == 1 else "do"
    memory = f",{_memory(taken)}" if taken.peak_bytes else ""
    first = f"{verdict}: with" if verdict else "With"
    return f"{first} {taken.name}, {counted(taken.workers, 'GPU')} {do} the work of {work}{memory}.{said}"


def sharding_headline(rows: Sequence[StudyRow]) -> str:
    """DDP, FSDP or HSDP, in one line."""
    taken = chosen(rows)
    return _nothing_fits(rows) if taken is None else f"{capitalised(taken.name)}: {_step(taken)}{_memory(taken)}."


def sharding_sentences(rows: Sequence[StudyRow]) -> list[str]:
    """Why: every other sharding beside the one taken."""
    taken = chosen(rows)
    said = [_against(row, taken) for row in rows if row is not taken]
    if rows and all(row.fit is None for row in rows):
        said.append("Whether they fit is not known: the profile or the device's entry has no memory figures.")
    return said


def _nothing_fits(rows: Sequence[StudyRow]) -> str:
    least = min(rows, key=lambda row: row.peak_bytes or 0)
    assert least.fit is not None
    return (
        f"Nothing fits one {least.fit.device} of {format_bytes(least.fit.device_bytes)}: {least.name} takes least, "
        f"{format_bytes(least.fit.peak_bytes)}. Take more GPUs, a smaller batch, or `backbeat plan --strategy sharded "
        "--memory`, which recomputes."
    )


def _against(row: StudyRow, taken: StudyRow | None) -> str:
    name = capitalised(row.name)
    if row.fit is not None and not row.fits:
        peak, whole = format_bytes(row.fit.peak_bytes), format_bytes(row.fit.device_bytes)
        return f"{name} needs {peak}, one {row.fit.device} has {whole}: too much."
    assert taken is not None  # only where nothing fits is none chosen
    slower = gain(row.prediction, taken.prediction)
    if slower >= 1:
        pace = f"takes {1 + slower:.1f} times as long"
    elif abs(slower) < SAME:
        pace = "is as fast"
    else:
        pace = f"is {abs(slower):.1%} {'slower' if slower > 0 else 'faster, for more to set up'}"
    return f"{name} {'' if row.fit is None else 'fits and '}{pace} ({_step(row)})."


def _step(row: StudyRow) -> str:
    return f"{format_seconds(row.prediction.iteration_s)} a step"


def _memory(row: StudyRow) -> str:
    whole = "" if row.fit is None else f" of the {format_bytes(row.fit.device_bytes)} of one {row.fit.device}"
    return f" in {format_bytes(row.peak_bytes)}{whole}" if row.peak_bytes else ""


def decide_on_plan(
    made: Plan, result: Prediction, stock: Prediction, fit: DeviceFit | None, lines: str, *, written: bool
) -> str:
    """What to do with one plan: the `lines` to write, unless it cannot run or gains nothing."""
    if fit is not None and not fit.fits:
        wider = "" if made.sharding is not None else " `--strategy sharded` plans what does."
        return f"Decision: do not run it, it does not fit.{wider}"
    if made.dynamic is not None:
        return f"Decision: compare with it; nothing runs a plan of {made.strategy}. `--strategy best` plans what runs."
    if result.workers == 1:
        return _ALONE
    saves = made.sharding is not None or (made.memory is not None and not made.memory.keeps_all)
    if not saves and stock.iteration_s < result.iteration_s * (1 + SIMPLER_WITHIN):
        return "Decision: keep stock DDP, the plan is not 1 % faster."
    what = "it saves memory, not time" if stock.iteration_s < result.iteration_s else "run it"
    first = "In" if written else "Write it with -o plan.json, then in"
    return f"Decision: {what}. {first} the training script:\n{indent(lines, '  ')}"
