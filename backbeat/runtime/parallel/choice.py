"""The candidate that `parallelize(plan="auto")` takes: which are worth trying, which is taken, and why, in words."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

from backbeat.errors import InputError
from backbeat.model import Network, Profile
from backbeat.model.rule import PLANS, WAYS, recommended
from backbeat.runtime.parallel.candidates import Candidate
from backbeat.runtime.parallel.trials import Trials
from backbeat.units import format_seconds

MOST_EXTRAPOLATION = 8
"""Where messages may be more than this many times as large as those measured, predictions exclude no candidate."""
LARGE_BYTES = 64 * 2**20
"""Above this size, a message takes its bytes over the link's rate: larger ones need not be measured."""


def extrapolation(network: Network, profile: Profile) -> float:
    """The largest message that the model may send over the largest measured, 1 or more.

    On a slow link calibration runs out of time before large messages. A token bucket or a buffer that lets small ones
    through at once then looks like a fast link.
    """
    curves = [one.points for one in (network.all_reduce, network.all_gather, network.reduce_scatter) if one is not None]
    reached = min((points[-1][0] for points in curves if points), default=LARGE_BYTES)
    return max(min(profile.total_bytes, LARGE_BYTES) / reached, 1.0)


def worth_trying(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Stock DDP and what may beat it; stock DDP alone where the bound leaves nothing to gain.

    A plan that is predicted a little slower may still measure faster, so it is tried where there is anything to gain.
    """
    stock = next((one for one in candidates if one.kind == "stock"), None)
    if stock is None:
        return list(candidates)
    others = [one for one in candidates if one is not stock]
    gains = any(one.predicted_s < stock.predicted_s * (1 - WAYS) for one in others)
    if not gains and _at_bound(stock):
        return [stock]
    return [stock, *(one for one in others if one.predicted_s < stock.predicted_s * (1 + WAYS))]


def simplest(candidates: Sequence[Candidate], seconds: Mapping[str, float], tolerance: float) -> Candidate:
    """The simplest of those that are as fast as the fastest, within the tolerance."""
    known = [one for one in candidates if one.name in seconds]
    within = max(tolerance, PLANS)
    return recommended(known, lambda one: seconds[one.name], lambda one: one.simplicity, within)


def in_words(
    taken: Candidate, seconds: Mapping[str, float], tolerance: float, measured: Collection[str], why: str = ""
) -> str:
    """The line that rank 0 prints: what was taken, what it gains over stock DDP, how far it is from the bound.

    `seconds` holds a step of each candidate by name, those of `measured` as measured, the others as predicted; `why`
    says why not all were measured.
    """
    found_s, stock_s = seconds[taken.name], seconds.get("stock DDP")
    how = "measured" if taken.name in measured else f"predicted{why}"
    text = f"{taken.name}, {format_seconds(found_s)} a step {how}"
    if taken.kind == "stock":
        others = [name for name in seconds if name != taken.name]
        best = min(others, key=lambda name: seconds[name], default=None)
        if best is not None:
            how = "" if taken.name not in measured or best in measured else f", predicted{why}"
            text += f"; {format_seconds(seconds[best])} with {best}{how}"
        if best is not None and seconds[best] < found_s and tolerance < math.inf:
            off = "turns may differ by" if best in measured else "predictions may be off by"
            gain = f"the {tolerance:.1%} that {off}" if tolerance > PLANS else f"{PLANS:.0%}"
            text += f", no gain beyond {gain}"
    elif stock_s is not None:
        how = " measured" if "stock DDP" in measured and taken.name not in measured else ""
        text += f", {stock_s / found_s:.2f} times as fast as stock DDP ({format_seconds(stock_s)}{how})"
    else:
        text += "; stock DDP does not run here"
    if taken.bound_s <= 0:
        return text
    over = found_s / taken.bound_s - 1
    if taken.kind == "stock" and len(seconds) == 1 and _at_bound(taken):
        return f"{text}; by prediction the bound leaves nothing to gain"
    bound = f"the bound of {format_seconds(taken.bound_s)}"
    if over < -PLANS:
        # The bound is computation or the link.
        waited_s = (taken.plan.predicted and taken.plan.predicted.exposed_s) or 0.0
        steps = found_s < taken.predicted_s - waited_s
        what, when = ("steps", "the example was timed") if steps else ("messages", "the network was measured")
        return f"{text}; less than {bound}: {what} were slower while {when}"
    return f"{text}; {max(over, 0):.0%} over {bound}"


def _at_bound(stock: Candidate) -> bool:
    return stock.predicted_s <= stock.bound_s * (1 + PLANS)


def decide(
    tried: Sequence[Candidate],
    trials: Trials,
    no_memory: str | None = None,
    extrapolated: float = 1.0,
    excluded: Sequence[Candidate] = (),
) -> tuple[Candidate, str]:
    """The candidate to take, and the line that says why. Raises where none ran.

    What was measured decides. Where time or memory allowed fewer than two trials, predictions decide: after one trial,
    as far as they were right about that one.

    no_memory: why there were no trials, where memory allowed none (`preserve.room_for`).
    extrapolated: how far predictions go beyond the messages measured (`extrapolation`). Predictions that rest on much
        smaller messages take what is simplest.
    excluded: candidates that were predicted to be too slow to try (`worth_trying`).
    """
    left = [one for one in tried if one.name not in trials.dropped]
    if not left:
        raise InputError("parallelize: nothing ran: " + "; ".join(f"{k}: {v}" for k, v in trials.dropped.items()))
    measured, tolerance, why = trials.best_s, trials.repeatability, ""
    seconds: Mapping[str, float] = measured
    untried = [one.name for one in left if one.name not in measured]
    if untried and len(measured) > 1:
        left = [one for one in left if one.name in measured]
    elif untried:
        scale = next((measured[one.name] / one.predicted_s for one in left if one.name in measured), 1.0)
        seconds = {one.name: one.predicted_s * scale for one in left}
        tolerance = math.inf if extrapolated > MOST_EXTRAPOLATION else max(WAYS, scale - 1, 1 / scale - 1)
        why = "" if len(tried) == 1 else f" ({no_memory or 'no time was left to try all; budget_s= gives more'})"
    taken = simplest(left, seconds, tolerance)
    words = in_words(taken, seconds, tolerance, measured, why)
    if len(tried) == 1 and excluded and not _at_bound(taken):
        best = min(excluded, key=attrgetter("predicted_s"))
        words += (
            f"; nothing else was tried: {best.name} is predicted to take {format_seconds(best.predicted_s)}, "
            f"{taken.name} {format_seconds(taken.predicted_s)}"
        )
    if untried and len(measured) > 1:
        words += f"; no time was left to try {' and '.join(untried)}; budget_s= gives more"
    if extrapolated > MOST_EXTRAPOLATION:
        simply = ", too far to take more than the simplest" if tolerance == math.inf else ""
        words += (
            f"; predictions are extrapolated to messages {extrapolated:.0f} times as large as measured{simply}, "
            "budget_s= gives more"
        )
    for name, reason in trials.dropped.items():
        words += f"; {name} was dropped, {reason}"
    return taken, words
