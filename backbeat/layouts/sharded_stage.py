"""What units add to the passes of a stage that shards them over replicas (ZeRO 2 and 3).

A unit is the embedding, a layer or the head. Their collectives take turns on one link, in the order in which FSDP2
issues them (`steps/sharded_calls.py`): a unit is gathered once the one before it computes, and scattered once its
own backward is done; that waits until the scatter before has let go of its input. The order is fixed, so every moment
is the latest of others, later by a time that is given: no pass becomes longer because something takes less time, nor
shorter because a stage has one unit more.

Where computation takes longer beside collectives, a pass ends no later than with all of its computation slowed, nor
than if only what of them is hidden without it slowed computation down: slower computation hides no less. The lesser of
both is what is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backbeat.model.slowdown import together_s


class Added(NamedTuple):
    """What communication adds to one pass."""

    exposed_s: float = 0.0
    slower_s: float = 0.0
    """Computation that takes longer beside it."""
    beside_s: float = 0.0
    """Of what is exposed, what outlasts computation beside it: a host that is late catches up meanwhile."""

    @classmethod
    def overlapped(cls, compute_s: float, communication_s: float, slowdown: float) -> Added:
        """Communication that starts together with computation and waits for none of it.

        >>> Added.overlapped(3.0, 2.0, 2.0), Added.overlapped(1.0, 2.0, 1.0)
        (Added(exposed_s=0.0, slower_s=1.0, beside_s=0.0), Added(exposed_s=1.0, slower_s=0.0, beside_s=1.0))
        """
        alone = max(compute_s, communication_s)
        exposed_s = alone - compute_s
        return cls(exposed_s, together_s(compute_s, communication_s, slowdown) - alone, exposed_s)

    def plus(self, exposed_s: float, slower_s: float = 0.0, beside_s: float = 0.0) -> Added:
        return Added(self.exposed_s + exposed_s, self.slower_s + slower_s, self.beside_s + beside_s)

    @property
    def total_s(self) -> float:
        return self.exposed_s + self.slower_s


def units_added(
    compute_s: Sequence[float], gather_s: Sequence[float], scatter_s: Sequence[float], slowdown: float = 1.0
) -> Added:
    """To a pass through units in this order, each of which computes, is gathered before and scattered after.

    The first is waited for, the others travel beside the one before, as far as that goes; nothing hides the last
    scatter:

    >>> units_added([2.0, 2.0, 2.0], [1.0, 1.0, 5.0], [0.0, 0.0, 0.0])
    Added(exposed_s=4.0, slower_s=0.0, beside_s=0.0)
    >>> units_added([2.0, 2.0], [0.0, 1.0], [3.0, 1.0])
    Added(exposed_s=2.0, slower_s=0.0, beside_s=0.0)
    """
    travel_s = sum(gather_s) + sum(scatter_s)
    if not travel_s:
        return Added()
    ends = _end_s(compute_s, gather_s, scatter_s)
    exposed_s = max(0.0, ends - sum(compute_s))
    if slowdown <= 1:
        return Added(exposed_s)
    beside = _end_s([slowdown * each for each in compute_s], gather_s, scatter_s)
    return Added(exposed_s, min(beside - ends, (travel_s - exposed_s) * (1 - 1 / slowdown)))


def _end_s(compute_s: Sequence[float], gather_s: Sequence[float], scatter_s: Sequence[float]) -> float:
    link = come = gather_s[0]
    done = held = 0.0
    for computing, following, scatter in zip(compute_s, [*gather_s[1:], 0.0], scatter_s, strict=True):
        begun = max(done, come)
        if following:
            link = come = max(link, begun) + following
        done = begun + computing
        if scatter:
            # One scatter's input is held: computation waits for the scatter before it.
            done = max(done, held)
            link = held = max(link, done) + scatter
    return max(done, link)
