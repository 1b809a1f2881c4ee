"""What a network's all-reduce costs: alone, back to back, and several at once on one link.

A message spends its latency on its communicator alone and then its work on the link. The link is shared equally by all
messages in that phase; n of them together do e(n) seconds of work a second. Latencies of n communicators at once
ideally overlap; on hosts with few cores each takes u(n) times as long instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backbeat.cost.curve import Curve

_LITTLE_LATENCY = 0.1
"""Of a batch's work; with no more than this in latencies it is nearly all transfer, and shows how a link is shared."""
_MOSTLY_LATENCY = 0.5
"""With more than this it shows nothing of the link."""
_AGREE = 0.05
"""Batches between the two show it where one e and one u explain each of them as closely as this. What e(n) noise seems
to show is costly: it holds for messages a hundred times as large."""
_ALTERNATIONS = 20
"""Each shrinks the error of e and u at least tenfold, since either has little to do with the other's batches."""


class Batch(NamedTuple):
    """`messages` equal messages issued at once, spread over `communicators`: `seconds` until the last is done."""

    bytes: int
    messages: int
    communicators: int
    seconds: float


class MessageTimes(NamedTuple):
    """Seconds of each of some messages."""

    alone: NDArray[np.float64]
    """Isolated, T(M)."""
    busy: NDArray[np.float64]
    """Right after another on the same communicator, T_busy(M)."""
    transfer: NDArray[np.float64]
    """Link time, w(M); never more than it adds back to back, or one communicator were not the recursion. It may be more
    than an isolated message takes: one that finds a shaped link idle is let through faster than the link's rate, which
    says nothing of many."""


