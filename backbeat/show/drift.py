"""Has a running job drifted? Samples of its steps in, alerts in words out.

A figure has a *usual* level: the median of its first samples. It has shifted when several samples in a row lie beyond
that level on the same side, by more than its scatter explains. The shifted level is then the usual one, so that a
second shift, or the way back, is told too. The first samples are themselves judged once they make a level: ranks beside
each other, the link and the step beside what was predicted. Nothing here reads a clock or a device.

A rank is *slower* by the share that its own time lies above the median rank's, where an own time is an iteration
without the wait for communication: the median of that share over the last five samples. So it stands in every line of
the file, in the table and in alerts. Everything else that takes longer is said to take *longer than before* or *than
predicted*.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from backbeat.units import format_seconds

LEARNT = 10
"""Samples that make the usual level."""
IN_A_ROW = 5
"""Samples beyond the level before it counts as shifted: one slow step is no drift. As many say how slow a rank is."""
LEAST = 0.05
"""A shift by less than this share is not told."""
SCATTERS = 4.0
"""Nor one by less than this many times the scatter of the first samples."""
SLOW_RANK = 0.10
"""A rank may be slower than the others by this share from the start: what ranks do differs a little."""
SLOW_LINK = 0.25
"""Transfers may take longer than predicted by this share from the start: calibrations are a few seconds long."""
OFF_PREDICTION = 0.15
"""Steps may differ by this share from the plan's prediction before it is told, exposed time by this share of a step."""


class StepSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Some steps of a job at one moment, over all ranks: one line of `watch.jsonl`. Medians over the steps sampled."""

    step: int
    own_s: tuple[float, ...]
    """By rank: an iteration without the wait for communication."""
    slower: tuple[float, ...] = ()
    """By rank: by what share its own time lies above the median rank's, the median over the last five samples. The
    largest is the straggler's."""
    hosts: tuple[str, ...] = ()
    """By rank: its machine."""
    iteration_s: float
    exposed_s: float
    """Communication left after the last gradient, on the rank that waits least: the others wait for it too. With units,
    all waits in forward and backward."""
    span_s: float | None = None
    """From the first bucket's launch to the end of the step, on that rank; None where torch alone knows it."""
    transfer_s: float | None = None
    """The shortest over ranks: all buckets' transfers on a CPU, the last bucket's on a GPU."""
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
        """The slowest rank."""
        return max(range(len(self.own_s)), key=lambda rank: (self.slower or self.own_s)[rank])

    @property
    def behind(self) -> float:
        """How much slower than the others the straggler is."""
        return max(self.slower[self.straggler], 0.0) if self.slower else 0.0

    def name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank]})" if self.hosts else f"rank {rank}"


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
    """Of the samples that made it around the usual level, as a share of it."""
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
        # One that was off by chance before the others is nearer to the level that was.
        since = next(at for at, found in beyond if abs(found - new) <= abs(found - self.usual))
        # A longer time scatters more. Yet the way back must lie beyond that.
        scatter = min(_scatter([found for _, found in beyond], new), abs(1.0 - self.usual / new) / (2 * SCATTERS))
        shifted = Level(usual=new, scatter=max(self.scatter, scatter))
        return shifted, Shift(since, self.usual, new)

    def off(self, base: float | None, least: float) -> float:
        """By what share the usual level differs from another; 0 where that is no more than `least` or the scatter, or
        where one is not known.

        >>> Level(usual=1.3, scatter=0.01).off(1.0, 0.1)
        0.3
        """
        if self.usual is None or not base:
            return 0.0
        share = self.usual / base - 1.0
        return round(share, 9) if abs(share) > max(least, SCATTERS * self.scatter) else 0.0

    def _learn(self, value: float) -> Level:
        first = (*self.first, value)
        if len(first) < LEARNT:
            return replace(self, first=first)
        usual = statistics.median(first)
        if usual <= 0:
            # Nothing to compare with: a figure that is zero so far.
            return replace(self, first=first[1:])
        return Level(usual=usual, scatter=_scatter(first, usual))


def _scatter(values: Sequence[float], usual: float) -> float:
    """As a share of their usual value. 1.48 makes the median deviation of normal noise its standard deviation."""
    return 1.48 * statistics.median(abs(one - usual) for one in values) / usual


