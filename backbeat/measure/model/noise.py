"""Whether a measurement is steady enough to decide by: a machine that does other work at the same time shows in it."""

from __future__ import annotations

from collections.abc import Sequence

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
    if not 1 / MOST_HOOKED <= overhead <= MOST_HOOKED:
        return (
            f"with hooks, forward and backward took {overhead:.3g} times the plain {format_seconds(plain_s)}, "
            f"where {1 / MOST_HOOKED:.2g} to {MOST_HOOKED:g} is sound"
        )
    return None
