"""Which cases fit a time budget, how often each is repeated, and where the curve gets more points.

Every decision is taken from numbers that all ranks share (`Bench.largest_over_ranks`), so that ranks never part ways.
Cases are sampled in rounds, each in another order, so that a slow drift of the machine touches all sizes alike.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from backbeat.cost.curve import Curve
from backbeat.cost.samples import Timing, summarise
from backbeat.measure.network.case import Case, Series

REPEATS = 8
"""A case is taken only if this many samples of it fit."""
FEWEST_REPEATS = 5
"""Only where the machine turned out slower than its first samples said; a note names it."""
BRIEF_REPEATS = 3
"""In place of both for a job that waits: large messages a few times before small ones get many."""
MOST_REPEATS = 400
STABLE = 0.01
"""A median is good enough once its 95 % confidence interval is within this share of it."""

# Of the budget that the obligatory repeats may take; the rest absorbs estimates that were too low.
_SAFE_SHARE = 0.8
# Small messages are cheap and jitter most: each is sampled several times in a round.
_MOST_PER_ROUND = 16
_TRIES = 3

# Where a library changes its protocol, time jumps with size. Over a jump the line between two sizes is wrong by as much
# as the jump is high; each further point about halves the interval in which it can be.
_STEEP = 2.5
"""Times the link's seconds per byte; what rises faster than this is no transfer."""
_HIGH = 0.08
"""Share of the larger size's time that rises so."""
_MOST = 6
_POINTS = 3
"""Further points for each jump."""
_POSITION = 0.45
"""Of the interval. Not its middle, where sizes are held out to check the curve."""
_SAMPLES = 24
SHARE = 0.1
"""Of the budget, for all of them, at most."""


class Sampler(Protocol):
    def sample(self, case: Case) -> float: ...
    def largest_over_ranks(self, values: Sequence[float]) -> list[float]: ...
    def elapsed(self) -> float: ...