@dataclass(frozen=True)
class LinkCost:
    """The cost model of one network at its own number of workers."""

    isolated: Curve
    busy: Curve | None = None
    """Time a message adds when it follows another on its communicator without a gap; None where it was not measured."""
    efficiencies: Mapping[int, float] = field(default_factory=dict)
    """e(n) by number of messages on the link, as fitted."""
    stretches: Mapping[int, float] = field(default_factory=dict)
    """u(n), how much longer a latency takes when n messages start at once, as fitted."""

    @classmethod
    def fit(cls, isolated: Curve, batches: Sequence[Batch] = ()) -> LinkCost:
        """The cost model of messages that take this long alone, and of measured batches of them.

        Two messages of 1 MB on two communicators, each 1 ms of latency and 1 ms of link. They took 3 ms: the latencies
        overlapped, and the link did one second of work a second.

        >>> cost = LinkCost.fit(Curve.affine(1e-3, 1e-9), [Batch(1_000_000, 2, 2, 3e-3)])
        >>> round(cost.efficiency(2), 9)
        1.0
        """
        alone = cls(isolated, fit_busy(isolated, batches))
        efficiencies, stretches = {}, {}
        for sharing, points in _by_sharing(batches).items():
            parts = alone._parts(points)
            # Where these batches do not show e, it is 1.
            fitted = _fit_pair(parts, sharing) or (1.0, _stretch(parts, 1.0, sharing))
            efficiencies[sharing], stretches[sharing] = fitted
        return cls(isolated, alone.busy, efficiencies, stretches)

    def efficiency(self, messages: int) -> float:
        """e(n): the fitted one, or that of the nearest n measured; e(1) = 1."""
        return 1.0 if messages <= 1 else _nearest(self.efficiencies, messages)

    def stretch(self, messages: int) -> float:
        """u(n): the fitted one, or that of the nearest n measured; u(1) = 1."""
        return 1.0 if messages <= 1 else _nearest(self.stretches, messages)

    def best_efficiency(self, communicators: int) -> float:
        """The best e(n) that up to this many communicators can reach."""
        # What lies between two measured counts takes the value of one of them.
        measured = [count for count in self.efficiencies if count <= communicators]
        return max(self.efficiency(n) for n in (1, communicators, *measured))

    def slower(self, factor: float) -> LinkCost:
        """Every message takes that many times as long."""
        busy = None if self.busy is None else self.busy.slower(factor)
        return LinkCost(self.isolated.slower(factor), busy, self.efficiencies, self.stretches)

    def without_latency(self) -> LinkCost:
        """Messages take the link's time alone, as if every latency were hidden."""
        return LinkCost(Curve.affine(0.0, self.isolated.link_s_per_byte), None, self.efficiencies)

    def time(self, sizes: ArrayLike) -> NDArray[np.float64]:
        """Isolated time, T(M)."""
        return self.isolated.time(sizes)

    def busy_time(self, sizes: ArrayLike) -> NDArray[np.float64]:
        """Time added right after another message on the same communicator, T_busy(M)."""
        return (self.busy or self.isolated).time(sizes)

    def times(self, sizes: ArrayLike) -> MessageTimes:
        """`time`, `busy_time` and link time."""
        alone = self.time(sizes)
        busy = alone if self.busy is None else self.busy.time(sizes)
        link = self.isolated.link_s_per_byte * np.asarray(sizes, dtype=np.float64)
        return MessageTimes(alone, busy, np.minimum(link, busy))

    def cheapest(self, smallest: float, largest: float) -> tuple[float, float]:
        """(least latency, least link time per byte) over all message sizes from smallest to largest.

        Both are piecewise monotone between the corners of the curves, so the corners decide.
        """
        curves = [self.isolated] if self.busy is None else [self.isolated, self.busy]
        slope = self.isolated.link_s_per_byte
        lines = [line for curve in curves for _, _, *line in curve.segments()]
        # Where G·M crosses a curve between corners, the split changes its form.
        kinks = [intercept / (slope - rise) for intercept, rise in lines if rise != slope]
        candidates = np.concatenate([[smallest, largest], *(curve.sizes for curve in curves), kinks])
        candidates = candidates[(candidates >= smallest) & (candidates <= largest)]
        alone, _, work = self.times(candidates)
        moving = candidates > 0
        per_byte = np.minimum(work, alone)[moving] / candidates[moving]
        return float(np.maximum(alone - work, 0.0).min()), float(per_byte.min()) if per_byte.size else 0.0

    def batch_s(self, size: float, messages: int, communicators: int) -> float:
        """Equal messages issued at once and spread over the communicators: seconds until the last is done."""
        return sum(
            latency * self.stretch(sharing) + shared / self.efficiency(sharing)
            for sharing, latency, shared in self._rounds(size, messages, communicators)
        )

    def on(self, isolated: Curve, batches: Sequence[Batch]) -> list[float]:
        """Seconds of the batches this was fitted to, where messages alone take the time of another curve.

        Batches keep their ratio to the model: e(n), u(n) and T_busy / T are taken to hold whatever a message costs.

        >>> cost = LinkCost.fit(Curve.affine(1e-3, 1e-9), [Batch(1_000_000, 2, 2, 3e-3)])
        >>> [round(seconds, 9) for seconds in cost.on(Curve.affine(1e-3, 2e-9), [Batch(1_000_000, 2, 2, 3e-3)])]
        [0.005]
        """
        busy = None
        if self.busy is not None:
            alone = {
                batch.bytes: float(self.isolated.time(batch.bytes)) for batch in batches if batch.communicators == 1
            }
            busy = busy_curve(
                isolated, {size: float(self.busy.time(size)) / time for size, time in alone.items() if time > 0}
            )
        there = LinkCost(isolated, busy, self.efficiencies, self.stretches)
        return [
            batch.seconds * there.batch_s(*batch[:3]) / modelled
            if (modelled := self.batch_s(*batch[:3])) > 0
            else batch.seconds
            for batch in batches
        ]

    def sharing_unknown(self, points: Sequence[Batch]) -> dict[int, int]:
        """The communicator counts whose e(n) these batches do not show, each with its largest message.

        >>> cost = LinkCost(Curve.affine(1e-3, 1e-9))
        >>> sizes_and_communicators = [(1024, 2), (4096, 2), (1024, 4), (100_000_000, 4)]
        >>> cost.sharing_unknown([Batch(size, 8, count, 1.0) for size, count in sizes_and_communicators])
        {2: 4096}
        """
        return {
            sharing: max(batch.bytes for batch in batches)
            for sharing, batches in _by_sharing(points).items()
            if _fit_pair(self._parts(batches), sharing) is None
        }

    def _parts(self, batches: Sequence[Batch]) -> NDArray[np.float64]:
        """(latency, shared transfer, what both are to explain) of each, as shares of what the batch took."""
        rows = []
        for batch in batches:
            latency = shared = alone = 0.0
            for count, starting, sending in self._rounds(batch.bytes, batch.messages, batch.communicators):
                # A last message alone shares with nobody; a last few are taken to share like a full round.
                if count == 1:
                    alone += starting + sending
                else:
                    latency, shared = latency + starting, shared + sending
            rows.append((latency / batch.seconds, shared / batch.seconds, 1 - alone / batch.seconds))
        return np.array(rows)

    def _rounds(self, size: float, messages: int, communicators: int) -> list[tuple[int, float, float]]:
        """(messages at once, latency seconds, link seconds at e = 1): rounds of one message per communicator, in step.

        All full rounds first, then the one that the rest make. A head start is transfer that one message is spared; no
        latency that others could stretch.
        """
        alone, busy, work = (float(part) for part in self.times(size))
        latency, latency_busy = alone - work, busy - work
        sharing = min(messages, communicators)
        rounds, rest = divmod(messages, sharing)
        starting, spared = max(latency, 0.0), max(-latency, 0.0)
        full = (sharing, starting + (rounds - 1) * latency_busy, rounds * sharing * work - spared)
        return [full, (rest, latency_busy, rest * work)] if rest else [full]


