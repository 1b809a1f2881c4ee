"""Has a running job drifted? Samples of its steps in, alerts in words out.

A figure has a *usual* level: the median of its first samples. It has shifted when several samples in a row lie beyond
that level on the same side, by more than its scatter explains. The shifted level is then the usual one, so that a
second shift, or the way back, is told too. Nothing here reads a clock or a device.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from backbeat.units import format_seconds

LEARNT = 10
"""Samples that make the usual level."""
IN_A_ROW = 5
"""Samples beyond the level before it counts as shifted: one slow step is no drift."""
LEAST = 0.05
"""A shift by less than this share is not told."""
SCATTERS = 4.0
"""Nor one by less than this many times the scatter of the first samples."""
OFF_PREDICTION = 0.15
"""Iterations may differ by this share from the plan's prediction before it is told."""


class StepSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Some steps of a job at one moment, over all ranks: one line of `watch.jsonl`. Medians over the steps sampled."""

    step: int
    own_s: tuple[float, ...]
    """By rank: an iteration without the wait for communication. The largest is the straggler's."""
    iteration_s: float
    exposed_s: float
    """Communication left after the last gradient, on the rank that waits least: the others wait for it too. With units,
    all waits in forward and backward."""
    span_s: float | None = None
    """From the first bucket's launch to the end of the step, on that rank; None where torch alone knows it."""
    transfer_s: float | None = None
    """All buckets' transfers, on the rank that waits least."""
    predicted_iteration_s: float | None = None
    predicted_exposed_s: float | None = None
    predicted_transfer_s: float | None = None
    alerts: tuple[str, ...] = ()

    @property
    def overlap(self) -> float | None:
        """The share of communication that is hidden behind backward; None where it is not known."""
        if self.span_s is None:
            return None
        return 1.0 - min(self.exposed_s / self.span_s, 1.0) if self.span_s > 0 else 1.0

    @property
    def straggler(self) -> int:
        """The rank that takes longest."""
        return max(range(len(self.own_s)), key=lambda rank: self.own_s[rank])

    @property
    def behind(self) -> float:
        """By what share the straggler takes longer than the median rank."""
        typical = statistics.median_low(self.own_s)
        return max(self.own_s) / typical - 1.0 if typical > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Shift:
    """A level that has changed."""

    since_step: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True, slots=True)
class Level:
    """The usual level of one figure, and how it may be changing.

    >>> level, shift = Level(), None
    >>> for step, value in enumerate([1.0] * 12 + [1.2] * 5):
    ...     level, shift = level.after(step, value)
    >>> shift
    Shift(since_step=12, before=1.0, after=1.2)
    """

    first: tuple[float, ...] = ()
    usual: float | None = None
    scatter: float = 0.0
    """Of the first samples around the usual level, as a share of it."""
    beyond: tuple[tuple[int, float], ...] = ()
    """Samples in a row, up to the last one, that lie beyond the level on one side."""

    def after(self, step: int, value: float) -> tuple[Level, Shift | None]:
        """The level once this sample is known, and a shift where it completes one."""
        if self.usual is None:
            return self._learn(value), None
        if abs(value / self.usual - 1.0) <= max(LEAST, SCATTERS * self.scatter):
            return replace(self, beyond=()), None
        same = self.beyond and (self.beyond[-1][1] > self.usual) == (value > self.usual)
        beyond = (*(self.beyond if same else ()), (step, value))
        if len(beyond) < IN_A_ROW:
            return replace(self, beyond=beyond), None
        new = statistics.median(found for _, found in beyond)
        return replace(self, usual=new, beyond=()), Shift(beyond[0][0], self.usual, new)

    def _learn(self, value: float) -> Level:
        first = (*self.first, value)
        if len(first) < LEARNT:
            return replace(self, first=first)
        usual = statistics.median(first)
        if usual <= 0:
            # Nothing to compare with: a figure that is zero so far.
            return replace(self, first=first[1:])
        deviation = statistics.median(abs(one - usual) for one in first)
        # 1.48: what makes the median deviation of normal noise its standard deviation.
        return Level(usual=usual, scatter=1.48 * deviation / usual)


class Drift:
    """Follows a job sample by sample."""

    def __init__(self) -> None:
        self._levels: dict[str | int, Level] = {}
        self._iterations: deque[float] = deque(maxlen=LEARNT + 1)
        """The first ones: enough to compare them with the prediction, once."""

    def after(self, sample: StepSample) -> tuple[str, ...]:
        """What this sample completes, in words; mostly nothing."""
        typical = statistics.median_low(sample.own_s)
        told = [*self._ranks(sample, typical), *self._all_ranks(sample, typical), *self._link(sample)]
        self._iterations.append(sample.iteration_s)
        if len(self._iterations) == LEARNT:
            told += _against_prediction(statistics.median(self._iterations), sample.predicted_iteration_s)
        return tuple(told)

    def _ranks(self, sample: StepSample, typical: float) -> Iterable[str]:
        if len(sample.own_s) < 2 or typical <= 0:
            return
        for rank, own in enumerate(sample.own_s):
            shift = self._shift(rank, sample.step, own / typical)
            if shift is not None and shift.ratio > 1:
                yield f"rank {rank} is {_percent(shift.ratio - 1)} slower since step {shift.since_step}"
            elif shift is not None and shift.after < 1 + LEAST:
                yield f"rank {rank} is as fast as the others again since step {shift.since_step}"

    def _all_ranks(self, sample: StepSample, typical: float) -> Iterable[str]:
        shift = self._shift("own", sample.step, typical)
        if shift is not None:
            word = "slower" if shift.ratio > 1 else "faster"
            size = abs(shift.ratio - 1)
            yield f"every rank computes {_percent(size)} {word} since step {shift.since_step}"

    def _link(self, sample: StepSample) -> Iterable[str]:
        if not sample.transfer_s:
            return
        shift = self._shift("link", sample.step, sample.transfer_s)
        if shift is None:
            return
        if sample.predicted_transfer_s:
            share, base = sample.predicted_transfer_s / shift.after, "of what was calibrated"
        else:
            share, base = 1 / shift.ratio, "of what it gave before"
        yield f"the link gives {_percent(share)} {base} since step {shift.since_step}"

    def _shift(self, name: str | int, step: int, value: float) -> Shift | None:
        self._levels[name], shift = self._levels.get(name, Level()).after(step, value)
        return shift


def _against_prediction(measured: float, predicted: float | None) -> list[str]:
    if not predicted or abs(measured / predicted - 1) <= OFF_PREDICTION:
        return []
    word = "longer" if measured > predicted else "shorter"
    return [
        f"an iteration takes {format_seconds(measured)}, {_percent(abs(measured / predicted - 1))} {word} than the "
        f"{format_seconds(predicted)} predicted"
    ]


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
