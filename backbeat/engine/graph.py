"""Operations, and what each waits for.

An *op* begins when the ops before it have ended, and takes `seconds` of its own. Some change the pace of others, where
they share something:

- A *lane* (a stream, a communicator, a host thread) carries one op at a time, in the order in which they were added.
  That is only an edge to the op added to it before.
- On a *link* are the ops that have `work_s` seconds to do on it, after seconds of their own (latency). n of them
  together do e(n) seconds of work a second, so each gets e(n)/n. n that are in their latency at once each take u(n)
  times as long for it.
- *Computation* of some kind takes longer while collectives are in flight on its GPU: by the largest of the slowdowns
  that their transports mean to this kind.

An op with `behind_s` was measured to take other seconds of its own right behind another on its lane: it ends `seconds +
work_s` after the other ops before it, or `behind_s + work_s` after that one, whichever is later. `seconds` below zero
are a head start: a link that was idle for that long, or longer, lets so much of the work through at once.

Ops may hold buffers, from the start of one op to the end of the last that uses them (`memory`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backbeat.cost import LinkCost
from backbeat.errors import DeadlockError, InputError

Lane = Hashable
Label = str | tuple[str, *tuple[object, ...]]
"""A text, or one to be formatted with what follows: most labels are never read."""
MOST_OPS = 50_000
"""Of one graph. A builder collapses pieces before it comes to this."""
NO_OP = -1


class Sent(NamedTuple):
    """What an op is that travels, or is in flight on a GPU, beside its own seconds."""

    path: int
    """Which of the graph's `paths` it takes; 0 is none."""
    work_s: float
    behind_s: float | None
    follows: int
    """The op before it on its first lane."""
    carrier: int
    """Which of the graph's `carriers` is in flight with it; 0 is none."""
    bytes: float


@dataclass(frozen=True, slots=True)
class SharedLink:
    """How ops share a link."""

    efficiency: Callable[[int], float] | None = None
    """e(n): seconds of work that n ops together do a second; 1 where there is none. One op does 1, and none gets more
    than it would alone."""
    stretch: Callable[[int], float] | None = None
    """u(n): how many times as long latencies of n ops at once take; 1 where there is none."""

    @classmethod
    def of(cls, cost: LinkCost) -> SharedLink:
        """As messages of this cost share it.

        >>> from backbeat.cost import Curve, LinkCost
        >>> SharedLink.of(LinkCost(Curve.affine(1e-3, 1e-9), None, {2: 0.8})).efficiency(2)
        0.8
        """
        return cls(cost.efficiency if cost.efficiencies else None, cost.stretch if cost.stretches else None)


class WorkKind(NamedTuple):
    """Computation on one GPU that takes so many times as long beside each transport's collectives."""

    gpu: int
    slowdowns: Mapping[str, float]


class Buffer(NamedTuple):
    """Bytes from the start of one op to the end of the last that uses them; of the whole step where none does."""

    kind: str
    bytes: float
    first: int
    users: list[int]


