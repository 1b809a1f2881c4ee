"""Ops that change each other's pace: from one moment to the next.

In a *moment* ops end and others start, and then everything that goes on has its pace until the next moment.

A *pool* is a set of ops that advance at one pace: those on one path of links, those in their latency on one link, or
computation of one kind. Since all of a pool advance alike, what each has been served is one number: an op that enters
needing some seconds leaves when the number has grown by them. So the next of a pool to leave tops a heap, and a heap
over those finds the next moment.

What happens within `TOGETHER` of a moment happens in it: ops that differ in rounding alone start together. What
starts together has the same result in whatever order it was added. So ops that reach an idle link together share the
head start that it may give.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from backbeat.engine.graph import NO_OP, Graph, GraphTimes, Sent, alone_s, deadlock, own_s

TOGETHER = 1e-12
"""Of the time since the step began."""
_NEVER = float("inf")


def run_events(graph: Graph) -> GraphTimes:
    """When every op runs."""
    return _UnderWay(graph).run()


class _Pool:
    """Ops that advance together."""

    __slots__ = ("find_pace", "members", "next", "pace", "served", "since", "version")

    def __init__(self, find_pace: Callable[[], float]) -> None:
        self.find_pace = find_pace
        self.members: list[tuple[float, int]] = []
        """What each will have been served when it leaves, and the op."""
        self.next: tuple[float, int] | None = None
        """The one that was said to leave next, at this pace."""
        self.version = 0
        """How often that was said."""
        self.served = self.since = 0.0
        self.pace = 1.0

    def settle(self, now: float) -> None:
        """Count what was served until now."""
        self.served = self.served + (now - self.since) * self.pace if self.members else 0.0
        self.since = now

    def enter(self, number: int, seconds: float, now: float) -> None:
        self.settle(now)
        heappush(self.members, (self.served + seconds, number))

    def leave(self, now: float, until: float) -> list[int]:
        """Those that have been served."""
        self.settle(now)
        members = self.members
        served, first = heappop(members)
        self.served = max(self.served, served)
        gone = [first]
        if members:
            enough = self.served + (until - now) * self.pace
            while members and members[0][0] <= enough:
                gone.append(heappop(members)[1])
        return gone

    def look_ahead(self, now: float) -> tuple[float, int, int] | None:
        """When the next leaves, which, and the version of that; None where it is as was said."""
        if not self.members:
            return None
        first, pace = self.members[0], self.find_pace()
        if pace != self.pace:
            self.settle(now)
            self.pace = pace
        elif first is self.next:
            return None
        self.next = first
        self.version += 1
        return max(self.since + (first[0] - self.served) / pace, now), first[1], self.version


class _OnLink:
    """A link under way."""

    __slots__ = ("count", "idle_since", "pools")

    def __init__(self) -> None:
        self.count = 0
        self.idle_since = -_NEVER
        self.pools: list[int] = []
        """Of the paths that cross it."""


class _UnderWay:
    """A graph under way."""

    def __init__(self, graph: Graph) -> None:
        count = len(graph)
        self.graph = graph
        self.times = GraphTimes([0.0] * count, [0.0] * count, [0.0] * count)
        self.waiting, self.behind = graph.edges()
        self.head_starts: dict[int, float] = {}
        """What each op takes at most of the link's idle time."""
        self.reached: set[int] = set()
        """Ops that have their latency behind them."""
        self.in_flight = [0] * len(graph.carriers)
        self.coming: list[tuple[float, int, int, int]] = []
        """When something next happens: (time, op, version, pool); of pool -1 are ops whose pace nothing changes."""
        self.touched: set[int] = set()
        """Pools whose pace or next to leave may have changed in this moment."""
        self.ready = [number for number, before in enumerate(self.waiting) if not before]
        """Ops that start in this moment."""
        self.entering: list[int] = []
        """Ops that reach their links in it."""

        self.pools: list[_Pool] = []
        self.links = [_OnLink() for _ in graph.links]
        self.crossed: list[list[_OnLink]] = []
        """By path: the links of those that ops share."""
        self.of_path: list[int] = []
        self.of_latency: list[int] = []
        self.latencies: dict[int, int] = {}
        """By the first link of their path."""
        for path in graph.paths:
            shared = not graph.has_to_itself(path)
            self.crossed.append([self.links[link] for link in path] if shared else [])
            self.of_path.append(self._add(_path_pace(graph, path, self.links)) if shared else NO_OP)
            self.of_latency.append(self._latency(path[0]) if shared else NO_OP)
            for link in self.crossed[-1]:
                link.pools.append(self.of_path[-1])
        self.of_kind = [
            self._add(_kind_pace(graph, kind, self.in_flight)) if graph.slows(kind) else NO_OP
            for kind in range(len(graph.kinds))
        ]
        self.slowed_by = [
            [pool for pool, kind in zip(self.of_kind, graph.kinds, strict=True) if pool != NO_OP and kind.gpu == gpu]
            for gpu, _ in graph.carriers
        ]

    def _add(self, find_pace: Callable[[], float]) -> int:
        self.pools.append(_Pool(find_pace))
        return len(self.pools) - 1

    def _latency(self, link: int) -> int:
        stretch = self.graph.links[link].stretch
        if stretch is None:
            return NO_OP
        if link not in self.latencies:
            index = self._add(lambda: 1 / stretch(len(members)) if len(members) > 1 else 1.0)
            members = self.pools[index].members
            self.latencies[link] = index
        return self.latencies[link]

    def run(self) -> GraphTimes:
        coming, pools, sent = self.coming, self.pools, self.graph.sent
        self._go_on(0.0)
        while coming:
            now = coming[0][0]
            until = now + TOGETHER * now
            while coming and coming[0][0] <= until:
                _, number, version, index = heappop(coming)
                gone = [number]
                if index != NO_OP:
                    pool = pools[index]
                    if version != pool.version:
                        continue
                    gone = pool.leave(now, until)
                    self.touched.add(index)
                for number in gone:
                    if number in sent:
                        self._pass(number, sent[number], now)
                    else:
                        self._end(number, now)
            self._go_on(now)
        undone = [number for number, count in enumerate(self.waiting) if count]
        if undone:
            raise deadlock(self.graph, undone)
        return self.times

    def _compute(self, number: int, now: float) -> None:
        """Start an op that does not travel."""
        graph = self.graph
        seconds = graph.seconds[number]
        if seconds <= 0:
            self._end(number, now)
            return
        pool = self.of_kind[graph.kind_of.get(number, 0)]
        if pool == NO_OP:
            heappush(self.coming, (now + seconds, number, 0, NO_OP))
        else:
            self.pools[pool].enter(number, seconds, now)
            self.touched.add(pool)

    def _send(self, number: int, sent: Sent, now: float) -> None:
        if sent.carrier:
            self.in_flight[sent.carrier] += 1
            if self.in_flight[sent.carrier] == 1:
                self.touched.update(self.slowed_by[sent.carrier])
        if not self.crossed[sent.path]:
            latency, work = alone_s(self.graph, number, sent, now, self.times.ends)
            self.times.on_link[number] = now + latency
            self.reached.add(number)
            heappush(self.coming, (now + latency + work, number, 0, NO_OP))
            return
        own = own_s(self.graph, number, sent, now, self.times.ends)
        if own <= 0:
            self.head_starts[number] = -own
            self._pass(number, sent, now)
            return
        pool = self.of_latency[sent.path]
        if pool == NO_OP:
            heappush(self.coming, (now + own, number, 0, NO_OP))
        else:
            self.pools[pool].enter(number, own, now)
            self.touched.add(pool)

    def _pass(self, number: int, sent: Sent, now: float) -> None:
        """An op that travels is done, or with its latency."""
        if number not in self.reached:
            self.reached.add(number)
            self.times.on_link[number] = now
            self.entering.append(number)
            return
        for link in self.crossed[sent.path]:
            link.count -= 1
            self.touched.update(link.pools)
            if not link.count:
                link.idle_since = now
        if sent.carrier:
            self.in_flight[sent.carrier] -= 1
            if not self.in_flight[sent.carrier]:
                self.touched.update(self.slowed_by[sent.carrier])
        self._end(number, now)

    def _end(self, number: int, now: float) -> None:
        self.times.ends[number] = now
        if number not in self.graph.sent:
            self.times.on_link[number] = now
        waiting = self.waiting
        for later in self.behind[number]:
            waiting[later] -= 1
            if not waiting[later]:
                self.ready.append(later)

    def _go_on(self, now: float) -> None:
        """After all that ends in a moment: ops start, others reach their links, and everything has its pace until the
        next."""
        ready, sent = self.ready, self.graph.sent
        while ready:
            number = ready.pop()
            self.times.starts[number] = now
            if number in sent:
                self._send(number, sent[number], now)
            else:
                self._compute(number, now)
        if self.entering:
            self._reach_links(now)
        for index in self.touched:
            found = self.pools[index].look_ahead(now)
            if found is not None:
                heappush(self.coming, (*found, index))
        self.touched.clear()

    def _reach_links(self, now: float) -> None:
        entering, self.entering = self.entering, []
        sent = self.graph.sent
        ahead: dict[int, list[int]] = {}
        for number in entering:
            if self.head_starts.get(number):
                ahead.setdefault(sent[number].path, []).append(number)
        spared = {}
        for path, numbers in ahead.items():
            (link,) = self.crossed[path]
            idle_s = 0.0 if link.count else now - link.idle_since
            let_through = min(idle_s, max([self.head_starts[number] for number in numbers]))
            for number in numbers:
                spared[number] = min(self.head_starts[number], let_through / len(numbers))
        for number in entering:
            path = sent[number].path
            for link in self.crossed[path]:
                link.count += 1
                self.touched.update(link.pools)
            self.pools[self.of_path[path]].enter(number, sent[number].work_s - spared.get(number, 0.0), now)
            self.touched.add(self.of_path[path])