class Drift:
    """Follows a job sample by sample."""

    def __init__(self) -> None:
        self._levels: dict[str | int, Level] = {}
        self._samples = 0
        self._behind: deque[tuple[float, ...]] = deque(maxlen=IN_A_ROW)
        """Own times of the last samples, over the median rank's."""
        self._base_s = 0.0
        """Added to exposed times, which may be near zero, so that their shifts are shares of a step."""
        self._least_s = 0.0
        """The usual exposed time, `_base_s` included. Less than that, as beside a straggler, is no shift."""

    def after(self, sample: StepSample) -> StepSample:
        """The sample with how slow each rank is, and with what it completes in words, mostly nothing."""
        typical = statistics.median_low(sample.own_s)
        self._samples += 1
        self._base_s = self._base_s or typical
        self._behind.append(tuple(own / typical if typical > 0 else 1.0 for own in sample.own_s))
        slower = tuple(statistics.median(found) - 1.0 for found in zip(*self._behind, strict=True))
        sample = msgspec.structs.replace(sample, slower=slower)
        told = [*self._ranks(sample), *self._all_ranks(sample, typical), *self._link(sample)]
        told += self._exposed(sample)
        self._shift("step", sample.step, sample.iteration_s)
        if self._samples == LEARNT:
            self._least_s = self._level("exposed").usual or 0.0
            told += self._from_start(sample)
        return msgspec.structs.replace(sample, alerts=tuple(told))

    def _ranks(self, sample: StepSample) -> Iterable[str]:
        """A shift of what a rank takes over the median rank's. Its samples are those that `slower` is the median of."""
        if len(sample.own_s) < 2:
            return
        for rank, name in enumerate(map(sample.name_of, range(len(sample.own_s)))):
            shift = self._shift(rank, sample.step, self._behind[-1][rank])
            if shift is None:
                continue
            was_slow = shift.before > 1 + LEAST
            if shift.after > 1 + LEAST:
                before = f" ({slower_words(shift.before - 1)} before)" if was_slow else ""
                yield f"{name} is {_slower(sample.slower[rank])} since step {shift.since_step}{before}"
            elif was_slow:
                yield f"{name} is as fast as the others again since step {shift.since_step}"

    def _all_ranks(self, sample: StepSample, typical: float) -> Iterable[str]:
        shift = self._shift("own", sample.step, typical)
        if shift is not None:
            change = f"{_percent(1 - shift.ratio)} shorter than before"
            if shift.ratio > 1:
                change = _longer(shift.ratio - 1, "before")
            yield f"every rank computes {change} since step {shift.since_step}"

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

    def _exposed(self, sample: StepSample) -> Iterable[str]:
        """Where torch alone knows the transfers: what the rank that waits least still waits for."""
        shift = self._shift("exposed", sample.step, max(self._base_s + sample.exposed_s, self._least_s))
        if shift is not None and sample.transfer_s is None:
            before, after = (format_seconds(one - self._base_s) for one in (shift.before, shift.after))
            word = "rose" if shift.ratio > 1 else "fell"
            yield f"exposed communication {word} from {before} to {after} a step since step {shift.since_step}"

    def _from_start(self, sample: StepSample) -> Iterable[str]:
        for rank in range(len(sample.own_s)):
            if self._level(rank).off(1.0, SLOW_RANK) > 0:
                yield f"{sample.name_of(rank)} has been {_slower(sample.slower[rank])} since the start"
        slower = self._level("link").off(sample.predicted_transfer_s, SLOW_LINK)
        if slower > 0:
            yield f"the link has given {_percent(1 / (1 + slower))} of what was calibrated since the start"
        predicted = sample.predicted_iteration_s
        off = self._level("step").off(predicted, OFF_PREDICTION)
        if predicted and off:
            measured = f"{format_seconds(predicted * (1 + off))}, {format_seconds(predicted)} predicted"
            change = _longer(off, "predicted") if off > 0 else f"{_percent(-off)} shorter than predicted"
            yield f"steps take {change} ({measured}){self._why(sample) if off > 0 else ''}"
        elif predicted and sample.predicted_exposed_s is not None:
            expected = self._base_s + sample.predicted_exposed_s
            more = self._level("exposed").off(expected, 0.0) * expected
            if more > OFF_PREDICTION * predicted:
                yield _exposed_words(sample.predicted_exposed_s + more, sample.predicted_exposed_s)

    def _why(self, sample: StepSample) -> str:
        """The largest part of what a step takes longer than predicted."""
        own, exposed = self._level("own").usual, self._level("exposed").usual
        if sample.predicted_iteration_s is None or sample.predicted_exposed_s is None or own is None or exposed is None:
            return ""
        predicted_own = sample.predicted_iteration_s - sample.predicted_exposed_s
        exposed -= self._base_s
        behind, rank = max((self._level(rank).usual or 1.0, rank) for rank in range(len(sample.own_s)))
        words = {
            _exposed_words(exposed, sample.predicted_exposed_s): exposed - sample.predicted_exposed_s,
            f"a rank computes for {format_seconds(own)}, {format_seconds(predicted_own)} predicted": own
            - predicted_own,
            f"the others wait for {sample.name_of(rank)}": (behind - 1.0) * own,
        }
        return f": {max(words, key=lambda text: words[text])}"

    def _level(self, name: str | int) -> Level:
        return self._levels.get(name, Level())

    def _shift(self, name: str | int, step: int, value: float) -> Shift | None:
        self._levels[name], shift = self._level(name).after(step, value)
        return shift


def _exposed_words(measured: float, predicted: float) -> str:
    return f"{format_seconds(measured)} of communication are exposed, {format_seconds(predicted)} predicted"


def slower_words(share: float) -> str:
    """How much slower than the others a rank is, everywhere.

    >>> slower_words(0.3), slower_words(1.4), slower_words(11.2)
    ('+30 %', '+140 %', '×12')
    """
    return f"{share * 100:+.0f} %" if share < 10 else f"×{share + 1:.0f}"


def _slower(share: float) -> str:
    """
    >>> _slower(1.4), _slower(11.2)
    ('140 % slower than the others', '12 times as slow as the others')
    """
    words = slower_words(share)
    return f"{words[1:]} slower than the others" if share < 10 else f"{words[1:]} times as slow as the others"


def _longer(share: float, base: str) -> str:
    """
    >>> _longer(0.3, "before"), _longer(5.06, "predicted")
    ('30 % longer than before', '6.1 times as long as predicted')
    """
    return f"{_percent(share)} longer than {base}" if share < 1 else f"{1 + share:.1f} times as long as {base}"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
