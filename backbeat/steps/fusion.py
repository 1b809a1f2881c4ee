"""Buckets that form at run time, as Horovod's do: at each tick with the communicator free, whatever is ready travels
together.

That is no graph: which gradients travel together depends on when they are ready, which depends on what travels beside
computation. What happens until some moment depends on nothing after it, so one pass, message by message, finds both.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from backbeat.cost import LinkCost
from backbeat.model import DynamicFusion, Profile
from backbeat.steps.schedule import Flow


class Fused(NamedTuple):
    """Buckets that came about beside backward."""

    flow: Flow
    ends: list[int]
    """Where each ends in ready order: the index after its last gradient."""
    backward_end_s: float


def fuse(profile: Profile, cost: LinkCost, settings: DynamicFusion, slowdown: float = 1.0) -> Fused:
    """A bucket of several tensors is copied into the fusion buffer and out again; a tensor alone is sent from its
    place, and travels alone where it is larger than the buffer. Computation beside a message takes `slowdown` times as
    long.

    Gradients ready after 1 and 2 s of a backward of 4; each message takes 1 s, computation beside it twice as long. The
    second gradient is ready at 2.5 s, after half a second beside the first message, and backward ends at 5 s.

    >>> from backbeat.cost import Curve
    >>> from backbeat.model import Gradient
    >>> two = Profile(
    ...     name="two", model="m", batch_size=1, precision="fp32", device="cpu", forward_s=1.0, backward_s=4.0,
    ...     update_s=0.0, gradients=tuple(Gradient(name=str(at), bytes=4, ready_s=at) for at in (1.0, 2.0)))
    >>> found = fuse(two, LinkCost(Curve.affine(1.0, 0.0)), DynamicFusion(cycle_s=0.5), 2.0)
    >>> found.flow.starts.tolist(), found.flow.finishes.tolist(), found.backward_end_s
    ([1.0, 2.5], [2.0, 3.5], 5.0)
    """
    ready, sizes = profile.ready.tolist(), profile.sizes.tolist()
    ends: list[int] = []
    times: list[tuple[float, float, float]] = []
    backward_end, free, first = profile.backward_s, -math.inf, 0
    late = 0.0
    """Of computation, by messages so far."""
    while first < len(sizes):
        # A ready time that is a tick, but for rounding, is caught by that tick.
        tick = math.ceil(max(ready[first] + late, free) / settings.cycle_s - 1e-9) * settings.cycle_s
        last, total = first + 1, sizes[first]
        while last < len(sizes) and ready[last] + late <= tick and total + sizes[last] <= settings.buffer_bytes:
            total += sizes[last]
            last += 1
        copy = total / settings.copy_bytes_per_s if last - first > 1 else 0.0
        alone, busy, work = (float(part) for part in cost.times(total))
        reduced = max(tick + copy + alone, free + copy + busy)
        ends.append(last)
        times.append((tick, max(reduced - work, tick + copy), reduced + copy))
        free, first = reduced + copy, last
        slower = (free - tick) * (1 - 1 / slowdown)
        if backward_end > tick:
            backward_end = min(tick + (backward_end - tick) * slowdown, backward_end + slower)
        late += slower
    starts, on_link, finishes = np.array(times).T
    return Fused(Flow(starts, on_link, finishes), ends, backward_end)
