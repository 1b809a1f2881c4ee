"""Candidates of `parallelize(plan="auto")`: plans predicted (`predicted_candidates`), and the one taken (`decide`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec
import torch

from backbeat.api import plan as make_plan
from backbeat.errors import BackbeatError, InputError
from backbeat.model import Network, Plan, PlanPrediction, Profile
from backbeat.model.reduction import REDUCTIONS
from backbeat.planners import BUDGETED
from backbeat.planners.best import SIMPLER_WITHIN
from backbeat.runtime.parallel.trials import Trials
from backbeat.simulate import predict
from backbeat.units import counted, format_seconds

SHARDED_KINDS = ("units", "copies")
"""Units of one sharded copy of the model, and of several: HSDP."""
KINDS = ("stock", "buckets", *SHARDED_KINDS, "compressed")
"""From the simplest to the one that changes most."""
STOCK = REDUCTIONS["torch-ddp"]
UNITS = ("zero2", "hsdp", "fsdp", "decoupled", "sharded")
FARTHEST = 8
"""Where messages may be more than this many times as large as those measured, predictions exclude no candidate."""
PREDICTED = 0.05
"""A gain that is only predicted counts beyond this share: predictions of different kinds are off by as much."""
LARGE_BYTES = 64 * 2**20
"""Above this size, a message takes its bytes over the link's rate: larger ones need not be measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    kind: str
    plan: Plan

    @property
    def _predicted(self) -> PlanPrediction:
        return self.plan.predicted or PlanPrediction()

    @property
    def predicted_s(self) -> float:
        return self._predicted.iteration_s or 0.0

    @property
    def bound_s(self) -> float:
        return self._predicted.bound_s or 0.0

    @property
    def name(self) -> str:
        """In words."""
        plan = self.plan
        if self.kind == "stock":
            return "stock DDP"
        recomputed = plan.memory is not None and not plan.memory.keeps_all
        ending = " within the memory budget" if recomputed else ""
        if plan.sharding is not None:
            dtype = plan.sharding.param_dtype
            gathered = "" if dtype == "fp32" else f", parameters in {dtype}"
            units = counted(len(plan.sharding.units), "unit")
            return f"{units} of {plan.strategy} on {plan.sharding.mesh}{gathered}{ending}"
        compressed = ", some compressed," if plan.compressed else ""
        on = counted(plan.communicators, "communicator")
        return f"{counted(len(plan.buckets), 'bucket')}{compressed} of {plan.strategy} on {on}{ending}"


def predicted_candidates(
    profile: Profile,
    network: Network,
    *,
    memory_bytes: int | None,
    compression: bool,
    communicators: int | None,
    units: bool = True,
) -> list[Candidate]:
    """The best by prediction of each kind, stock DDP first. Raises where nothing fits the memory.

    units: False where ranks use different parameters. FSDP2 gathers a unit on the ranks that call it, and ranks that
        call different ones would wait for each other, or take each other's weights.

    Predictions of one kind share their errors. So one candidate of each of two kinds says more than two of one kind.
    """
    found: list[Candidate] = []
    why: dict[str, str] = {}

    def add(kind: str, strategy: str, **choices: Any) -> None:
        try:
            plan = make_plan(profile, network, strategy, **choices)
        except BackbeatError as error:
            why[strategy] = str(error)
            return
        several = plan.sharding is not None and plan.sharding.mesh.replicate > 1
        found.append(Candidate(kind="copies" if several else kind, plan=plan))

    add("stock", "ddp", memory_bytes=memory_bytes)
    add("buckets", "best", communicators=communicators, memory_bytes=memory_bytes)
    version = _release(torch.__version__)
    if not units:
        why["sharded"] = "ranks use different parameters, and FSDP2 must gather the same units on all"
    for strategy in unit_strategies(network) if units else ():
        choices = {"memory_bytes": memory_bytes, "torch_version": version} if strategy in BUDGETED else {}
        add("units", strategy, **choices)
    if compression:
        add("compressed", "compressed", communicators=communicators, memory_bytes=memory_bytes)
    fitting = [
        _as_stock(one, profile, network) if one.kind == "stock" else one
        for one in found
        # A plan that may compress is one of buckets where it does not.
        if _fits(one, memory_bytes) and (one.kind != "compressed" or one.plan.compressed)
    ]
    if not fitting:
        raise InputError(
            "; ".join(f"{strategy}: {why[strategy]}" for strategy in ("best", "sharded") if strategy in why)
        )
    best = {
        kind: min((one for one in fitting if one.kind == kind), key=attrgetter("predicted_s"), default=None)
        for kind in KINDS
    }
    stock, planned = best["stock"], best["buckets"]
    if stock is not None and planned is not None and stock.plan.buckets == planned.plan.buckets:
        best["buckets"] = None
    return [one for one in best.values() if one is not None]


