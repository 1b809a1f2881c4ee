"""Where time jumps between two sizes, and the further points that the curve gets there.

Where a library changes its protocol, time jumps with size. Over a jump the line between two sizes is wrong by as much
as the jump is high; each further point about halves the interval in which it can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from backbeat.cost.curve import Curve
from backbeat.cost.samples import Timing, summarise
from backbeat.measure.network.case import Case
from backbeat.measure.network.sampling import FEWEST_REPEATS, Progress, Sampler

_STEEP = 2.5
"""Times the link's seconds per byte; what rises faster than this is no transfer."""
_HIGH = 0.08
"""Share of the larger size's time that rises so."""
_MOST_JUMPS = 6
_POINTS = 3
"""Further points for each jump."""
_POSITION = 0.45
"""Of the interval. Not its middle, where sizes are held out to check the curve."""
_SAMPLES = 24
"""Of each further point, at most."""
BUDGET_SHARE = 0.1
"""What all further points may take of the budget."""


def jumps(times: Mapping[int, float], uncertainties: Mapping[int, float] | None = None) -> list[tuple[int, int]]:
    """Neighbouring sizes between which time jumps, the highest first; `uncertainties`: how far each time may be off.

    >>> jumps({2**10: 1e-4, 2**14: 1e-4, 2**15: 2e-4, 2**20: 1e-3, 2**22: 4e-3, 2**24: 16e-3})
    [(16384, 32768)]
    """
    if len(times) < 2:
        return []
    rising = sorted(times.items())
    link = Curve.through(rising).link_s_per_byte
    found = []
    for (small, before), (large, after) in pairwise(rising):
        rise, carried = after - before, link * (large - small)
        uncertainty_s = 0.0 if uncertainties is None else uncertainties[small] + uncertainties[large]
        if rise > _STEEP * carried and rise - carried > max(_HIGH * after, uncertainty_s) and large - small >= 8:
            found.append(((rise - carried) / after, (small, large)))
    return [pair for _, pair in sorted(found, reverse=True)[:_MOST_JUMPS]]


def refine_jumps(
    sampler: Sampler, timings: Mapping[Case, Timing], budget_s: float, progress: Progress
) -> dict[Case, Timing]:
    """Further all-reduces, where isolated ones jump: each in the part of the interval that rises more."""
    isolated = {case.bytes: one for case, one in timings.items() if case == Case(bytes=case.bytes)}
    times = {size: timing.median_s for size, timing in isolated.items()}
    uncertainties = {size: timing.median_s * timing.uncertainty for size, timing in isolated.items()}
    found: dict[Case, Timing] = {}
    (now,) = sampler.largest_over_ranks([sampler.elapsed()])
    until = now + BUDGET_SHARE * budget_s
    for small, large in jumps(times, uncertainties):
        low, high = small, large
        for _ in range(_POINTS):
            size = (low + round((high - low) * _POSITION)) // 4 * 4
            # The first warms up; none takes longer than the larger size.
            samples = min(_SAMPLES, int((until - now) / max(times[high], 1e-9)) - 1)
            if not low < size < high or samples < FEWEST_REPEATS:
                break
            case = Case(bytes=size)
            progress(f"closer {case}", 1.0)
            sampler.sample(case)
            *taken, now = sampler.largest_over_ranks(
                [*(sampler.sample(case) for _ in range(samples)), sampler.elapsed()]
            )
            found[case] = summarise(taken)
            times[size] = found[case].median_s
            low, high = (low, size) if times[size] - times[low] > times[high] - times[size] else (size, high)
    return found
