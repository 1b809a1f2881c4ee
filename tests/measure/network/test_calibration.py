"""What calibration decides and fits, on clusters whose cost is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_cluster import Cluster

pytest.importorskip("torch")

from backbeat.cost.samples import Timing, summarise
from backbeat.errors import InputError, MeasurementError
from backbeat.measure.network.calibration import calibrate
from backbeat.measure.network.case import (
    BATCH_SIZES,
    SIZES,
    Case,
    Series,
    held_out_cases,
    series_of,
    smallest_of_each_kind,
)
from backbeat.measure.network.findings import _isolated, misfits, network_from, warnings
from backbeat.measure.network.sampling import BRIEF_REPEATS, FEWEST_REPEATS, REPEATS, SamplingOutcome, sample_cases
from backbeat.model import Network
from backbeat.units import doubling


def affine(alpha: float, beta: float) -> Callable[[Case], float]:
    def cost(case: Case) -> float:
        rounds = -(-case.messages // case.communicators)
        return alpha * rounds + beta * case.bytes * case.messages

    return cost


def run(cluster: Cluster, budget_s: float = 60.0, sizes: Sequence[int] = SIZES) -> SamplingOutcome:
    return sample_cases(cluster, series_of(list(sizes), [1, 2, 4], ()), budget_s, lambda what, share: None)


def fitted(outcome: SamplingOutcome) -> Network:
    return network_from(outcome.timings, name="known", workers=4, backend="nccl")


@settings(max_examples=40, deadline=None)
@given(alpha=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e8, 4e10))
def test_a_known_affine_cost_is_fitted_back(alpha: float, bandwidth: float) -> None:
    outcome = run(Cluster(affine(alpha, 1 / bandwidth)), budget_s=1e4)
    cost = fitted(outcome).cost
    found_alpha, found_beta = cost.isolated.line
    assert found_alpha == pytest.approx(alpha, rel=1e-6)
    assert found_beta == pytest.approx(1 / bandwidth, rel=1e-6)
    assert cost.isolated.link_s_per_byte == pytest.approx(1 / bandwidth, rel=1e-6)
    assert cost.efficiencies == {2: pytest.approx(1.0, rel=1e-3), 4: pytest.approx(1.0, rel=1e-3)}


def test_noise_moves_the_fit_little() -> None:
    outcome = run(Cluster(affine(2e-4, 1e-9), noise=0.05))
    alpha, beta = fitted(outcome).cost.isolated.line
    assert alpha == pytest.approx(2e-4, rel=0.06)
    assert beta == pytest.approx(1e-9, rel=0.06)


def test_a_network_survives_its_file(tmp_path: object) -> None:
    network = fitted(run(Cluster(affine(2e-4, 1e-9))))
    path = f"{tmp_path}/network.json"
    network.save(path)
    assert Network.load(path) == network


def test_a_calm_network_ends_early_with_enough_repeats() -> None:
    cluster = Cluster(affine(1e-4, 1e-10))
    outcome = run(cluster, budget_s=1e4)
    assert outcome.stable
    assert cluster.now < 100
    assert not outcome.dropped
    assert min(timing.repeats for timing in outcome.timings.values()) >= REPEATS


@pytest.mark.parametrize("beta", [1e-9, 1e-8, 1e-7, 1e-6])
def test_a_slow_network_loses_its_largest_sizes_first(beta: float) -> None:
    cluster = Cluster(affine(1e-3, beta), noise=0.3)
    outcome = run(cluster, budget_s=20.0)
    assert cluster.now < 25
    isolated = [case.bytes for case in outcome.timings if case.messages == 1]
    assert isolated == list(SIZES[: len(isolated)])
    assert min(timing.repeats for timing in outcome.timings.values()) >= REPEATS
    assert {case.bytes for case in outcome.dropped if case.messages == 1} == set(SIZES[len(isolated) :])


@pytest.mark.parametrize(("alpha", "beta"), [(1e-2, 1e-9), (1e-3, 1e-8), (1e-4, 3e-8)])
def test_a_job_that_waits_reaches_larger_messages(alpha: float, beta: float) -> None:
    """In the same time: what latency hides is tried, and no size is repeated often before all are."""
    sizes = [4096, 65536, 524288, 2**20, 2**22, 2**24, 25 * 2**20]
    reached, elapsed = [], []
    for brief in (False, True):
        cluster = Cluster(affine(alpha, beta), noise=0.1)
        cases = series_of(sizes, [1, 2], ("all_gather", "reduce_scatter"), sharded=True, brief=brief)
        outcome = sample_cases(cluster, cases, 6.0, lambda what, share: None, brief=brief)
        largest = [_isolated(outcome.timings, one)[-1].bytes for one in ("all_reduce", "all_gather", "reduce_scatter")]
        reached.append(min(largest))
        elapsed.append(cluster.now)
        assert min(timing.repeats for timing in outcome.timings.values()) >= (BRIEF_REPEATS if brief else REPEATS)
    assert reached[1] >= 4 * reached[0]
    assert max(elapsed) < 8


def test_a_budget_too_small_for_anything_still_gives_a_curve() -> None:
    outcome = run(Cluster(affine(0.5, 1e-6)), budget_s=1.0)
    assert [case.bytes for case in outcome.timings] == list(SIZES[:2])
    assert all(timing.repeats >= FEWEST_REPEATS for timing in outcome.timings.values())
    assert len(fitted(outcome).all_reduce.points or ()) == 2


def test_a_network_that_slows_down_gives_up_sizes_rather_than_time() -> None:
    cluster = Cluster(affine(1e-4, 1e-9))
    calm = cluster.cost
    cluster.cost = lambda case: calm(case) * (1 if cluster.now < 2 else 30)
    outcome = run(cluster, budget_s=10.0)
    assert cluster.now < 120
    assert all(timing.repeats >= FEWEST_REPEATS for timing in outcome.timings.values())
    assert outcome.dropped


def test_sizes_take_turns() -> None:
    """A drift must not fall on one size alone: no size is finished before another begins its repeats."""
    cluster = Cluster(affine(1e-3, 1e-9), noise=0.2)
    run(cluster, budget_s=30.0)
    order = [case for case in cluster.taken if case.messages == 1][2 * len(SIZES) :]
    half = order[: len(order) // 2]
    assert set(half) == set(order)


def test_rounds_are_the_same_on_every_rank() -> None:
    one, other = (Cluster(affine(1e-3, 1e-9), noise=0.2, seed=5) for _ in range(2))
    run(one, budget_s=10.0)
    run(other, budget_s=10.0)
    assert one.taken == other.taken


def test_a_falling_point_is_pooled_and_reported() -> None:
    cost = affine(1e-3, 1e-9)
    outcome = run(Cluster(lambda case: cost(case) * (3 if case.bytes == 2**16 else 1)), budget_s=1e4)
    points = fitted(outcome).all_reduce.points or ()
    assert [seconds for _, seconds in points] == sorted(seconds for _, seconds in points)
    assert any("faster than a smaller one" in warning for warning in warnings(outcome))


def test_jitter_is_reported() -> None:
    outcome = run(Cluster(affine(1e-3, 1e-9), noise=1.0), budget_s=5.0)
    assert any("jitter over 20%" in warning for warning in warnings(outcome))
    assert not warnings(run(Cluster(affine(1e-3, 1e-9)), budget_s=1e4))


def test_communicators_that_the_model_cannot_describe_are_reported() -> None:
    plain = affine(1e-3, 1e-9)
    network = fitted(
        run(Cluster(lambda case: plain(case) * (4 if case.communicators == 2 and case.bytes == 2**16 else 1)))
    )
    assert any("of 16 cases of several communicators" in note for note in misfits(network))
    assert not misfits(fitted(run(Cluster(plain), budget_s=1e4)))


def test_batches_stay_within_the_sizes_asked_for() -> None:
    cases = [case for series in series_of([2**12, 2**20], [1, 2], ()) for case in series.cases if case.messages > 1]
    assert {case.bytes for case in cases} == {size for size in BATCH_SIZES if 2**12 <= size <= 2**20}
    assert {case.bytes for case in series_of([10, 20], [1], ())[2].cases} == {10, 20}


def test_sharded_plans_stand_on_the_halves_of_an_all_reduce() -> None:
    halves = ("all_gather", "reduce_scatter")
    for sharded in (False, True):
        found = series_of([2**12, 2**20], [1], halves, sharded=sharded)
        assert sum(series.share for series in found) == pytest.approx(1.0)
        spent = sum(series.share for series in found if series.cases[:1] and series.cases[0].collective in halves)
        assert (spent > 0.5) == sharded
        alone = [series for series in found if series.cases and not series.cases[0].paired]
        least = {series.cases[0].collective: series.least for series in alone}
        assert (least["all_gather"] == least["reduce_scatter"] == 2) == sharded


@pytest.mark.parametrize("brief", [False, True])
def test_every_collective_on_every_number_of_communicators_is_connected_first(brief: bool) -> None:
    series = series_of(list(SIZES), [1, 2, 4], ("all_gather", "reduce_scatter", "broadcast"), sharded=True, brief=brief)
    every = [case for one in series for case in one.cases]
    found = smallest_of_each_kind(series)

    def kind(case: Case) -> tuple[str, int, bool]:
        return case.collective, case.communicators, case.paired

    assert len(set(map(kind, found))) == len(found) == len(set(map(kind, every)))
    for case in found:
        assert case.bytes == min(one.bytes for one in every if kind(one) == kind(case))


def test_held_out_sizes_lie_between_the_others() -> None:
    held = [case.bytes for case in held_out_cases(list(SIZES))]
    assert held[:2] == [3072, 20480]
    assert not set(held) & set(SIZES)
    assert all(SIZES[0] < size < SIZES[-1] for size in held)
    assert held_out_cases([4, 8]) == ()


def test_one_size_is_no_curve() -> None:
    with pytest.raises(MeasurementError, match="fewer than two"):
        network_from({Case(bytes=1024): summarise([1.0])}, name="x", workers=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_s": 0}, "budget"),
        ({"budget_s": float("nan")}, "budget"),
        ({"sizes": [1024]}, "sizes"),
        ({"sizes": [0, 1024]}, "sizes"),
        ({"communicators": []}, "communicators"),
        ({"communicators": [0]}, "communicators"),
        ({"collectives": ["all_shout"]}, "all_shout"),
        ({}, "not initialised"),
    ],
)
def test_bad_input(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        calibrate(**options)


def test_doubling_includes_both_ends() -> None:
    assert doubling(1, 5) == [1, 2, 4, 5]
    assert doubling(8, 8) == [8]


def test_a_series_keeps_its_least() -> None:
    case = Case(bytes=8)
    outcome = sample_cases(
        Cluster(lambda _: 5.0), [Series(cases=(case,), share=1.0, least=1)], 1.0, lambda what, share: None
    )
    assert isinstance(outcome.timings[case], Timing)


def together(speed: float) -> Callable[[Case], float]:
    """An all-gather and a reduce-scatter take as long as an all-reduce of half the bytes each; on two communicators
    they are that much faster."""

    def cost(case: Case) -> float:
        alone = affine(1e-5, 1e-9)(Case(bytes=case.bytes // 2)) * case.messages * (2 if case.paired else 1)
        return alone / (speed if case.communicators == 2 else 1.0)

    return cost


@pytest.mark.parametrize("sharded", [False, True])
def test_gathers_and_scatters_are_measured_together(sharded: bool) -> None:
    halves = ("all_reduce", "all_gather", "reduce_scatter")
    cases = series_of(list(SIZES), [1, 2], halves, sharded=sharded)
    outcome = sample_cases(Cluster(together(1.25)), cases, 60.0, lambda what, share: None)
    network = fitted(outcome)
    assert network.sharded is not None
    assert network.sharded.speed(1) == pytest.approx(1.0)
    assert network.sharded.speed(2) == pytest.approx(1.25)
    assert {row.communicators for row in network.sharded.pairs} == {1, 2}
    # They are neither points of a curve nor all-reduces at once.
    assert all(row.bytes in BATCH_SIZES for row in network.concurrency)
    assert network.all_gather is not None
    measured = [size for size, _ in network.all_gather.points or ()]
    assert (3 << 22 in measured) == sharded


def test_without_two_communicators_they_are_measured_in_turn_alone() -> None:
    cases = series_of(list(SIZES), [1], ("all_reduce", "all_gather", "reduce_scatter"))
    assert {case.communicators for one in cases for case in one.cases if case.paired} == {1}
    assert not [case for one in series_of(list(SIZES), [1, 2], ("all_gather",)) for case in one.cases if case.paired]
