"""One pass of a micro-batch through a piece of a model (an embedding, a layer, a head) as a graph.

| lane | its ops, in the order of issue |
|---|---|
| compute | operators |
| tensor, context, expert | collectives among the ranks that share the piece |

The host issues both in one order. A collective begins when what was issued to compute before it is done. What is issued
to compute after it runs beside it, until a pass waits for it. So what is hidden is the framework's order of issue.

The host never waits for the device, and runs ahead of it: piece after piece, a pass takes the longer of what the device
takes and what the host takes to issue it, which is the period of both lanes (`host.period_of`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from backbeat.engine import Graph, run
from backbeat.engine.explain import exposed
from backbeat.engine.graph import Lane

_COMPUTE: tuple[Lane, ...] = ("compute",)
HOST, CONTENTION = "host", "contention"
_ROUNDING = 1e-12
"""Of a pass: what rounding may make of nothing."""


class PassTimes(NamedTuple):
    """What a pass takes, and what that is put down to."""

    seconds: float
    causes: Mapping[str, float]
    """Operators' own seconds by what they are, waiting by what is waited for. All of it adds up to the pass."""


class PiecePass:
    """A pass under way: what was issued so far.

    A product of 2 s beside a collective of 3 s, of which 1 s shows; the host is ahead:

    >>> under_way = PiecePass()
    >>> sent = under_way.send("tensor", 3.0, host_s=0.5)
    >>> under_way.compute("matmul", 2.0, host_s=0.5)
    >>> under_way.wait(sent)
    >>> under_way.times()
    PassTimes(seconds=3.0, causes={'matmul': 2.0, 'tensor': 1.0})
    """

    def __init__(self, slowdowns: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """`slowdowns`: of each kind of work, by the collectives beside it."""
        self.graph = Graph()
        self.host_s = 0.0
        self._kinds = {kind: self.graph.kind(each) for kind, each in (slowdowns or {}).items()}
        self._own: defaultdict[str, float] = defaultdict(float)
        self._computed: tuple[int, ...] = ()
        self._waits: list[int] = []

    def compute(self, kind: str, seconds: float, *, host_s: float = 0.0, cause: str = "") -> None:
        """An operator of some kind of work; what it is, where it is put down to something else."""
        cause = cause or kind
        self.host_s += host_s
        self._own[cause] += seconds
        op = self.graph.add(_COMPUTE, seconds, after=self._waits, kind=self._kinds.get(kind, 0), cause=cause)
        self._computed, self._waits = (op,), []

    def send(self, dimension: str, seconds: float, *, host_s: float = 0.0) -> int:
        """A collective, to be waited for."""
        self.host_s += host_s
        after = (*self._computed, *self._waits)
        transport = dimension if self._kinds else None
        return self.graph.add((dimension,), seconds, after=after, transport=transport, cause=dimension)

    def wait(self, sent: int) -> None:
        """What is issued from now on runs when it is done."""
        self._waits.append(sent)

    def times(self) -> PassTimes:
        found = run(self.graph)
        seconds, causes = found.end_s, self._own.copy()
        for (cause, part), waited in exposed(self.graph, found, "compute").items():
            if waited > _ROUNDING * seconds:
                causes[CONTENTION if part == "contention" else cause] += waited
        if self.host_s > seconds:
            causes[HOST] += self.host_s - seconds
        return PassTimes(max(seconds, self.host_s), dict(causes))
