"""Which cases fit a time budget, and how often each is repeated.

Every decision is taken from numbers that all ranks share (`Bench.largest_over_ranks`), so that ranks never part ways.
Cases are sampled in rounds, each in another order, so that a slow drift of the machine touches all sizes alike.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
