"""Random graphs, and a second engine to run them: slow, and nothing like the first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from backbeat.engine import Graph, SharedLink

TRANSPORTS = ("nvlink", "efa")


@dataclass
class OpSpec:
    """What `Graph.add` is given, so that the same ops can be added in another order or with other times."""

    lanes: tuple[str, ...]
    seconds: float
    after: tuple[int, ...] = ()
    work_s: float = 0.0
    behind_s: float | None = None
    links: tuple[int, ...] = ()
    kind: int = 0
    transport: str | None = None
    gpu: int = 0


@dataclass
class GraphSpec:
    ops: list[OpSpec]
    efficiencies: list[float] = field(default_factory=list)
    """e(n) of each link, for every n above 1."""
    stretches: list[float] = field(default_factory=list)
    slowdowns: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def graph(self, order: list[int] | None = None) -> tuple[Graph, list[int]]:
        """The ops added in this order, and the number that each got."""
        made = Graph()
        for efficiency, stretch in zip(self.efficiencies, self.stretches, strict=True):
            made.link(
                SharedLink(
                    None if efficiency == 1 else lambda count, value=efficiency: value,
                    None if stretch == 1 else lambda count, value=stretch: value,
                )
            )
        for gpu, slowdowns in self.slowdowns:
            made.kind(slowdowns, gpu)
        numbers = [-1] * len(self.ops)
        for index in range(len(self.ops)) if order is None else order:
            fields: dict[str, Any] = dict(vars(self.ops[index]))
            after = tuple(numbers[other] for other in fields.pop("after"))
            numbers[index] = made.add(fields.pop("lanes"), fields.pop("seconds"), after=after, **fields)
        return made, numbers


times = st.integers(0, 40).map(lambda count: count / 20)
"""On a grid, so that ops often start together."""


@st.composite
def graph_specs(
    draw: st.DrawFn, *, most: int = 9, shared: bool = True, behind: bool = True, ahead: bool = False, paths: bool = True
) -> GraphSpec:
    """Ops on a few lanes. `shared`: on links and GPUs whose pace they share; `behind`: with other times behind others;
    `ahead`: with head starts; `paths`: across several links at once."""
    link_count = draw(st.integers(1, 2))
    slowdown = st.sampled_from([1.0, 1.5, 2.0]) if shared else st.just(1.0)
    kinds = draw(
        st.lists(st.tuples(st.integers(0, 1), st.fixed_dictionaries(dict.fromkeys(TRANSPORTS, slowdown))), max_size=3)
    )
    ops: list[OpSpec] = []
    for index in range(draw(st.integers(1, most))):
        after = tuple(draw(st.sets(st.integers(0, index - 1), max_size=2))) if index else ()
        seconds = draw(times)
        form = draw(st.sampled_from(["fixed", "compute", "collective", "collective"]))
        if form == "fixed":
            ops.append(OpSpec((draw(st.sampled_from(["host", "copy"])),), seconds, after))
        elif form == "compute":
            ops.append(
                OpSpec((f"gpu {draw(st.integers(0, 1))}",), seconds, after, kind=draw(st.integers(0, len(kinds))))
            )
        else:
            link = draw(st.integers(0, link_count - 1))
            lane = f"communicator {draw(st.integers(0, 2))}" if shared else f"link {link}"
            links = (0, 1) if shared and paths and link_count == 2 and draw(st.integers(0, 3)) == 0 else (link,)
            work, right_behind = draw(times), draw(times)
            given_behind = behind and len(links) == 1 and draw(st.booleans())
            if ahead and given_behind:
                seconds = max(seconds - 1.0, -work)
            ops.append(
                OpSpec(
                    (lane,), seconds, after, work, right_behind if given_behind else None, links,
                    transport=draw(st.sampled_from([None, *TRANSPORTS])), gpu=draw(st.integers(0, 1)),
                )
            )  # fmt: skip
    efficiency = st.sampled_from([0.7, 1.0, 1.6]) if shared else st.just(1.0)
    stretch = st.sampled_from([1.0, 1.3]) if shared else st.just(1.0)
    return GraphSpec(
        ops, [draw(efficiency) for _ in range(link_count)], [draw(stretch) for _ in range(link_count)], kinds
    )


def run_slowly(graph: Graph, tick: float) -> list[float]:
    """When each op ends, to within a few ticks: what is under way does a little at every tick. No head starts."""
    count = len(graph)
    paths = {index: links for links, index in graph.paths.items()}
    transports = {index: key for key, index in graph.carriers.items()}
    links_of = {op: paths[sent.path] for op, sent in graph.sent.items()}
    own: dict[int, float] = {}
    work = {op: graph.sent[op].work_s if op in graph.sent else 0.0 for op in range(count)}
    ends: dict[int, float] = {}
    for moment in range(10**6):
        now = moment * tick
        changed = True
        while changed:
            changed = False
            for op in range(count):
                if op not in own and all(before in ends for before in graph.before[op]):
                    changed, own[op] = True, graph.seconds[op]
                    sent = graph.sent.get(op)
                    if sent is not None and sent.behind_s is not None and sent.follows >= 0:
                        last, behind = sent.follows, sent.behind_s
                        ready = max([ends[one] for one in graph.before[op] if one != last], default=0.0)
                        own[op] = max(ready + graph.seconds[op], ends[last] + behind) - now
                if op in own and op not in ends and own[op] <= tick / 2 and work[op] <= tick / 2:
                    changed, ends[op] = True, now
        if len(ends) == count:
            return [ends[op] for op in range(count)]
        going = [op for op in own if op not in ends]
        assert going, "a graph that cannot end"
        in_latency = Counter(links_of[op][0] for op in going if links_of.get(op) and own[op] > tick / 2)
        on_link = Counter(link for op in going if own[op] <= tick / 2 for link in links_of.get(op, ()))
        flying = {transports[graph.sent[op].carrier] for op in going if op in graph.sent}
        for op in going:
            links = links_of.get(op, ())
            if own[op] > tick / 2:
                pace = 1.0
                if links and in_latency[links[0]] > 1 and (stretch := graph.links[links[0]].stretch):
                    pace = 1 / stretch(in_latency[links[0]])
                elif not links:
                    gpu, slowdowns = graph.kinds[graph.kind_of.get(op, 0)]
                    pace = 1 / max([slowdowns.get(name, 1.0) for where, name in flying if where == gpu], default=1.0)
                own[op] -= tick * pace
            else:
                rates = []
                for link in links:
                    n, efficiency = on_link[link], graph.links[link].efficiency
                    rates.append(1.0 if n == 1 else min((efficiency(n) if efficiency else 1.0) / n, 1.0))
                work[op] -= tick * min(rates)
    raise AssertionError("a graph that does not end")