@dataclass(slots=True)
class Graph:
    """Ops by number, in the order of issue; columns of plain numbers, since a step may have thousands.

    Computation of 2 s, then 1 s more beside a message of 1 s latency and 2 s on a link:

    >>> graph = Graph()
    >>> first = graph.add(("compute",), 2.0, label="block 1")
    >>> sent = graph.add(("communicator",), 1.0, work_s=2.0, links=(graph.link(),), after=(first,))
    >>> last = graph.add(("compute",), 1.0)
    >>> graph.before
    [(), (0,), (0,)]
    """

    seconds: list[float] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    """Ops that each waits for: those of its lanes, and others."""
    lanes: list[tuple[Lane, ...]] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    """What each is called, for errors and timelines."""
    causes: list[str] = field(default_factory=list)
    """What time spent on each is put down to."""
    sent: dict[int, Sent] = field(default_factory=dict)
    """Those that travel."""
    kind_of: dict[int, int] = field(default_factory=dict)
    """Those that compute, and which of the `kinds` each is."""

    links: list[SharedLink] = field(default_factory=list)
    paths: dict[tuple[int, ...], int] = field(default_factory=lambda: {(): 0})
    """Links that ops cross at once, at the pace of the slowest."""
    kinds: list[WorkKind] = field(default_factory=lambda: [WorkKind(0, {})])
    carriers: dict[tuple[int, str], int] = field(default_factory=lambda: {(NO_OP, ""): 0})
    """(GPU, transport)."""
    buffers: list[Buffer] = field(default_factory=list)
    open: dict[Hashable, int] = field(default_factory=dict)
    """Transfers of which only one end is there."""
    forward_only: bool = True
    """Every op waits only for ops added before it."""
    one_computes: bool = True
    """All computation that may be slowed down is on one lane."""

    _last: dict[Lane, int] = field(default_factory=dict)
    _shared_lanes: dict[int, frozenset[Lane]] = field(default_factory=dict)
    """By link: lanes that all of its ops are on."""
    _computes: Lane = None
    """The lane of what may be slowed down, once there is some."""
    _edges: tuple[list[int], list[list[int]]] | None = None
    """How many ops each waits for, and which wait for each, once somebody asked."""
    _order: list[int] | None = None
    _known: dict[tuple[tuple[int, ...], tuple[Lane, ...]], int] = field(default_factory=dict)
    """The path of ops on these links and lanes, as those before them."""

    def __len__(self) -> int:
        return len(self.seconds)

    def link(self, link: SharedLink | None = None) -> int:
        self.links.append(link or SharedLink())
        return len(self.links) - 1

    def kind(self, slowdowns: Mapping[str, float], gpu: int = 0) -> int:
        """Computation on this GPU with these slowdowns by transport."""
        self.kinds.append(WorkKind(gpu, slowdowns))
        return len(self.kinds) - 1

    def add(
        self,
        lanes: tuple[Lane, ...],
        seconds: float,
        *,
        after: Iterable[int] = (),
        work_s: float = 0.0,
        behind_s: float | None = None,
        links: tuple[int, ...] = (),
        kind: int = 0,
        transport: str | None = None,
        gpu: int = 0,
        label: Label = "",
        cause: str = "",
        bytes: float = 0.0,
    ) -> int:
        """Its number. It is on these lanes behind what was added to them before; with a `transport` it is in flight
        on the GPU, and slows computation there down."""
        number, last = len(self.seconds), self._last
        follows = last.get(lanes[0], NO_OP) if lanes else NO_OP
        before = (*after,) if follows == NO_OP else (*after, follows)
        for lane in lanes[1:]:
            if lane in last:
                before = (*before, last[lane])
        for lane in lanes:
            last[lane] = number
        self.seconds.append(seconds)
        self.before.append(before)
        self.lanes.append(lanes)
        self.labels.append(label)
        self.causes.append(cause)
        if kind:
            self.kind_of[number] = kind
            self._computes = self._computes or lanes[0]
            self.one_computes = self.one_computes and self._computes == lanes[0]
        if links or transport is not None:
            path = self._path(links, lanes) if links else 0
            carrier = 0
            if transport is not None:
                carrier = self.carriers.setdefault((gpu, transport), len(self.carriers))
            self.sent[number] = Sent(path, work_s, behind_s, follows, carrier, bytes)
        return number

    def wait(self, number: int, *before: int) -> None:
        """Let an op wait for others, which may have been added after it."""
        self.before[number] += before
        self._edges = self._order = None
        self.forward_only = self.forward_only and max(before) < number

    def meet(
        self,
        key: Hashable,
        seconds: float,
        *,
        after: Iterable[int] = (),
        work_s: float = 0.0,
        links: tuple[int, ...] = (),
        label: Label = "",
        cause: str = "",
    ) -> int:
        """One end of a transfer. The first that gives the key adds the op; it also waits for what the second gives.

        >>> graph = Graph()
        >>> sent = graph.meet("activation", 1.0, after=(graph.add(("stage 0",), 2.0),))
        >>> graph.open
        {'activation': 1}
        >>> graph.meet("activation", 1.0, after=(graph.add(("stage 1",), 3.0),)) == sent, graph.open
        (True, {})
        """
        number = self.open.pop(key, NO_OP)
        if number == NO_OP:
            number = self.add((), seconds, after=after, work_s=work_s, links=links, label=label, cause=cause)
            self.open[key] = number
        elif before := (*after,):
            self.wait(number, *before)
        return number

    def hold(self, kind: str, bytes: float, first: int, users: Iterable[int] = ()) -> Buffer:
        """A buffer that comes when the op `first` starts; more users may be appended to it."""
        held = Buffer(kind, bytes, first, [*users])
        self.buffers.append(held)
        return held

    def retimed(
        self,
        times: Mapping[int, tuple[float, float, float | None]],
        link: SharedLink | None = None,
        slowdowns: Mapping[str, float] | None = None,
    ) -> Graph:
        """The same ops, of which these have other (seconds, work_s, behind_s), as on a quieter network; where given,
        all share links, and are slowed down, otherwise."""
        self.order()  # once for all of them
        found = copy.copy(self)
        if link is not None:
            found.links = [link] * len(self.links)
        if slowdowns is not None:
            found.kinds = [self.kinds[0], *(WorkKind(kind.gpu, slowdowns) for kind in self.kinds[1:])]
        found.seconds, found.sent = self.seconds.copy(), self.sent.copy()
        for number, (seconds, work_s, behind_s) in times.items():
            found.seconds[number] = seconds
            if number in found.sent:
                path, _, _, follows, carrier, size = found.sent[number]
                found.sent[number] = Sent(path, work_s, behind_s, follows, carrier, size)
        return found

    def unlimited(self) -> Graph:
        """The same ops where each that travels has a lane of its own: it waits for none of its cause, and shares its
        links perfectly."""
        found = copy.copy(self)
        found.links = [SharedLink()] * len(self.links)
        found._shared_lanes = dict.fromkeys(range(len(self.links)), frozenset())
        found.before, found.sent, found._edges, found._order = self.before.copy(), {}, None, None
        for number, sent in self.sent.items():
            found.sent[number] = sent._replace(behind_s=None, follows=NO_OP)
            own = self.causes[number]
            alike = (other for other in self.before[number] if other in self.sent and self.causes[other] == own)
            found.before[number] = tuple(set(self.before[number]).difference(alike))
        return found

    def shares_links(self) -> bool:
        """Whether two ops may be on a link at once."""
        return any(not self.has_to_itself(path) for path in self.paths)

    def shares_pace(self) -> bool:
        """Whether an op may change the pace of another."""
        return self.shares_links() or any(self.slows(kind) for kind in range(1, len(self.kinds)))

    def has_to_itself(self, path: tuple[int, ...]) -> bool:
        """Whether an op on these links never meets another: each of them has a lane that all of its ops are on."""
        return all(self._shared_lanes.get(link, True) for link in path)

    def slows(self, kind: int) -> bool:
        """Whether something is in flight on its GPU that slows such computation down."""
        gpu, slowdowns = self.kinds[kind]
        return any(where == gpu and slowdowns.get(transport, 1.0) != 1.0 for where, transport in self.carriers)

    def edges(self) -> tuple[list[int], list[list[int]]]:
        """How many ops each waits for, and which wait for each: kept for other times of the same ops."""
        if self._edges is None or len(self._edges[0]) != len(self):
            behind: list[list[int]] = [[] for _ in self.before]
            for number, before in enumerate(self.before):
                for other in before:
                    behind[other].append(number)
            self._edges = [len(before) for before in self.before], behind
        waiting, behind = self._edges
        return waiting.copy(), behind

    def order(self) -> list[int]:
        """Every op after those it waits for, and of what is ready computation last: what is left then waits for it.
        Kept as well."""
        if self._order is None or len(self._order) != len(self):
            waiting, behind = self.edges()
            computes, self._order = self.kind_of, []
            begin = [op for op in range(len(self) - 1, -1, -1) if not waiting[op]]
            ready, held = [op for op in begin if op not in computes], [op for op in begin if op in computes]
            while ready or held:
                number = ready.pop() if ready else held.pop()
                self._order.append(number)
                for later in behind[number]:
                    waiting[later] -= 1
                    if not waiting[later]:
                        (held if later in computes else ready).append(later)
            if len(self._order) < len(self):
                self._order = None
                raise deadlock(self, [number for number, left in enumerate(waiting) if left])
        return self._order

    def _path(self, links: tuple[int, ...], lanes: tuple[Lane, ...]) -> int:
        found = self._known.get((links, lanes))
        if found is None:
            for link in links:
                known = self._shared_lanes.get(link)
                self._shared_lanes[link] = frozenset(lanes) if known is None else known.intersection(lanes)
            found = self._known[links, lanes] = self.paths.setdefault(links, len(self.paths))
        return found


