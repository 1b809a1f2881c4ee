"""Fewer buckets on several communicators, where only the engine knows when they end; `thrift` has the rules.

First all buckets at once are merged up to a size, but for the last few, which decide when a plan ends. Then boundaries
are dropped here and there, many neighbours at once and then ever fewer.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

from backbeat.planners.draft import Draft
from backbeat.planners.merge_buckets import largest_allowed, possible_costs
from backbeat.simulate.schedule import running_sums

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from backbeat.cost import LinkCost
    from backbeat.model import Profile

_RUNS = 600
"""Engine runs spent."""
_BUCKETS = 200_000
"""Buckets in all of these runs: one of many buckets takes as much longer."""
_ROUNDING = 1e-12


def simplified(draft: Draft, profile: Profile, cost: LinkCost, *, deadline: float = float("inf")) -> Draft:
    """The draft with buckets merged as long as no time is exposed by it, whatever messages cost within reason."""
    sums = running_sums(profile.sizes)
    largest = largest_allowed(sums, draft.ends, cost)
    judge = _Judge(draft, profile, cost, deadline)
    for packed in _packings(draft.ends, sums, largest):
        if judge.tired:
            return draft
        if judge.allows(packed):
            draft = judge.with_ends(packed)
            break
    last, inner = draft.ends[-1], draft.ends[:-1]
    # Powers of two: on two communicators an even number less leaves those behind where they are.
    stride = 1 << len(inner).bit_length()
    while stride >= 1:
        place = 0
        while place < len(inner):
            if judge.tired:
                return judge.with_ends([*inner, last])
            behind = inner[place + stride] if place + stride < len(inner) else last
            if sums[behind] - sums[inner[place - 1] if place else 0] > largest:
                place += 1
                continue
            fewer = [*inner[:place], *inner[place + stride :]]
            if judge.allows([*fewer, last]):
                inner = fewer
            else:
                place += stride
        stride //= 2
    return judge.with_ends([*inner, last])


class _Judge:
    """Says whether other buckets expose no more time than the draft's, as long as it has runs left."""

    def __init__(self, draft: Draft, profile: Profile, cost: LinkCost, deadline: float) -> None:
        self._draft = draft
        self._profile = profile
        self._deadline = deadline
        self._left = min(_RUNS, _BUCKETS // len(draft.ends))
        self._limits = [(one, self._exposed(draft, one) * (1 + _ROUNDING)) for one in possible_costs(cost)]

    @property
    def tired(self) -> bool:
        return self._left <= 0 or time.monotonic() > self._deadline

    def with_ends(self, ends: list[int]) -> Draft:
        return Draft(ends, self._draft.communicators, notes=self._draft.notes)

    def allows(self, ends: list[int]) -> bool:
        candidate = self.with_ends(ends)
        for cost, limit in self._limits:
            self._left -= 1
            if self._exposed(candidate, cost) > limit:
                return False
        return True

    def _exposed(self, draft: Draft, cost: LinkCost) -> float:
        return max(draft.end_s(self._profile, cost), self._profile.backward_s)


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