def _nearest(fitted: Mapping[int, float], messages: int) -> float:
    """The value fitted for this many messages, or for the nearest number; 1 where nothing was."""
    if not fitted:
        return 1.0
    return fitted[min(fitted, key=lambda count: (abs(count - messages), count))]


def _by_sharing(points: Sequence[Batch]) -> dict[int, list[Batch]]:
    """The batches in which messages share the link, by how many do at once, rising."""
    found: dict[int, list[Batch]] = {}
    for point in points:
        sharing = min(point.messages, point.communicators)
        if sharing >= 2 and point.seconds > 0:
            found.setdefault(sharing, []).append(point)
    return dict(sorted(found.items()))


def _fit_pair(parts: NDArray[np.float64], sharing: int) -> tuple[float, float] | None:
    """(e, u) that bring latency·u + shared/e closest to the target in every row (latency, shared, target); None where
    the rows do not show how the link is shared.

    e comes from rows that are nearly all transfer, and u from the others. Among small messages one communicator's
    latency hides behind another's transfer, which would look like a wider link.
    n messages cannot do more than n links' work, nor stand still; a latency cannot take less than alone, nor more than
    n in a row.
    """
    latency, shared, target = parts.T
    # By what the model makes of a batch, not by what it took: one that was disturbed is not all transfer.
    share = latency / np.maximum(latency + shared, 1e-300)
    linked = share <= _LITTLE_LATENCY
    if linked.any() and not linked.all():
        stretch = 1.0
        for _ in range(_ALTERNATIONS):
            efficiency = _efficiency(parts[linked], stretch, sharing)
            stretch = _stretch(parts[~linked], efficiency, sharing)
        return efficiency, stretch
    # With one size only, latencies are taken to overlap.
    several = np.ptp(share) > 1e-9
    raw = np.linalg.lstsq(parts[:, :2], target, rcond=None)[0][0] if several else 1.0
    stretch = float(np.clip(raw, 1.0, sharing))
    efficiency = _efficiency(parts, stretch, sharing)
    misfit = float(np.abs(latency * stretch + shared / efficiency - target).max())
    known = linked.all() or (share.min() <= _MOSTLY_LATENCY and misfit <= _AGREE and (len(parts) > 2 or not several))
    return (efficiency, stretch) if known else None


def _stretch(parts: NDArray[np.float64], efficiency: float, sharing: int) -> float:
    """What is left for u where e is known."""
    latency, shared, target = parts.T
    weight = float(latency @ latency)
    raw = float(latency @ (target - shared / efficiency)) / weight if weight > 0 else 1.0
    return float(np.clip(raw, 1.0, sharing))


def _efficiency(parts: NDArray[np.float64], stretch: float, sharing: int) -> float:
    latency, shared, target = parts.T
    weight = float(shared @ shared)
    inverse = float(shared @ (target - latency * stretch)) / weight if weight > 0 else 1.0
    return 1 / min(max(inverse, 1 / sharing), 1e3)


def fit_busy(isolated: Curve, points: Sequence[Batch]) -> Curve | None:
    """T_busy from messages sent back to back on one communicator: the first takes T, each further one T_busy.

    What is carried between the measured sizes is the ratio T_busy / T, linear in the logarithm of the size.
    """
    ratios: dict[int, list[float]] = {}
    for point in points:
        if point.communicators == 1 and point.messages > 1:
            alone = float(isolated.time(point.bytes))
            added = (point.seconds - alone) / (point.messages - 1)
            if alone > 0:
                ratios.setdefault(point.bytes, []).append(max(added, 0.0) / alone)
    if not ratios:
        return None
    return busy_curve(isolated, {size: float(np.median(values)) for size, values in ratios.items()})


def busy_curve(isolated: Curve, ratios: Mapping[int, float]) -> Curve:
    """The piecewise linear T_busy with these ratios to the isolated time.

    Beyond the largest size measured the difference is carried, not the ratio: what a message saves by following another
    is latency, and a ratio would turn it into bandwidth.
    """
    measured = np.array(sorted(ratios), dtype=np.float64)
    ratio = np.array([ratios[int(size)] for size in measured])
    sizes = np.unique(np.concatenate([isolated.sizes, measured]))
    alone = isolated.time(sizes)
    times = alone * np.interp(np.log(np.maximum(sizes, 1.0)), np.log(measured), ratio)
    saved = float(isolated.time(measured[-1])) * (1 - float(ratio[-1]))
    times = np.where(sizes > measured[-1], alone - saved, times)
    return Curve(sizes, times, isolated.link_s_per_byte)
