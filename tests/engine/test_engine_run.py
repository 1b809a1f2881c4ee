"""The engine: against a slow one, against the recursion, and what holds of every graph."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.engine import Graph, SharedLink, run
from backbeat.engine.events import run_events
from backbeat.engine.graph import MOST_OPS, check_size
from backbeat.engine.run import run_in_order
from backbeat.errors import DeadlockError, InputError
from tests.engine.graph_problems import TRANSPORTS, GraphSpec, graph_specs, run_slowly, times

seconds = st.floats(0.0, 5.0)


@settings(max_examples=150)
@given(graph_specs())
def test_a_slow_engine_agrees(spec: GraphSpec) -> None:
    graph, _ = spec.graph()
    tick = 1 / 400
    # Every op on the way to an end may be off by a tick, and what it delays by as much again.
    assert run(graph).ends == pytest.approx(run_slowly(graph, tick), rel=0, abs=tick * (2 * len(graph) + 1))


messages = st.lists(st.tuples(seconds, st.floats(-2.0, 2.0), st.floats(0.0, 2.0), seconds), min_size=1, max_size=8)


@given(messages, st.booleans())
def test_one_lane_is_the_recursion(rows: list[tuple[float, float, float, float]], events: bool) -> None:
    """F_k = max(R_k + T_k, F_(k-1) + T_busy,k)."""
    graph, now, free = Graph(), 0.0, float("-inf")
    link, expected = graph.link(), []
    for ready, own, behind, more in rows:
        work = max(-own, 0.0) + more
        now += ready
        done = graph.add(("compute",), ready)
        graph.add(("communicator",), own, work_s=work, behind_s=behind, links=(link,), after=(done,))
        free = max(now + own + work, free + behind + work)
        expected.append(free)
    found = (run_events(graph) if events else run(graph)).ends[1::2]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=200)
@given(graph_specs(shared=False, ahead=True, most=12))
def test_in_order_and_events_agree_where_nothing_is_shared(spec: GraphSpec) -> None:
    graph, _ = spec.graph()
    assert not graph.shares_pace()
    one, other = run_in_order(graph), run_events(graph)
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.sampled_from(["compute", "send", "send", "fixed"]), times, times, st.integers(0, 1), st.data()),
        max_size=14,
    ),
    st.lists(
        st.fixed_dictionaries(dict.fromkeys(TRANSPORTS, st.sampled_from([1.0, 1.5, 2.0]))), min_size=2, max_size=2
    ),
)
def test_in_order_and_events_agree_where_one_lane_computes(
    rows: list[tuple[str, float, float, int, st.DataObject]], slowdowns: tuple[dict[str, float], ...]
) -> None:
    """Also beside what is issued after it."""
    graph = Graph()
    kinds = [graph.kind(each) for each in slowdowns]
    links = [graph.link() for _ in range(2)]
    for number, (form, seconds, work, which, data) in enumerate(rows):
        after = data.draw(st.lists(st.integers(0, number - 1), max_size=2)) if number else ()
        if form == "compute":
            graph.add(("gpu",), seconds, kind=kinds[which], after=after)
        elif form == "fixed":
            graph.add(("gpu",), seconds, after=after)
        else:
            transport = TRANSPORTS[which]
            graph.add((which,), seconds, work_s=work, links=(links[which],), transport=transport, after=after)
    assert graph.one_computes
    assert not graph.shares_links()
    for mine, theirs in zip(run_in_order(graph), run_events(graph), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_what_begins_beside_computation_may_be_issued_after_it() -> None:
    graph = Graph()
    kind = graph.kind({"efa": 2.0})
    graph.add(("gpu",), 2.0, kind=kind)
    graph.add(("communicator",), 1.0, transport="efa")
    assert run(graph).ends == [2.5, 1.0]
    graph.add(("another gpu",), 1.0, kind=kind)
    assert not graph.one_computes
    assert run(graph).ends == [2.5, 1.0, 1.5]


def _less(spec: GraphSpec, data: st.DataObject, *, all_of_it: bool) -> GraphSpec:
    """The same with some seconds and some work taken away; `all_of_it`: with one op gone."""
    found = copy.deepcopy(spec)
    if all_of_it:
        gone = data.draw(st.integers(0, len(found.ops) - 1))
        found.ops[gone].seconds = found.ops[gone].work_s = 0.0
        return found
    for op in found.ops:
        op.work_s *= data.draw(st.sampled_from([1.0, 0.5]))
        if op.seconds > 0:
            op.seconds *= data.draw(st.sampled_from([1.0, 0.5]))
    return found


@settings(max_examples=200)
@given(graph_specs(shared=False, most=12), st.booleans(), st.data())
def test_less_to_do_never_ends_later_where_nothing_is_shared(
    spec: GraphSpec, all_of_it: bool, data: st.DataObject
) -> None:
    before, after = (run(each.graph()[0]).ends for each in (spec, _less(spec, data, all_of_it=all_of_it)))
    assert all(less <= more + 1e-9 for less, more in zip(after, before, strict=True))


@settings(max_examples=300)
@given(graph_specs(behind=False, paths=False, most=12), st.booleans(), st.data())
def test_less_to_do_ends_later_by_a_bounded_factor_where_pace_is_shared(
    spec: GraphSpec, all_of_it: bool, data: st.DataObject
) -> None:
    """An op that ends earlier may let others meet on a link, or meet computation, that did not meet before: as with
    list scheduling, less to do can take longer. How much longer is bounded.

    Take the critical path of the run with less to do, T' long. At every moment one of its ops is under way, and is
    either in its own seconds or on its link.

    - Own seconds of the path's ops add up to P' at most, the longest path of own seconds. They take at most s times as
      long, s being the largest stretch of a latency or slowdown of computation. That is s·P'.
    - While an op of the path is on link l, that link does at least e_min seconds of work a second, e_min being the
      least of what its ops can do together. It has W'_l to do in all. That is W'_l / e_min at most for each link.

    So T' <= s·P' + sum of W'_l / e_min. With more to do the longest path P >= P' takes P at least, and link l does at
    most e_max seconds of work a second: T >= P and T >= W_l / e_max. So T' <= (s + sum of e_max / e_min)·T. On one link
    that is shared perfectly, beside which nothing slows down, less to do takes at most twice as long.
    """
    less = _less(spec, data, all_of_it=all_of_it)
    before, after = run(spec.graph()[0]).end_s, run(less.graph()[0]).end_s
    slower = max([1.0, *less.stretches, *(one for _, slowdowns in less.slowdowns for one in slowdowns.values())])
    # No more than n of n ops: e(2) = 1.6 is no more than 1.6.
    rates = [(min(1.0, each), max(1.0, each)) for each in less.efficiencies]
    graph, _ = less.graph()
    longest: list[float] = []
    for own, others in zip(graph.seconds, graph.before, strict=True):
        longest.append(own + max([longest[other] for other in others], default=0.0))
    works = [sum(op.work_s for op in less.ops if op.links == (link,)) for link in range(len(rates))]
    on_links = sum(work / least for work, (least, _) in zip(works, rates, strict=True))
    assert after <= slower * max(longest) + on_links + 1e-9
    assert after <= (slower + sum(most / least for least, most in rates)) * before + 1e-9


def test_less_to_do_can_take_longer() -> None:
    """A first message that is shorter lets a second one, which something long waits for, meet a third."""

    def end_s(first_s: float) -> float:
        graph = Graph()
        link = (graph.link(),)
        first = graph.add(("a",), first_s)
        graph.add(("b",), 0.0, work_s=2.0, links=link, after=(first,))
        urgent = graph.add(("c",), 0.0, work_s=2.0, links=link)
        graph.add(("gpu",), 5.0, after=(urgent,))
        return run(graph).end_s

    assert (end_s(2.0), end_s(0.0)) == (7.0, 9.0)


@given(graph_specs(ahead=True), st.sampled_from([1e-3, 0.25, 3.0, 1e3]))
def test_times_scale_with_all_that_is_given(spec: GraphSpec, factor: float) -> None:
    graph, _ = spec.graph()
    rows = {
        op: (0.0, None) if sent is None else (sent.work_s * factor, sent.behind_s and sent.behind_s * factor)
        for op, sent in ((op, graph.sent.get(op)) for op in range(len(graph)))
    }
    longer = graph.retimed({op: (graph.seconds[op] * factor, *row) for op, row in rows.items()})
    assert run(longer).ends == pytest.approx([factor * end for end in run(graph).ends], rel=1e-9, abs=1e-12)


@settings(max_examples=300)
@given(graph_specs(ahead=True), st.data())
def test_the_order_of_adding_independent_ops_does_not_matter(spec: GraphSpec, data: st.DataObject) -> None:
    """Ops may be added in any order that keeps that of each lane, and those before an op before it."""
    graph, _ = spec.graph()
    left, order = set(range(len(spec.ops))), []
    while left:
        free = [op for op in sorted(left) if left.isdisjoint(graph.before[op])]
        order.append(data.draw(st.sampled_from(free)))
        left.remove(order[-1])
    other, numbers = spec.graph(order)
    found, again = run(graph), run(other)
    for mine, theirs in zip(found, again, strict=True):
        assert [theirs[number] for number in numbers] == pytest.approx(mine, rel=1e-9, abs=1e-12)


def test_ops_that_reach_an_idle_link_together_share_its_head_start() -> None:
    graph = Graph()
    link = (graph.link(),)
    for lane in ("a", "b"):
        graph.add((lane,), -1.0, work_s=2.0, behind_s=0.0, links=link)
    # An isolated one takes 1 s; two have 4 s of work, of which the link lets through 1 at once.
    assert run(graph).ends == [3.0, 3.0]


def test_a_head_start_is_no_longer_than_the_link_was_idle() -> None:
    graph = Graph()
    link = (graph.link(),)
    wait = graph.add(("compute",), 2.5)
    graph.add(("a",), 0.0, work_s=2.0, links=link)
    graph.add(("b",), -1.0, work_s=2.0, behind_s=0.0, links=link, after=(wait,))
    assert run(graph).ends == pytest.approx([2.5, 2.0, 4.0])


def test_computation_is_slowed_by_the_worst_of_what_is_in_flight_on_its_gpu() -> None:
    graph = Graph()
    link = (graph.link(),)
    kinds = [graph.kind({"nvlink": 2.0, "efa": 1.5}, gpu) for gpu in (0, 1)]
    graph.add(("a",), 2.0, transport="nvlink", links=link)
    graph.add(("b",), 4.0, transport="efa", links=link)
    graph.add(("gpu 0",), 4.0, kind=kinds[0])
    graph.add(("gpu 1",), 4.0, kind=kinds[1])
    # 2 s at half speed, 2 s at two thirds, and the rest alone; nothing is in flight on the other GPU.
    assert run(graph).ends[2:] == pytest.approx([4 + 4 - 1 - 2 / 1.5, 4.0])


def test_latencies_slow_each_other_down_on_one_link_only() -> None:
    graph = Graph()
    first, second = (graph.link(SharedLink(stretch=lambda count: 1.5)) for _ in range(2))
    for lane, links in (("a", (first,)), ("b", (first, second)), ("c", (second,))):
        graph.add((lane,), 1.0, work_s=0.0, links=links)
    # An op across two links has its latency on the first.
    assert run(graph).ends == pytest.approx([1.5, 1.5, 1.0])


@given(st.lists(times, min_size=1, max_size=4), st.lists(times, min_size=1, max_size=4))
def test_ops_across_two_links_take_the_pace_of_the_busier(one: list[float], both: list[float]) -> None:
    graph = Graph()
    links = graph.link(), graph.link()
    for index, work in enumerate(one):
        graph.add((index,), 0.0, work_s=work, links=links[:1])
    for index, work in enumerate(both):
        graph.add((-1 - index,), 0.0, work_s=work, links=links)
    # All cross the first link, which is the busier at every moment.
    assert run(graph).end_s == pytest.approx(sum(one) + sum(both))


def test_a_transfer_without_its_other_end_names_itself() -> None:
    graph = Graph()
    first = graph.add(("stage 0",), 1.0, label="forward 0 of stage 0")
    graph.meet(("F", 0, 1), 0.5, after=(first,), label="activations 0 to stage 1")
    with pytest.raises(DeadlockError, match="activations 0 to stage 1 waits for its other end"):
        run(graph)


@pytest.mark.parametrize("shared", [False, True])
def test_ops_that_wait_for_each_other_are_named(shared: bool) -> None:
    graph = Graph()
    if shared:
        graph.add(("a",), 1.0, work_s=1.0, links=(graph.link(),))
        graph.add(("b",), 1.0, work_s=1.0, links=(0,))
    first = graph.add(("stage 0",), 1.0, label="first")
    second = graph.add(("stage 1",), 1.0, after=(first,), label="second")
    graph.wait(first, second)
    assert graph.shares_pace() == shared
    with pytest.raises(DeadlockError, match="first waits for second; second waits for first"):
        run(graph)


@given(st.permutations(range(5)))
def test_ops_may_wait_for_what_is_added_later(order: list[int]) -> None:
    graph = Graph()
    for _ in order:
        graph.add((), 1.0)
    for before, later in itertools.pairwise(order):
        graph.wait(later, before)
    assert [run(graph).ends[op] for op in order] == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("engine", [run_in_order, run_events])
def test_a_long_row_of_ops_that_take_no_time_ends(engine: Callable[[Graph], object]) -> None:
    graph = Graph()
    for _ in range(5000):
        graph.add(("host",), 0.0)
    assert run(graph).end_s == 0.0
    engine(graph)


def test_a_graph_too_large_is_refused() -> None:
    graph = Graph()
    check_size(graph)
    graph.seconds = [0.0] * (MOST_OPS + 1)
    with pytest.raises(InputError, match="50001 operations: at most 50000"):
        check_size(graph)


def test_without_limits_on_communicators_each_message_has_its_own() -> None:
    """Two messages of 1 s latency and 1 s of work on one communicator, which share the link without it."""
    graph = Graph()
    link = graph.link()
    for _ in range(2):
        graph.add(("communicator",), 1.0, work_s=1.0, links=(link,), cause="all-reduce")
    assert run(graph).ends == [2.0, 4.0]
    assert run(graph.unlimited()).ends == [3.0, 3.0]
    assert run(graph).ends == [2.0, 4.0]
