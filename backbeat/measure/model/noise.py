"""Whether other work on the machine disturbed a measurement, and what it says when it is repeated.

Other work makes an iteration longer, never shorter. So of several measurements the quickest is nearest to what the
model takes, and it is a figure to go on if another one came out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from backbeat.errors import MeasurementError
from backbeat.measure.model.observation import Figures, Hooked
from backbeat.units import format_seconds

MOST_HOOKED = 1.5
"""With hooks, forward and backward take at most this many times the plain ones, and at least the inverse. Profiles of
the zoo lie between 0.85 and 1.16."""
WIDEST_BAND = 3.0
"""The ninetieth percentile of the iterations is at most this many times the tenth. Profiles of the zoo reach 1.4."""
FEWEST_JUDGED = 8
"""Fewer iterations than this say too little of their spread."""
SHORTEST_JUDGED_S = 1e-3
"""Of forward and backward: in less, the hooks themselves are much of the time."""
MEASURED_TURNS = 3
"""How often a measurement is taken that was disturbed each time, or that contradicts another."""
AGREE = 1.25
"""Two measurements agree where the longer takes at most this many times the shorter."""
WHAT_TO_DO = (
    "stop what else runs on it and profile again, or go on with such a profile by --accept-noise (accept_noise=True)"
)


def band(iteration_s: Sequence[float]) -> tuple[float, float]:
    """From the tenth to the ninetieth percentile of the iterations; at least one is left out at either end.

    >>> band([5, 1, 2, 3, 4, 9, 3, 3])
    (2, 5)
    >>> band([1, 2])
    (1, 2)
    """
    ordered = sorted(iteration_s)
    left_out = max(1, len(ordered) // 10) if len(ordered) > 2 else 0
    return ordered[left_out], ordered[-1 - left_out]


def noise(iteration_s: Sequence[float], plain_s: float, overhead: float) -> str | None:
    """What was wrong with a measurement, and how much; None where nothing was, or where it is too short to say.

    `overhead` is what forward and backward take with hooks, over the `plain_s` they take without.
    """
    if len(iteration_s) < FEWEST_JUDGED or plain_s < SHORTEST_JUDGED_S:
        return None
    low, high = band(iteration_s)
    if high > WIDEST_BAND * low:
        return (
            f"iterations took from {format_seconds(low)} to {format_seconds(high)} (10 to 90 %), "
            f"{high / low:.1f} times as long where {WIDEST_BAND:g} is the most"
        )
    return _hooks_beside(plain_s, overhead)


def steady(take: Callable[[], Figures], *, accept: bool, turns: int = MEASURED_TURNS) -> tuple[Figures, str | None]:
    """A measurement that nothing disturbed, taken again where the first was not; or the quickest of several, with a
    note that says how far they were apart, where another agrees with it.

    With `accept` the first is kept as it is, with a note.
    """
    taken: list[Figures] = []
    found: str | None = None
    while len(taken) < turns:
        taken.append(take())
        found = noise(taken[-1].iteration_s, taken[-1].plain_s, taken[-1].overhead)
        if found is None:
            return taken[-1], None
        if accept:
            return taken[-1], f"noise accepted: {found}; predictions are as uncertain"
    ordered = sorted(taken, key=lambda one: one.plain_s)
    quickest = replace(ordered[0], hooked=_quickest_hooked(ordered))
    why = _hooks_beside(quickest.plain_s, quickest.overhead)
    times = f"{turns} measurements gave {from_to([one.plain_s for one in ordered])} for forward and backward"
    if why is None and turns > 1 and agree([one.plain_s for one in ordered]):
        return quickest, f"the machine was busy: {found}; {times}, and the quickest is kept: idle, it may take less"
    again = f"{why or times}; " if turns > 1 else ""
    raise MeasurementError(f"the machine was busy: {found}; {again}{WHAT_TO_DO}")


def agree(seconds: Sequence[float]) -> bool:
    """Whether another measurement agrees with the quickest; one alone is taken as it is.

    >>> agree([1.0]), agree([3.0, 1.0, 1.2]), agree([1.0, 2.0, 2.1])
    (True, True, False)
    """
    quickest, *others = sorted(seconds)
    return not others or others[0] <= AGREE * quickest


def from_to(seconds: Sequence[float]) -> str:
    return f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"


def _hooks_beside(plain_s: float, overhead: float) -> str | None:
    if 1 / MOST_HOOKED <= overhead <= MOST_HOOKED:
        return None
    return (
        f"with hooks, forward and backward took {overhead:.3g} times the plain {format_seconds(plain_s)}, "
        f"where {1 / MOST_HOOKED:.2g} to {MOST_HOOKED:g} is sound"
    )


def _quickest_hooked(ordered: Sequence[Figures]) -> Hooked:
    """Of those that found the host as far ahead of the device as the quickest did: shares depend on that."""
    kinds = [one.launch_bound and one.launch_bound.kind for one in ordered]
    alike = [one.hooked for one, kind in zip(ordered, kinds, strict=True) if kind == kinds[0]]
    return min(alike, key=lambda one: one.forward_s + one.backward_s)