def _path_pace(graph: Graph, links: tuple[int, ...], under_way: list[_OnLink]) -> Callable[[], float]:
    """A path is as fast as the slowest of its links."""
    paces = [_link_pace(under_way[link], graph.links[link].efficiency) for link in links]
    return paces[0] if len(paces) == 1 else lambda: min([pace() for pace in paces])


def _link_pace(link: _OnLink, efficiency: Callable[[int], float] | None) -> Callable[[], float]:
    paces = [1.0, 1.0]

    def pace() -> float:
        while len(paces) <= link.count:
            count = len(paces)
            paces.append(min(efficiency(count) / count, 1.0) if efficiency else 1 / count)
        return paces[link.count]

    return pace


def _kind_pace(graph: Graph, kind: int, in_flight: list[int]) -> Callable[[], float]:
    """Computation is slowed down by the worst of what is in flight on its GPU."""
    gpu, slowdowns = graph.kinds[kind]
    paces = [
        (carrier, 1 / slowdowns.get(transport, 1.0))
        for (where, transport), carrier in graph.carriers.items()
        if where == gpu and carrier
    ]
    if len(paces) == 1:
        ((only, slowed),) = paces
        return lambda: slowed if in_flight[only] else 1.0
    return lambda: min([pace for carrier, pace in paces if in_flight[carrier]], default=1.0)
