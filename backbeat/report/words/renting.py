"""Whether that many GPUs are worth renting, and what to do: the first and the last lines of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Literal

from backbeat.model import Prediction
from backbeat.planners.best import SIMPLER_WITHIN
from backbeat.report.study import STOCK
from backbeat.report.words.device_memory import DeviceFit
from backbeat.report.words.numbers import fastest, format_number, work_range
from backbeat.simulate.predict import knee
from backbeat.units import counted

Verdict = Literal["yes", "partly", "no", "alone", "memory"]

_GOOD = 0.8
"""From this scaling factor on, workers are called worth it without a but."""
_HALF = 0.5
"""From this scaling factor on, an added GPU brings at least half of its own work."""


def judged(
    curves: Mapping[str, Sequence[Prediction]],
    fit: DeviceFit | None = None,
    *,
    stock: str = STOCK,
    too_big: Set[str] = frozenset(),
) -> tuple[Verdict, str]:
    """Whether that many GPUs are worth it, in one sentence.

    `stock` is the curve that others are compared with, where it is among them. Those that are `too_big` do not fit the
    device's memory, and nobody can choose them. `fit` is the fastest's.
    """
    curve = frontier(curves, too_big)
    best = curve[-1]
    top = best.workers
    if fit is not None and not fit.fits:
        return "memory", f"Does not fit: {fit.too_much()}."
    if top == 1:
        return "alone", "One GPU works alone: nothing is communicated."
    worth = f"{counted(top, 'GPU')} do the work of {_work(best)}"
    if " to " in _work(best):
        worth += ", depending on how busy the cluster is"
    if stock in too_big:
        worth += f"; {stock_name(stock)} does not fit the memory"
    elif len(curves) > 1 and stock in curves:
        plain = max(curves[stock], key=lambda point: point.workers)
        worth += f"; {stock_name(stock)} {'too' if best is plain else _work(plain)}"
    verdict, words = worth_it(curve)
    return verdict, f"{words}: {worth}."


def worth_it(curve: Sequence[Prediction]) -> tuple[Verdict, str]:
    """Whether the largest number of GPUs on a curve is worth it, in a few words."""
    bend, best = knee(curve), curve[-1]
    if bend is not None:
        return "no", f"Not worth it {f'beyond {bend} GPUs' if bend > 1 else 'on this network'}"
    good = best.scaling_factor >= _GOOD
    if good and best.on_busy.scaling_factor >= _GOOD:
        return "yes", "Worth it"
    if good or _busy_knee(curve) is not None:
        return "partly", "Worth it unless the cluster is busy"
    return "partly", "Worth it only if time matters more than cost"


def stock_name(label: str) -> str:
    return "stock DDP" if label == STOCK else label


def decision(
    curves: Mapping[str, Sequence[Prediction]],
    fit: DeviceFit | None,
    command: Callable[[Prediction], str],
    *,
    stock_bf16: Prediction | None = None,
    stock: str = STOCK,
    too_big: Set[str] = frozenset(),
) -> str:
    """What to do now. `command` makes the plan that was predicted, and is empty for what is no plan; `stock_bf16` is
    stock DDP with gradients sent as bf16, on the most workers; None where they are already, or where sending is not
    what costs. The rest is as `judged` has it."""
    curve = frontier(curves, too_big)
    best = curve[-1]
    bend = knee(curve)
    verdict, _ = judged(curves, fit, stock=stock, too_big=too_big)
    if verdict == "alone":
        return "Decision: nothing to decide for one GPU; ask for more with --workers."
    chosen = best if bend is None else next((point for point in curve if point.workers == bend), best)
    if verdict == "memory":
        what = "make it fit first: shard it (--strategy fsdp), or let `backbeat plan --memory` choose what to keep"
    elif bend is None:
        what = f"{counted(best.workers, 'GPU')} are worth renting" if verdict == "yes" else partly(curve)
    elif bend > 1:
        busy = _busy_knee(curve) or bend
        what = f"rent at most {bend} GPUs on this network" + (f", {busy} while it is busy" if busy < bend else "")
    else:
        better = stock_bf16 is not None and stock_bf16.scaling_factor >= _HALF
        what = f"do not spread this job over this network{' as it is' if better else ''}"
    lines = [f"Decision: {what}."]
    if bend != 1 and verdict != "memory" and stock in curves:
        plain = next(point for point in curves[stock] if point.workers == chosen.workers)
        alone = len(curves) > 1 and set(curves) - {stock} <= too_big
        lines.append(
            f"Keep {stock_name(stock)}: nothing else here fits."
            if alone
            else _run(stock, plain, chosen, command, too_big=stock in too_big)
        )
    if stock_bf16 is not None and verdict != "memory" and gain(best, stock_bf16) >= SIMPLER_WITHIN:
        lines.append(
            f"With gradients sent as bf16, if training bears it, stock DDP alone is {percent(gain(best, stock_bf16))} "
            f"faster than this: {counted(best.workers, 'GPU')} do the work of "
            f"{_work(stock_bf16)}. Ask again with --reduce-dtype bf16."
        )
    return "\n".join(lines)


def _run(
    stock: str, plain: Prediction, chosen: Prediction, command: Callable[[Prediction], str], *, too_big: bool
) -> str:
    """What to run in place of `plain`, if anything."""
    faster = gain(plain, chosen)
    if not too_big and faster < SIMPLER_WITHIN:
        return f"Keep {stock_name(stock)}: no plan is 1 % faster."
    made = command(chosen)
    what = "the plan" if made else chosen.strategy
    why = f"; {stock_name(stock)} does not fit" if too_big else f", {percent(faster)} faster than {stock_name(stock)}"
    return f"Run {what}{why}:\n  {made}" if made else f"Run {what}{why}."


def partly(curve: Sequence[Prediction]) -> str:
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
    """The knee on a busy cluster."""
    return knee([point.on_busy for point in curve])


def frontier(curves: Mapping[str, Sequence[Prediction]], without: Set[str] = frozenset()) -> list[Prediction]:
    """The fastest at each number of workers, in their order; curves that are `without` do not count."""
    found = fastest([point for label, curve in curves.items() if label not in without for point in curve])
    return [found[count] for count in sorted(found)]


def gain(stock: Prediction, other: Prediction) -> float:
    return stock.iteration_s / other.iteration_s - 1 if other.iteration_s > 0 else 0.0


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def _work(prediction: Prediction) -> str:
    """How many GPUs' work it does: one number, or from a busy cluster to a quiet one where these print apart."""
    low, high = work_range(prediction)
    return f"{low} to {high}" if low != high else format_number(prediction.workers * prediction.scaling_factor)
