"""Several channels: groups start in plan order from one thread and share one link.

A group launches no earlier than the one before it in the plan, no earlier than it is ready, and not while its channel
carries another. It spends its startup on the channel alone, then its work on the link. All groups on the link get equal
shares, and n of them together do e(n) seconds of work a second, so each gets e(n)/n. Startups overlap; where they were
measured to slow each other down, each of n advances at 1/u(n). A link that has been idle may give a group a head start,
where isolated messages were measured to take less than those in a row; never more than it was idle for.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from backbeat.simulate.schedule import Flow, Schedule

if TYPE_CHECKING:
    from backbeat.cost import LinkCost

_NEVER = float("inf")


class _Shared:
    """Groups that advance together, each at `rates[n]` while there are n of them.

    Equal rates make one number enough: `served`, what each member has received since the place was last empty. A group
    that arrives needing some seconds leaves when `served` has grown by them, so the next to leave tops a heap.
    """

    __slots__ = ("members", "rates", "served", "since")

    def __init__(self, rates: list[float]) -> None:
        self.rates = rates
        self.members: list[tuple[float, int]] = []
        self.served = 0.0
        self.since = 0.0

    def leaves(self) -> float:
        """When the next member leaves, if nobody arrives before."""
        if not self.members:
            return _NEVER
        return self.since + (self.members[0][0] - self.served) / self.rates[len(self.members)]

    def enter(self, group: int, seconds: float, now: float) -> None:
        if self.members:
            self.served += (now - self.since) * self.rates[len(self.members)]
        else:
            self.served = 0.0
        self.since = now
        heappush(self.members, (self.served + seconds, group))

    def leave(self, now: float) -> int:
        self.served, group = heappop(self.members)
        self.since = now
        return group


def simulate(schedule: Schedule, cost: LinkCost) -> Flow:
    """Run the groups through their channels and the shared link.

    Two groups of 1 MB ready together on two channels, each 1 ms of startup and 1 ms of link: the startups overlap, the
    transfers share the link, and both end after 1 + 2 ms.

    >>> from backbeat.cost import Curve, LinkCost
    >>> two = Schedule(np.array([0.0, 0.0]), np.array([1e6, 1e6]), [0, 1])
    >>> simulate(two, LinkCost(Curve.affine(1e-3, 1e-9), None, {})).finishes.round(6).tolist()
    [0.003, 0.003]
    """
    sizes = schedule.sizes
    alone, behind, works = (of(sizes).tolist() for of in (cost.time, cost.busy_time, cost.work))
    ready = schedule.ready.tolist()
    channels = schedule.channels
    count = len(ready)
    # Neither phase ever holds more groups than there are channels.
    counts = range(1, len(set(channels)) + 1)
    starting = _Shared([1.0] + [1 / cost.stretch(n) for n in counts])
    sending = _Shared([1.0] + [cost.efficiency(n) / n for n in counts])
    coming: deque[tuple[float, int, float]] = deque()
    free: dict[int, float] = dict.fromkeys(channels, -_NEVER)
    carrying: set[int] = set()
    starts, on_link, finishes, on_idle_link = ([0.0] * count for _ in range(4))
    launched, last_launch, idle_since = 0, -_NEVER, -_NEVER

    while True:
        while launched < count and channels[launched] not in carrying:
            channel = channels[launched]
            # Behind a group of its own channel the channel keeps the order; only another channel's launch holds it.
            same = launched > 0 and channels[launched - 1] == channel
            floor = ready[launched] if same else max(ready[launched], last_launch)
            unshared = max(floor + alone[launched], free[channel] + behind[launched])
            last_launch = max(last_launch, ready[launched], free[channel])
            starts[launched] = last_launch
            begins = max(unshared - works[launched], last_launch)
            on_idle_link[launched] = unshared - begins
            carrying.add(channel)
            coming.append((last_launch, launched, begins - last_launch))
            launched += 1
        arrival = coming[0][0] if coming else _NEVER
        started, sent = starting.leaves(), sending.leaves()
        now = min(sent, started, arrival)
        if now == _NEVER:
            break
        if sent == now:
            group = sending.leave(now)
            if not sending.members:
                idle_since = now
            finishes[group] = now
            free[channels[group]] = now
            carrying.discard(channels[group])
        elif started == now:
            group = starting.leave(now)
            on_link[group] = now
            head_start = 0.0 if sending.members else now - idle_since
            sending.enter(group, max(works[group] - head_start, on_idle_link[group]), now)
        else:
            _, group, startup = coming.popleft()
            starting.enter(group, startup, now)
    return Flow(np.array(starts), np.array(on_link), np.array(finishes))
