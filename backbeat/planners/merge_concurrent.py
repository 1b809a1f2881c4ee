"""Merge small buckets on several communicators, where only the engine knows when they end.

The rules are those of `merge_buckets`. First all buckets but the last few, which decide when the plan ends, are merged
up to a size. Then single boundaries are dropped: many neighbouring ones at once, then ever fewer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from backbeat.cost import LinkCost
from backbeat.model import Profile
from backbeat.planners.draft import Draft
from backbeat.planners.merge_buckets import largest_allowed, latest_end, possible_costs
from backbeat.simulate.schedule import running_sums

_RUNS = 600
"""Engine runs to spend."""
_BUCKETS = 200_000
"""Buckets to simulate in all of these runs: plans of many buckets get fewer runs."""
_ROUNDING = 1e-12


def simplified(
    draft: Draft, profile: Profile, cost: LinkCost, *, slack: float = 0.0, deadline: float = float("inf")
) -> Draft:
    """The draft with buckets merged as long as an iteration takes no more than `slack` longer, as a share, in each of
    `possible_costs`."""
    sums = running_sums(profile.sizes)
    largest = largest_allowed(sums, draft.ends, cost)
    judge = _Judge(draft, profile, cost, slack, deadline)
    for packed in _packings(draft.ends, sums, largest):
        if judge.out_of_runs:
            return draft
        if judge.allows(packed):
            draft = judge.with_ends(packed)
            break
    last, inner = draft.ends[-1], draft.ends[:-1]
    # Powers of two: on two communicators an even number less leaves those after it where they are.
    stride = 1 << len(inner).bit_length()
    while stride >= 1:
        index = 0
        while index < len(inner):
            if judge.out_of_runs:
                return judge.with_ends([*inner, last])
            merged_end = inner[index + stride] if index + stride < len(inner) else last
            if sums[merged_end] - sums[inner[index - 1] if index else 0] > largest:
                index += 1
                continue
            fewer = [*inner[:index], *inner[index + stride :]]
            if judge.allows([*fewer, last]):
                inner = fewer
            else:
                index += stride
        stride //= 2
    return judge.with_ends([*inner, last])


class _Judge:
    """Says whether other buckets are in time, as long as it has engine runs left."""

    def __init__(self, draft: Draft, profile: Profile, cost: LinkCost, slack: float, deadline: float) -> None:
        self._draft = draft
        self._profile = profile
        self._deadline = deadline
        self._left = min(_RUNS, _BUCKETS // len(draft.ends))
        self._limits = [
            (one, latest_end(profile, draft.end_s(profile, one), slack) * (1 + _ROUNDING))
            for one in possible_costs(cost)
        ]

    @property
    def out_of_runs(self) -> bool:
        return self._left <= 0 or time.monotonic() > self._deadline

    def with_ends(self, ends: list[int]) -> Draft:
        return Draft(ends, self._draft.communicators, notes=self._draft.notes)

    def allows(self, ends: list[int]) -> bool:
        candidate = self.with_ends(ends)
        for cost, limit in self._limits:
            self._left -= 1
            if candidate.end_s(self._profile, cost) > limit:
                return False
        return True


def _packings(ends: list[int], sums: NDArray[np.float64], largest: float) -> Iterator[list[int]]:
    """All buckets merged up to a size, but for the last few, which decide when the plan ends."""
    for cap in (largest, largest / 4, largest / 16):
        tail = 0
        while tail < len(ends):
            head = len(ends) - tail
            yield [*_packed(ends[:head], sums, cap), *ends[head:]]
            tail = 2 * tail or 1


def _packed(ends: list[int], sums: NDArray[np.float64], cap: float) -> list[int]:
    """The buckets merged from the front, up to this many bytes each."""
    found: list[int] = []
    first = 0
    for end, following in pairwise(ends):
        if sums[following] - sums[first] > cap:
            found.append(end)
            first = end
    return [*found, ends[-1]]
