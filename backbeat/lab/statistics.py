"""How wrong predictions are: median, 95th percentile and worst of the absolute errors, by what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backbeat.measure.robust import quantile

if TYPE_CHECKING:
    from backbeat.lab.records import Outcome

REPEATS_WITHIN = 0.02
"""Cases whose two series differ by more say more about the instrument than about the prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Absolute errors of a set of cases, as shares."""

    cases: int
    median: float
    p95: float
    worst: float
    bias: float
    """Median of the signed errors: above zero where predictions are too slow."""


def errors(signed: Sequence[float]) -> Errors | None:
    """
    >>> errors([0.01, -0.02, 0.03])
    Errors(cases=3, median=0.02, p95=0.029, worst=0.03, bias=0.01)
    """
    if not signed:
        return None
    absolute = sorted(abs(one) for one in signed)
    return Errors(
        cases=len(absolute),
        median=quantile(absolute, 0.5),
        p95=round(quantile(absolute, 0.95), 12),
        worst=absolute[-1],
        bias=quantile(sorted(signed), 0.5),
    )


def kind(plan: str) -> str:
    """A plan's kind: its strategy, whatever its sizes and channels."""
    return plan.partition("/")[0].partition(":")[0]


def steady(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that repeat."""
    return [outcome for outcome in outcomes if outcome.repeat <= REPEATS_WITHIN]


def grouped(outcomes: Sequence[Outcome], key: Callable[[Outcome], Any]) -> dict[Any, list[Outcome]]:
    found: dict[Any, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(key(outcome), []).append(outcome)
    return dict(sorted(found.items()))


def summary(outcomes: Sequence[Outcome], moved: Sequence[Outcome] = ()) -> dict[str, Any]:
    """Errors over all cases and over those that repeat, in total and by setting, model, kind of plan and channels.

    `moved` are the cases predicted from a calibration of fewer nodes.
    """

    def both(chosen: Sequence[Outcome]) -> dict[str, Errors | None]:
        return {
            "steady": errors([outcome.error for outcome in steady(chosen)]),
            "all": errors([outcome.error for outcome in chosen]),
        }

    def by(key: Callable[[Outcome], Any], chosen: Sequence[Outcome]) -> dict[str, dict[str, Errors | None]]:
        return {str(name): both(members) for name, members in grouped(chosen, key).items()}

    one_channel = [outcome for outcome in outcomes if outcome.channels == 1]
    repeats = sorted(outcome.repeat for outcome in outcomes)
    return {
        "cases": len(outcomes),
        "repeat": {"median": quantile(repeats, 0.5), "p95": quantile(repeats, 0.95), "worst": repeats[-1]}
        if repeats
        else None,
        "one channel": both(one_channel),
        "several channels": both([outcome for outcome in outcomes if outcome.channels > 1]),
        "by setting": by(lambda outcome: outcome.setting, one_channel),
        "by session": by(lambda outcome: f"{outcome.setting} session {outcome.session + 1}", one_channel),
        "by model": by(lambda outcome: outcome.model, one_channel),
        "by plan": by(lambda outcome: kind(outcome.plan), one_channel),
        "several channels by plan": by(
            lambda outcome: f"{outcome.setting} session {outcome.session + 1} {kind(outcome.plan)}",
            [one for one in outcomes if one.channels > 1],
        ),
        "from fewer nodes": by(lambda outcome: outcome.setting, [one for one in moved if one.channels == 1]),
    }


def speedups(outcomes: Sequence[Outcome], over: str) -> dict[str, dict[str, float]]:
    """Measured iteration time of `over` divided by that of each other plan, by setting and model."""
    found: dict[str, dict[str, float]] = {}
    for (setting, model, session), members in grouped(
        outcomes, lambda one: (one.setting, one.model, one.session)
    ).items():
        base = next((one.measured_s for one in members if one.plan == over), None)
        if base is not None:
            found[f"{setting} session {session + 1} {model}"] = {one.plan: base / one.measured_s for one in members}
    return found