class GraphTimes(NamedTuple):
    """By op: when it starts, has its latency behind it, and ends."""

    starts: list[float]
    on_link: list[float]
    ends: list[float]

    @property
    def end_s(self) -> float:
        return max(self.ends, default=0.0)


def alone_s(graph: Graph, number: int, sent: Sent, now: float, ends: list[float]) -> tuple[float, float]:
    """Latency and work of an op that starts now and has its links to itself."""
    own = own_s(graph, number, sent, now, ends)
    return (own, sent.work_s) if own >= 0 else (0.0, sent.work_s + own)


def own_s(graph: Graph, number: int, sent: Sent, now: float, ends: list[float]) -> float:
    """Seconds of an op before its work; below zero, the head start that it takes on an idle link."""
    own, behind, last = graph.seconds[number], sent.behind_s, sent.follows
    if last == NO_OP or behind is None:
        return own
    ready = max([ends[other] for other in graph.before[number] if other != last], default=0.0)
    return max(ready + own, ends[last] + behind) - now


def check_size(graph: Graph) -> None:
    """Refuse a graph that would take long to run: whoever builds one collapses pieces before it comes to this."""
    if len(graph) > MOST_OPS:
        raise InputError(f"the step has {len(graph)} operations: at most {MOST_OPS} are simulated one by one")


def deadlock(graph: Graph, undone: Sequence[int]) -> DeadlockError:
    """These ops cannot start: some are named, with what each waits for."""
    missing, half = set(undone), set(graph.open.values())
    lines = []
    for number in sorted(undone, key=lambda one: (one not in half, one))[:5]:
        others = [name(graph, other) for other in graph.before[number] if other in missing]
        waits = ["its other end"] if number in half else others
        lines.append(f"{name(graph, number)} waits for {', '.join(waits)}")
    more = f"; and {len(undone) - 5} more" if len(undone) > 5 else ""
    return DeadlockError(f"{len(undone)} of {len(graph)} operations cannot start: {'; '.join(lines)}{more}")


def name(graph: Graph, number: int) -> str:
    label = graph.labels[number]
    return label or f"op {number}" if isinstance(label, str) else label[0].format(*label[1:])
