"""Run-time fusion as Horovod does it: at each tick with the communicator free, whatever is ready travels together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backbeat.cost import LinkCost
from backbeat.model import DynamicFusion, Profile
from backbeat.simulate.schedule import Flow


@dataclass(frozen=True, slots=True)
class FusedFlow(Flow):
    """Buckets as they come about at run time."""

    ends: list[int]
    """Where each ends in ready order: the index after its last gradient."""


def fuse(
    profile: Profile, cost: LinkCost, settings: DynamicFusion, ready_s: NDArray[np.float64] | None = None
) -> FusedFlow:
    """The buckets that come about, and when they travel; `ready_s` where gradients are ready at other times.

    A bucket of several tensors is copied into the fusion buffer and out again; a tensor alone is sent from its place. A
    tensor larger than the buffer travels alone.
    """
    ready, sizes = (profile.ready if ready_s is None else ready_s).tolist(), profile.sizes.tolist()
    count = len(sizes)
    ends: list[int] = []
    starts: list[float] = []
    on_link: list[float] = []
    finishes: list[float] = []
    free, first = float("-inf"), 0
    while first < count:
        # A ready time that is a tick, but for rounding, is caught by that tick.
        tick = math.ceil(max(ready[first], free) / settings.cycle_s - 1e-9) * settings.cycle_s
        last, total = first + 1, sizes[first]
        while last < count and ready[last] <= tick and total + sizes[last] <= settings.buffer_bytes:
            total += sizes[last]
            last += 1
        copy = total / settings.copy_bytes_per_s if last - first > 1 else 0.0
        reduced = max(tick + copy + float(cost.time(total)), free + copy + float(cost.busy_time(total)))
        ends.append(last)
        starts.append(tick)
        on_link.append(max(reduced - float(cost.transfer(total)), tick + copy))
        finishes.append(reduced + copy)
        free, first = finishes[-1], last
    return FusedFlow(np.array(starts), np.array(on_link), np.array(finishes), ends)
