"""Jumps in a curve are found, and found where they are, on clusters whose cost is known."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import assume, given
from hypothesis import strategies as st
from known_cluster import Cluster

from backbeat.cost.curve import Curve
from backbeat.cost.samples import summarise
from backbeat.measure.network.case import SIZES, Case
from backbeat.measure.network.jumps import BUDGET_SHARE, jumps, refine_jumps

BUDGET_S = 20.0


def stepped(alpha: float, beta: float, at: int, height: float) -> Callable[[int], float]:
    return lambda size: (alpha if size < at else alpha * height) + beta * size


def refined(cost: Callable[[int], float]) -> tuple[Curve, Curve, Cluster]:
    """The curve through the usual sizes, the one with what was added, and the cluster."""
    before = {Case(bytes=size): summarise([cost(size)] * 8) for size in SIZES}
    cluster = Cluster(lambda case: cost(case.bytes))
    after = {**before, **refine_jumps(cluster, before, BUDGET_S, lambda what, share: None)}
    curves = [
        Curve.through(sorted((case.bytes, one.median_s) for case, one in timings.items()))
        for timings in (before, after)
    ]
    return curves[0], curves[1], cluster


@given(st.floats(2e-5, 1e-3), st.floats(1e-10, 1e-9))
def test_a_line_has_no_jumps(alpha: float, beta: float) -> None:
    cost = stepped(alpha, beta, 0, 1.0)
    assert jumps({size: cost(size) for size in SIZES}) == []
    assert refined(cost)[2].taken == []


@given(st.integers(5_000, 150_000), st.floats(1.5, 3.0))
def test_the_interval_of_a_jump_shrinks_to_a_fifth(at: int, height: float) -> None:
    cost = stepped(2e-4, 1e-9, at, height)
    low = max(size for size in SIZES if size < at)
    high = min(size for size in SIZES if size >= at)
    assume(high - low > 64)
    plain, better, _ = refined(cost)
    sizes = range(low, high, max((high - low) // 200, 1))
    wrong = [sum(abs(float(curve.time(size)) / cost(size) - 1) > 0.03 for size in sizes) for curve in (plain, better)]
    assert wrong[1] <= 0.22 * len(sizes) + 2
    assert wrong[1] <= wrong[0]


def test_a_slow_network_is_not_measured_for_longer_than_its_share() -> None:
    for seconds in (0.01, 0.05, 0.2):
        _, _, cluster = refined(stepped(seconds, 1e-9, 40_000, 3.0))
        assert cluster.now <= BUDGET_SHARE * BUDGET_S
        # Where a few samples fit, they are taken; where not, none are.
        assert bool(cluster.taken) == (3 * seconds * 6 < BUDGET_SHARE * BUDGET_S)


@given(st.dictionaries(st.integers(1, 2**20), st.floats(0.0, 1e-2), max_size=12), st.floats(0.0, 10.0))
def test_whatever_was_measured_the_share_is_kept_and_sizes_are_new(times: dict[int, float], budget_s: float) -> None:
    """Times in any order, equal ones, none at all, sizes that are no multiple of four."""
    before = {Case(bytes=size): summarise([seconds] * 8) for size, seconds in times.items()}
    steps = sorted(times)
    cluster = Cluster(lambda case: max([times[step] for step in steps if step <= case.bytes], default=0.0))
    # Where a smaller size took longer, no limit was foreseen.
    rising = [times[step] for step in steps] == sorted(times.values())
    found = refine_jumps(cluster, before, budget_s, lambda what, share: None)
    assert not found.keys() & before.keys()
    assert all(case.bytes % 4 == 0 and steps[0] < case.bytes < steps[-1] for case in found)
    assert not rising or cluster.now <= BUDGET_SHARE * budget_s * (1 + 1e-9)
