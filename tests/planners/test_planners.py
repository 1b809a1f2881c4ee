"""Every strategy against its own rules, and the exact ones against exhaustive search."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backbeat as bb
from backbeat.model import ConcurrencyPoint, Network, Profile
from backbeat.model.files import decode, encode
from backbeat.model.rule import PLANS
from backbeat.planners import SHARDED, STRATEGIES
from backbeat.planners.adaptive import _constant_buffers
from backbeat.planners.baselines import merge_sweep
from backbeat.planners.best import _neighbours
from backbeat.planners.draft import Draft
from backbeat.planners.merge_buckets import simplified
from backbeat.planners.planned import planned, predicted
from backbeat.steps.schedule import capped
from tests.problems import affine, curve, every_partition, make_profile, networks, profiles

MIB = 2**20
WITHIN_ITERATION = sorted(set(STRATEGIES) - {"compressed"} - SHARDED)
ONE_COMMUNICATOR = ["wfbp", "single", "ddp", "horovod", "mg-wfbp", "adaptive"]


def ends_of(plan: bb.Plan) -> list[int]:
    return np.cumsum([len(bucket.gradients) for bucket in plan.buckets]).tolist()


@given(profiles(most=9), networks())
def test_optimal_is_what_exhaustive_search_finds(profile: Profile, network: Network) -> None:
    least = min(Draft(ends).end_s(profile, network.cost) for ends in every_partition(len(profile.gradients)))
    found = Draft(ends_of(planned(profile, network, "optimal"))).end_s(profile, network.cost)
    assert found == pytest.approx(least, rel=1e-9)


@given(profiles(most=60), networks())
def test_optimal_is_never_beaten_on_one_communicator(profile: Profile, network: Network) -> None:
    best = planned(profile, network, "optimal").predicted.iteration_s  # type: ignore[union-attr]
    for strategy in ONE_COMMUNICATOR:
        other = planned(profile, network, strategy, communicators=1).predicted.iteration_s  # type: ignore[union-attr]
        assert best <= other * (1 + 1e-9), strategy


@given(profiles(most=40), networks())
def test_best_is_never_beaten_by_more_than_simplicity_is_worth(profile: Profile, network: Network) -> None:
    best = predicted(profile, network, "best").iteration_s
    for strategy in WITHIN_ITERATION:
        assert best <= predicted(profile, network, strategy).iteration_s * (1 + PLANS + 1e-9), strategy
    assert best <= predicted(profile, network, "ddp").iteration_s * (1 + 1e-9)


@given(profiles(most=40), networks())
def test_best_has_no_more_buckets_than_a_plain_plan_that_is_as_good(profile: Profile, network: Network) -> None:
    best, ddp, single = (predicted(profile, network, name) for name in ("best", "ddp", "single"))
    for plain in (ddp, single):
        # `best` may give up 1 %, and no more than stock DDP does.
        allowed = min(best.iteration_s, ddp.iteration_s) * (1 + 1e-9)
        if plain.communicators <= best.communicators == 1 and plain.iteration_s <= allowed:
            assert best.buckets <= plain.buckets


@given(profiles(most=40), networks())
def test_a_second_communicator_gains_more_than_simplicity_is_worth(profile: Profile, network: Network) -> None:
    best, optimal = (predicted(profile, network, strategy) for strategy in ("best", "optimal"))
    if best.communicators > 1:
        assert best.iteration_s < optimal.iteration_s
    else:
        assert best.buckets <= optimal.buckets


def test_no_second_communicator_for_a_gain_below_one_per_cent() -> None:
    profile = make_profile([2 * 10**6] * 300, [1e-3 * index for index in range(300)])
    network = affine(1e-3, 1e-10)
    two = predicted(profile, network, planned(profile, network, "asc-wfbp"))
    best = predicted(profile, network, "best")
    # The last bucket waits for the one before it; a second communicator would hide that, 1 ms of 300.
    assert two.iteration_s < best.iteration_s < two.iteration_s * (1 + PLANS)
    assert (best.communicators, best.buckets) == (1, 23)


@settings(max_examples=40)
@given(profiles(most=5), networks())
def test_best_is_close_to_the_optimum_of_small_problems_on_two_communicators(
    profile: Profile, network: Network
) -> None:
    """Exhaustive over consecutive buckets and their communicators."""
    least = min(
        Draft(ends, 2, list(communicators)).end_s(profile, network.cost)
        for ends in every_partition(len(profile.gradients))
        for communicators in product((0, 1), repeat=len(ends))
    )
    floor = profile.forward_s + max(least, profile.backward_s) + profile.update_s
    assert predicted(profile, network, planned(profile, network, "best", communicators=2)).iteration_s <= floor * (
        1 + PLANS + 1e-9
    )


def published_merge(ready: list[float], sizes: list[float], a: float, b: float, *, asc: bool) -> list[int]:
    """MG-WFBP's (or ASC-WFBP's) sweep word for word: layers in forward order, all starts recomputed after a merge."""
    layers = len(ready)
    done = {layers - index: time for index, time in enumerate(ready)}  # tau_b + t_b of layer l, 1..L in forward order
    size = {layers - index: float(count) for index, count in enumerate(sizes)}

    def cost(layer: int) -> float:
        return a + b * size[layer] if size[layer] else 0.0

    def starts() -> dict[int, float]:
        tau = {layers: done[layers]}
        for layer in range(layers - 1, 0, -1):
            tau[layer] = max(tau[layer + 1] + cost(layer + 1), done[layer])
        return tau

    tau = starts()
    for layer in range(layers, 1, -1):
        following = done[layer - 1]
        if asc:
            merge = tau[layer] > following
        elif following >= tau[layer] + cost(layer):
            merge = False
        else:
            merge = tau[layer] > following or following - tau[layer] < a
        if merge:
            size[layer - 1] += size[layer]
            size[layer] = 0.0
            tau = starts()
    return [layers - layer + 1 for layer in range(layers, 0, -1) if size[layer]]


@given(profiles(most=40), st.sampled_from([1e-5, 1e-4, 1e-3]), st.sampled_from([1e-10, 1e-9, 1e-8]), st.booleans())
def test_the_sweep_is_the_published_merge(profile: Profile, alpha: float, beta: float, asc: bool) -> None:
    ready, sizes = profile.ready.tolist(), profile.sizes.tolist()
    found = merge_sweep(ready, sizes, alpha, beta, patience_s=None if asc else alpha)
    assert found == published_merge(ready, sizes, alpha, beta, asc=asc)


def test_asc_runs_on_two_streams_and_round_robin() -> None:
    profile = make_profile([10**6] * 6, [k * 3e-3 for k in range(6)])
    plan = planned(profile, affine(1e-3, 1e-9), "asc-wfbp")
    assert plan.communicators == 2
    assert [bucket.communicator for bucket in plan.buckets] == [0, 1, 0, 1, 0, 1]


def test_ddp_buckets_close_once_they_reach_their_cap() -> None:
    sizes = [MIB // 2, MIB // 2, 10 * MIB, 14 * MIB, MIB, 40 * MIB, 3 * MIB]
    profile = make_profile(sizes, [k * 1e-3 for k in range(7)])
    network = affine(1e-3, 1e-9)
    # First bucket at 1 MiB; then 10 + 14 + 1 reaches 25; 40 is over it alone; the rest.
    assert ends_of(planned(profile, network, "ddp")) == [2, 5, 6, 7]
    # With a cap given there is no small first bucket.
    assert ends_of(planned(profile, network, "ddp", bucket_bytes=25 * MIB)) == [4, 6, 7]
    assert planned(profile, network, "ddp").communicators == 1
    assert planned(profile, affine(1e-3, 1e-9, backend="gloo"), "ddp").communicators == 2


def test_wfbp_single_and_horovod() -> None:
    profile = make_profile([10**6] * 4, [0.2e-3, 0.9e-3, 1.5e-3, 9e-3])
    network = affine(1e-3, 1e-9)
    assert ends_of(planned(profile, network, "wfbp")) == [1, 2, 3, 4]
    assert ends_of(planned(profile, network, "single")) == [4]
    horovod = planned(profile, network, "horovod")
    assert ends_of(horovod) == [2, 3, 4]
    assert horovod.dynamic is not None
    assert horovod.dynamic.buffer_bytes == 64 * MIB


@given(st.lists(st.integers(1, 50), min_size=1, max_size=25), st.integers(1, 1300))
def test_the_walk_visits_every_constant_buffer(sizes: list[int], buffer: int) -> None:
    floats = [float(size) for size in sizes]
    assert capped(floats, [buffer]) in [ends for _, ends in _constant_buffers(tuple(floats))]


@given(profiles(most=25), networks(), st.integers(1, 3 * 10**7))
def test_adaptive_never_loses_to_a_constant_buffer(profile: Profile, network: Network, buffer: int) -> None:
    constant = Draft(capped(profile.sizes.tolist(), [buffer])).end_s(profile, network.cost)
    found = Draft(ends_of(planned(profile, network, "adaptive"))).end_s(profile, network.cost)
    assert found <= constant * (1 + 1e-9)


@given(profiles(most=40), networks(), st.sampled_from(WITHIN_ITERATION))
def test_every_plan_carries_every_gradient_once_and_is_the_same_twice(
    profile: Profile, network: Network, strategy: str
) -> None:
    plan = planned(profile, network, strategy)
    assert [name for bucket in plan.buckets for name in bucket.gradients] == [item.name for item in profile.gradients]
    assert plan == planned(profile, network, strategy)
    assert plan.predicted is not None
    result = predicted(profile, network, plan)
    assert result.iteration_s == pytest.approx(plan.predicted.iteration_s)
    times = list(zip(plan.predicted.launch_s, plan.predicted.done_s, strict=True))
    assert times == result.bucket_times()
    assert len(times) == (len(plan.buckets) if network.workers > 1 else 0)
    assert all(-1e-12 <= launch <= done for launch, done in times)
    assert decode(encode(plan), bb.Plan, where="the plan") == plan


def test_two_communicators_are_chosen_where_calibration_says_one_does_not_fill_the_link() -> None:
    rows = tuple(
        ConcurrencyPoint(bytes=MIB, messages=8, communicators=2, seconds=4 * (1e-5 + 2 * 1e-9 * MIB / share))
        for share in (1.5,)
    )
    profile = make_profile([4 * MIB] * 8, [k * 1e-3 for k in range(8)])
    assert planned(profile, affine(1e-5, 1e-9, concurrency=rows), "best").communicators == 2
    contended = (ConcurrencyPoint(bytes=MIB, messages=2, communicators=2, seconds=1e-5 + 4 * 1e-9 * MIB),)
    assert planned(profile, affine(1e-5, 1e-9, concurrency=contended), "best").communicators == 1


def test_thousands_of_gradients_on_a_measured_curve() -> None:
    random = np.random.default_rng(0)
    profile = make_profile(random.integers(100, 10**6, 3000).tolist(), np.sort(random.uniform(0, 0.5, 3000)).tolist())
    points = [(2**power, 1e-4 + 1e-9 * 2**power) for power in range(10, 28)]
    exact, straight = planned(profile, curve(points), "optimal"), planned(profile, affine(1e-4, 1e-9), "optimal")
    assert exact.predicted is not None
    assert straight.predicted is not None
    assert exact.predicted.iteration_s == pytest.approx(straight.predicted.iteration_s, rel=1e-3)


def test_bad_options_are_refused() -> None:
    profile, network = make_profile([1], [0.0]), affine(1e-3, 1e-9)
    with pytest.raises(bb.InputError, match="did you mean 'optimal'"):
        planned(profile, network, "optimum")
    with pytest.raises(bb.InputError, match="communicators is 0"):
        planned(profile, network, "wfbp", communicators=0)
    with pytest.raises(bb.InputError, match="bucket_bytes is -1"):
        planned(profile, network, "ddp", bucket_bytes=-1)


def test_best_takes_no_communicator_for_a_rounding_error_and_none_without_a_bucket() -> None:
    profile = make_profile([10**6] * 12, [1e-4 * (k + 1) for k in range(12)])
    # No latency: communicators cannot help, however many are offered.
    assert planned(profile, affine(0.0, 1e-9), "best", communicators=4).communicators == 1
    two = make_profile([10**6, 10**6], [1e-3, 2e-3])
    assert planned(two, affine(1e-3, 1e-9), "best", communicators=10**12).communicators <= 2


@given(profiles(most=20), networks())
def test_merging_what_costs_nothing_costs_nothing(profile: Profile, network: Network) -> None:
    alone = Draft(list(range(1, len(profile.gradients) + 1)), 2)
    end = alone.end_s(profile, network.cost)
    simple = simplified(alone, profile, network.cost)
    assert simple.end_s(profile, network.cost) <= max(end, profile.backward_s) * (1 + 1e-9)
    assert len(simple.ends) <= len(alone.ends)
    assert simple.ends[-1] == len(profile.gradients)


def test_buckets_that_are_hidden_anyway_are_merged() -> None:
    """A backward that goes on long after the last gradient hides any bucketing: one bucket is left of thirty."""
    profile = make_profile([10**5] * 30, [k * 1e-3 for k in range(1, 31)], backward=1.0)
    alone = Draft(list(range(1, 31)), 2)
    assert simplified(alone, profile, affine(1e-3, 1e-9).cost).ends == [30]


def test_any_bucketing_is_reached_by_small_changes() -> None:
    start = Draft([4], 2)
    reached = {(4,): start}
    left = [start]
    while left:
        for one in _neighbours(left.pop(), 1):
            if tuple(one.ends) not in reached:
                reached[tuple(one.ends)] = one
                left.append(one)
    assert sorted(reached) == sorted(map(tuple, every_partition(4)))


@given(profiles(), networks())
def test_best_gains_one_percent_on_ddp_where_any_plan_does(profile: Profile, network: Network) -> None:
    ddp, optimal, best = (predicted(profile, network, name).iteration_s for name in ("ddp", "optimal", "best"))
    if min(optimal, best) > 0 and profile.iteration_s == () and ddp / optimal - 1 > PLANS * 1.01:
        assert ddp / best - 1 >= PLANS * 0.99