def unit_strategies(network: Network) -> list[str]:
    """Those that may be predicted for it, the ones planned quickest first."""
    within = 1 < network.topology.gpus_per_node < network.workers
    return [strategy for strategy in UNITS if strategy != "hsdp" or within]


def _release(version: str) -> str:
    """
    >>> _release("2.13.0a0+git12")
    '2.13'
    """
    return ".".join(version.split(".")[:2])


def _fits(candidate: Candidate, memory_bytes: int | None) -> bool:
    """Whether it keeps to the budget; stock DDP does only where all activations may be kept."""
    plan = candidate.plan
    if memory_bytes is None:
        return True
    if candidate.kind == "stock":
        return plan.memory is None or plan.memory.keeps_all
    peak = plan.predicted.peak_bytes if plan.predicted is not None else None
    return peak is None or peak <= memory_bytes


def _as_stock(candidate: Candidate, profile: Profile, network: Network) -> Candidate:
    """Stock DDP runs without a memory plan, and without what the wrapper adds to a step: its status message."""
    found = predict(profile, network, candidate.plan, reduction=STOCK)
    predicted = PlanPrediction.of(found, network.name)
    return Candidate(kind="stock", plan=msgspec.structs.replace(candidate.plan, memory=None, predicted=predicted))


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
    gains = any(one.predicted_s < stock.predicted_s * (1 - SIMPLER_WITHIN) for one in others)
    if not gains and _at_bound(stock):
        return [stock]
    return [stock, *(one for one in others if one.predicted_s < stock.predicted_s * (1 + 5 * SIMPLER_WITHIN))]


def simplest(candidates: Sequence[Candidate], seconds: Mapping[str, float], tolerance: float) -> Candidate:
    """The simplest of those that are as fast as the fastest, within the tolerance."""
    known = [one for one in candidates if one.name in seconds]
    limit = min(seconds[one.name] for one in known) * (1 + max(tolerance, SIMPLER_WITHIN))
    equal = [one for one in known if seconds[one.name] <= limit]
    return min(equal, key=lambda one: (KINDS.index(one.kind), seconds[one.name]))


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
            gain = f"the {tolerance:.1%} that {off}" if tolerance > SIMPLER_WITHIN else f"{SIMPLER_WITHIN:.0%}"
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
    if over < -SIMPLER_WITHIN:
        # The bound is computation or the link.
        waited_s = (taken.plan.predicted and taken.plan.predicted.exposed_s) or 0.0
        steps = found_s < taken.predicted_s - waited_s
        what, when = ("steps", "the example was timed") if steps else ("messages", "the network was measured")
        return f"{text}; less than {bound}: {what} were slower while {when}"
    return f"{text}; {max(over, 0):.0%} over {bound}"


def _at_bound(stock: Candidate) -> bool:
    return stock.predicted_s <= stock.bound_s * (1 + SIMPLER_WITHIN)


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
    measured, tolerance, why = trials.measured, trials.repeatability, ""
    seconds: Mapping[str, float] = measured
    untried = [one.name for one in left if one.name not in measured]
    if untried and len(measured) > 1:
        left = [one for one in left if one.name in measured]
    elif untried:
        scale = next((measured[one.name] / one.predicted_s for one in left if one.name in measured), 1.0)
        seconds = {one.name: one.predicted_s * scale for one in left}
        tolerance = math.inf if extrapolated > FARTHEST else max(PREDICTED, scale - 1, 1 / scale - 1)
        why = "" if len(tried) == 1 else f" ({no_memory or 'no time was left to try all; budget_s= gives more'})"
    taken = simplest(left, seconds, tolerance)
    words = in_words(taken, seconds, tolerance, measured, why)
    if len(tried) == 1 and excluded and not _at_bound(taken):
        best = min(excluded, key=attrgetter("predicted_s"))
        words += f"; all others are predicted to be slower, {format_seconds(best.predicted_s)} with {best.name}"
    if untried and len(measured) > 1:
        words += f"; no time was left to try {' and '.join(untried)}; budget_s= gives more"
    if extrapolated > FARTHEST:
        simply = ", too far to take more than the simplest" if tolerance == math.inf else ""
        words += (
            f"; predictions are extrapolated to messages {extrapolated:.0f} times as large as measured{simply}, "
            "budget_s= gives more"
        )
    for name, reason in trials.dropped.items():
        words += f"; {name} was dropped, {reason}"
    return taken, words
