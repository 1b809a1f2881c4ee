"""Several channels: groups start in plan order from one thread and share one link.

A group launches no earlier than the one before it in the plan, no earlier than it is ready, and not while its channel
carries another. It spends its startup on the channel alone, then its work on the link. All groups on the link get equal
shares, and n of them together do e(n) seconds of work a second, so each gets e(n)/n.

Equal shares make one number enough: `served`, the work every group on the link would have received since it was last
empty. A group that arrives with work w leaves when `served` has grown by w, so the next to leave is the top of a heap.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from backbeat.simulate.schedule import Flow, Schedule

if TYPE_CHECKING:
    from backbeat.cost import LinkCost

_NEVER = float("inf")


def simulate(schedule: Schedule, cost: LinkCost) -> Flow:
    """Run the groups through their channels and the shared link.

    Two groups of 1 MB ready together on two channels, each 1 ms of startup and 1 ms of link: the startups overlap, the
    transfers share the link, and both end after 1 + 2 ms.

    >>> from backbeat.cost import Curve, LinkCost
    >>> two = Schedule(np.array([0.0, 0.0]), np.array([1e6, 1e6]), [0, 1])
    >>> simulate(two, LinkCost(Curve.affine(1e-3, 1e-9), None, {})).finishes.round(6).tolist()
    [0.003, 0.003]
    """
    startups, busy_startups, works = (part.tolist() for part in cost.split(schedule.sizes))
    ready = schedule.ready.tolist()
    channels = schedule.channels
    count = len(ready)
    # Messages on the link never outnumber the channels; rate[n] is what each of n gets.
    rate = [1.0] + [cost.efficiency(n) / n for n in range(1, max(channels) + 2)]
    free: dict[int, float] = dict.fromkeys(channels, -_NEVER)
    carrying: set[int] = set()
    starting: list[tuple[float, int]] = []
    sending: list[tuple[float, int]] = []
    starts, on_link, finishes = [0.0] * count, [0.0] * count, [0.0] * count
    launched, last_launch, now, served = 0, -_NEVER, 0.0, 0.0

    while True:
        while launched < count and channels[launched] not in carrying:
            channel = channels[launched]
            # Behind a group of its own channel the channel keeps the order; only another channel's launch holds it.
            same = launched > 0 and channels[launched - 1] == channel
            floor = ready[launched] if same else max(ready[launched], last_launch)
            begins = max(floor + startups[launched], free[channel] + busy_startups[launched])
            last_launch = max(last_launch, ready[launched], free[channel])
            starts[launched] = last_launch
            carrying.add(channel)
            heappush(starting, (begins, launched))
            launched += 1
        if not starting and not sending:
            break
        share = rate[len(sending)]
        leaves = now + (sending[0][0] - served) / share if sending else _NEVER
        arrives = starting[0][0] if starting else _NEVER
        if leaves <= arrives:
            served, group = heappop(sending)
            now = leaves
            finishes[group] = now
            free[channels[group]] = now
            carrying.discard(channels[group])
        else:
            served = served + (arrives - now) * share if sending else 0.0
            now, group = heappop(starting)
            on_link[group] = now
            heappush(sending, (served + works[group], group))
    return Flow(np.array(starts), np.array(on_link), np.array(finishes))