Progress = Callable[[str, float], None]
"""Called with what is being measured and the share of the budget used so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOutcome:
    """The timings of the cases that fitted, and the cases that did not."""

    timings: dict[Case, Timing]
    dropped: tuple[Case, ...]
    stable: bool
    elapsed_s: float


def sample_cases(
    sampler: Sampler, series: Sequence[Series], budget_s: float, progress: Progress, *, brief: bool = False
) -> SamplingOutcome:
    """Time every case that fits the budget, `REPEATS` times or, if `brief`, fewer; more often while there is time."""
    run = _Sampling(sampler, series, budget_s, progress, brief)
    spare = 0.0
    for one in series:
        allowed = one.share * budget_s * _SAFE_SHARE + spare
        spare = max(0.0, allowed - run.choose(one, allowed))
    samples = run.repeat()
    timings = {case: summarise(taken) for case, taken in samples.items()}
    return SamplingOutcome(
        timings=timings,
        dropped=tuple(case for one in series for case in one.cases if case not in timings),
        stable=all(timing.uncertainty <= STABLE for timing in timings.values()),
        elapsed_s=sampler.largest_over_ranks([sampler.elapsed()])[0],
    )


class _Sampling:
    """One run of `sample_cases`: the cases of each series that fit, and then their rounds."""

    def __init__(
        self, sampler: Sampler, series: Sequence[Series], budget_s: float, progress: Progress, brief: bool
    ) -> None:
        self._sampler, self._series, self._budget_s = sampler, series, budget_s
        self._progress, self._brief = progress, brief
        self._kept: list[list[Case]] = []
        """Of each series."""
        self._cost: dict[Case, float] = {}
        """What one sample costs, all told."""

    def choose(self, series: Series, allowed_s: float) -> float:
        """Keep cases in order until the next one's repeats would no longer fit; the seconds that their repeats take.
        Each is run twice: the first run warms it up."""
        chosen: list[Case] = []
        self._kept.append(chosen)
        used, runs = 0.0, (BRIEF_REPEATS if self._brief else REPEATS) + 2
        for case in series.cases:
            obliged = len(chosen) < series.least
            if not obliged and used + self._expected(case, chosen) * runs > allowed_s:
                break
            self._show(f"first {case}")
            self._sampler.sample(case)
            seconds = self._first(case, (allowed_s - used) / runs)
            if not obliged and used + seconds * runs > allowed_s:
                break
            self._cost[case] = seconds
            used += seconds * runs
            chosen.append(case)
        return used

    def _show(self, what: str) -> None:
        share = min(1.0, self._sampler.elapsed() / self._budget_s) if self._budget_s > 0 else 1.0
        self._progress(what, share)

    def _expected(self, case: Case, before: Sequence[Case]) -> float:
        """What a case may take at most: by those before it, or for the first by those of other series."""
        size, cost = _volume(case), self._cost
        last = before[-1] if before else max((one for one in cost if _volume(one) <= size), key=_volume, default=None)
        if last is None:
            return 0.0
        proportional = cost[last] * size / _volume(last)
        # No case exceeds this by more than noise. Where time is mostly latency it grows far more slowly: a brief run
        # extrapolates from the two cases before it.
        if not self._brief or len(before) < 2 or _volume(last) <= _volume(before[-2]):
            return proportional
        slope = max(cost[last] - cost[before[-2]], 0.0) / (_volume(last) - _volume(before[-2]))
        return min(cost[last] + slope * (size - _volume(last)), proportional)

    def _first(self, case: Case, limit_s: float) -> float:
        """What one sample costs; the least of a few where it was over the limit, since it may be bad luck."""
        least = float("inf")
        for _ in range(_TRIES):
            begun = self._sampler.elapsed()
            self._sampler.sample(case)
            (seconds,) = self._sampler.largest_over_ranks([self._sampler.elapsed() - begun])
            least = min(least, seconds)
            if least <= limit_s:
                break
        return least

    def repeat(self) -> dict[Case, list[float]]:
        """All samples of the cases kept, taken in rounds."""
        samples: dict[Case, list[float]] = {case: [] for cases in self._kept for case in cases}
        order = random.Random(0)  # the same on every rank
        collecting = gc.isenabled()
        gc.disable()
        try:
            while True:
                turns = [
                    case
                    for one, cases in zip(self._series, self._kept, strict=True)
                    for case in cases
                    for _ in range(max(1, min(_MOST_PER_ROUND, int(one.round_s / max(self._cost[case], 1e-9)))))
                ]
                order.shuffle(turns)
                self._show(f"{len(samples)} cases, {min(len(taken) for taken in samples.values())} repeats")
                agreed = self._sampler.largest_over_ranks(
                    [*(self._sampler.sample(case) for case in turns), self._sampler.elapsed()]
                )
                for case, seconds in zip(turns, agreed, strict=False):
                    samples[case].append(seconds)
                late = agreed[-1] >= self._budget_s
                if self._finished(samples, late=late):
                    return samples
                if late:
                    self._drop_largest(samples)
        finally:
            if collecting:
                gc.enable()

    def _finished(self, samples: dict[Case, list[float]], *, late: bool) -> bool:
        counts = [len(taken) for taken in samples.values()]
        if late:
            return min(counts) >= (BRIEF_REPEATS if self._brief else FEWEST_REPEATS)
        # Not `BRIEF_REPEATS`: fewer samples do not show that a median is stable.
        if min(counts) < REPEATS:
            return False
        return max(counts) >= MOST_REPEATS or all(summarise(taken).uncertainty <= STABLE for taken in samples.values())

    def _drop_largest(self, samples: dict[Case, list[float]]) -> None:
        """Out of time before the fewest repeats: give up the largest cases, half of each series at a time."""
        for one, cases in zip(self._series, self._kept, strict=True):
            keep = max(one.least, len(cases) // 2)
            for case in cases[keep:]:
                del samples[case]
            del cases[keep:]


def _volume(case: Case) -> float:
    return float(case.bytes * case.messages * (2 if case.paired else 1))


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
    return [pair for _, pair in sorted(found, reverse=True)[:_MOST]]


def refine_jumps(
    sampler: Sampler, timings: Mapping[Case, Timing], budget_s: float, progress: Progress
) -> dict[Case, Timing]:
    """Further all-reduces, where isolated ones jump: each in the part of the interval that rises more."""
    isolated = {case.bytes: one for case, one in timings.items() if case == Case(bytes=case.bytes)}
    times = {size: timing.median_s for size, timing in isolated.items()}
    uncertainties = {size: timing.median_s * timing.uncertainty for size, timing in isolated.items()}
    found: dict[Case, Timing] = {}
    (now,) = sampler.largest_over_ranks([sampler.elapsed()])
    until = now + SHARE * budget_s
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
