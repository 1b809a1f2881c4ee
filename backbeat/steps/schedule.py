"""A plan against a profile, reduced to arrays: its buckets, what each takes, and when they travel one by one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backbeat.cost import Curve, MessageTimes
from backbeat.cost.message import message_bytes
from backbeat.model import Compression, Network, Plan, Profile
from backbeat.model.cluster import Cluster
from backbeat.model.moved import compression_rates
from backbeat.model.plan import Bucket


def running_sums(sizes: ArrayLike) -> NDArray[np.float64]:
    """What comes before each, and all of it at the end.

    >>> running_sums([3, 4]).tolist()
    [0.0, 3.0, 7.0]
    """
    return np.concatenate([[0.0], np.cumsum(sizes)])


def capped(sizes: list[float], caps: list[float], sums: NDArray[np.float64] | None = None) -> list[int]:
    """Buckets that close once they have *reached* their cap; the last cap holds for all that follow.

    `sums` may be given where the caller has them: the sizes' running totals, from 0.

    >>> capped([3, 3, 3, 3, 3], [2, 6])
    [1, 3, 5]
    """
    totals = (running_sums(sizes) if sums is None else sums).tolist()
    count = len(sizes)
    ends: list[int] = []
    end = 0
    while end < count:
        cap = caps[min(len(ends), len(caps) - 1)]
        reached = bisect_left(totals, totals[end] + cap)
        end = min(max(reached, end + 1), count)
        ends.append(end)
    return ends


@dataclass(frozen=True, slots=True)
class Schedule:
    """Buckets in launch order."""

    ready: NDArray[np.float64]
    """When the last gradient of each bucket is ready, after backward starts."""
    sizes: NDArray[np.float64]
    """Bytes of each bucket."""
    communicators: Sequence[int]
    """Communicator of each bucket."""

    @classmethod
    def of_ends(cls, profile: Profile, ends: Sequence[int], communicators: Sequence[int] | None = None) -> Schedule:
        """Consecutive buckets in ready order, given by where each ends (the index after its last gradient)."""
        sums = running_sums(profile.sizes)
        stops = np.asarray(ends, dtype=np.intp)
        starts = np.concatenate([[0], stops[:-1]])
        return cls(profile.ready[stops - 1], sums[stops] - sums[starts], communicators or [0] * len(stops))

    @classmethod
    def of_plan(cls, profile: Profile, plan: Plan) -> tuple[Schedule, list[Bucket]]:
        """The plan's buckets, and one of what it does not name, which training splits at 25 MiB; as arrays, and as they
        are."""
        plan.need_buckets("this schedule")
        plan.check(profile)
        buckets, index_of = list(plan.buckets), profile.index
        if missing := plan.missing(profile):
            buckets.append(Bucket(gradients=tuple(missing), communicator=0))
        members = [[index_of[name] for name in bucket.gradients] for bucket in buckets]
        return cls.of_members(profile, members, [bucket.communicator for bucket in buckets]), buckets

    @classmethod
    def of_members(cls, profile: Profile, members: Sequence[Sequence[int]], communicators: Sequence[int]) -> Schedule:
        """Buckets of the gradients with these indices."""
        # Plain lists: most buckets are small, and a numpy call costs more than adding a few numbers.
        ready, sizes = profile.ready.tolist(), profile.sizes.tolist()
        return cls(
            np.array([ready[max(indices)] for indices in members]),
            np.array([sum([sizes[index] for index in indices]) for indices in members]),
            communicators,
        )


class Flow(NamedTuple):
    """When each bucket starts on its communicator, reaches the link, and is done, after backward starts."""

    starts: NDArray[np.float64]
    on_link: NDArray[np.float64]
    finishes: NDArray[np.float64]

    @property
    def end_s(self) -> float:
        return float(self.finishes.max())


def one_by_one(ready: NDArray[np.float64], times: MessageTimes) -> Flow:
    """Messages that take these times, on one communicator: F_k = max(R_k, F_(k-1)) + T(M_k); where back-to-back times
    were measured, max(R_k + T, F_(k-1) + T_busy).

    Two buckets of 1 MB, ready at 0 and 1 ms, each taking 1 ms + 1 ns/byte: the second waits for the first.

    >>> from backbeat.cost import Curve, LinkCost
    >>> cost = LinkCost(Curve.affine(1e-3, 1e-9))
    >>> one_by_one(np.array([0.0, 1e-3]), cost.times(np.array([1e6, 1e6]))).finishes.tolist()
    [0.002, 0.004]
    """
    starts: list[float] = []
    finishes: list[float] = []
    free = -np.inf
    for moment, alone, busy in zip(ready.tolist(), times.alone.tolist(), times.busy.tolist(), strict=True):
        starts.append(max(moment, free))
        free = max(moment + alone, free + busy)
        finishes.append(free)
    begun, ends = np.array(starts), np.array(finishes)
    # A head start on an idle link is no message sent before it was there.
    return Flow(begun, np.maximum(ends - times.transfer, begun), ends)


def with_compression(ready: NDArray[np.float64], compress_s: Sequence[float]) -> NDArray[np.float64]:
    """When buckets are ready to leave: each is compressed once it is ready, which puts off all gradients after it.

    >>> with_compression(np.array([1.0, 2.0]), [0.5, 0.25]).tolist()
    [1.5, 2.75]
    """
    found, spent = ready.tolist(), 0.0
    for index in sorted(range(len(found)), key=found.__getitem__):
        spent += compress_s[index]
        found[index] += spent
    return np.array(found)


@dataclass(frozen=True)
class CompressedCost:
    """How long compressed buckets of a profile travel on a network. Every rank gathers everybody's message."""

    network: Network
    profile: Profile

    @cached_property
    def gather(self) -> Curve:
        return Cluster.of(self.network).curve("all_gather")

    def time(self, sizes: ArrayLike, compression: Compression) -> NDArray[np.float64]:
        """Of buckets of these bytes, all compressed alike."""
        elements = np.asarray(sizes, dtype=np.float64) / self.profile.element_bytes
        return self.gather.time(self.network.workers * message_bytes(elements, compression.density))

    def times(self, sizes: NDArray[np.float64], compressions: Sequence[Compression | None]) -> MessageTimes:
        """Of buckets of these bytes. A compressed one takes as long after another as alone, and all of it counts as
        link time."""
        times = self.network.cost.times(sizes)
        for index, compression in enumerate(compressions):
            if compression is not None:
                gathered = self.time(sizes[index], compression)
                for kind in times:
                    kind[index] = gathered
        return times


def compress_s(profile: Profile, sizes: NDArray[np.float64], compressions: Sequence[Compression | None]) -> list[float]:
    """What compressing each bucket takes, on the compute stream."""
    per_byte, per_bucket, _ = compression_rates(profile)
    return [
        0.0 if compression is None else per_bucket + per_byte * size
        for compression, size in zip(compressions, sizes.tolist(), strict=True)
    ]
