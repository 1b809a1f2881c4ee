"""Steps that repeat: their period, with a host that issues them and without."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from backbeat.engine import Graph, SharedLink, run
from backbeat.errors import InputError
from backbeat.model import Network, Profile
from backbeat.model.profile import device_alone
from backbeat.model.slowdown import slowdown_of
from backbeat.planners.planned import planned
from backbeat.steps.bucket_graph import BucketStep, BucketSteps, bucket_graph
from backbeat.steps.host import HOST, MOST_STEPS, IssuedWork, done_s, paced_s, period_of
from backbeat.steps.model_chain import ROOT, chain_of
from backbeat.steps.schedule import Schedule
from backbeat.steps.unit_graph import Call, ShardedCost, UnitSteps, run_step
from tests.chains import chains
from tests.problems import networks
from tests.sharded_problems import sharded_plans
from tests.steps.test_bucket_graph import bucketed

seconds = st.integers(0, 40).map(lambda count: count / 8)


@given(bucketed(communicators=2), networks(busy=False), st.sampled_from([1.0, 1.5]))
def test_a_step_with_buckets_is_its_own_period(
    drawn: tuple[Profile, Schedule], network: Network, slowdown: float
) -> None:
    profile, schedule = drawn
    step = BucketStep(
        schedule=schedule,
        times=network.cost.times(schedule.sizes),
        link=SharedLink.of(network.cost),
        forward_s=profile.forward_s,
        backward_s=profile.backward_s,
        update_s=1e-3,
        slowdowns={"network": slowdown},
        gathers=[(2e-4, profile.forward_s / 2), (1e-4, profile.forward_s / 2)],
        gathers_ahead=True,
    )
    steps = BucketSteps(step)
    found = period_of(steps.graph, lambda: steps.add().update)
    assert found.settled
    assert found.seconds == pytest.approx(run(bucket_graph(step).graph).end_s, rel=1e-9)


@given(chains(), networks(), st.integers(1, 2), st.sampled_from([1.0, 1.3]), st.data())
def test_a_sharded_step_is_its_own_period(
    profile: Profile, network: Network, micro_batches: int, slowdown: float, data: st.DataObject
) -> None:
    chain = chain_of(profile, data.draw(sharded_plans(profile)))
    cost = ShardedCost.of(profile, network, chain.sharding)
    steps = UnitSteps(chain, cost, 1e-3, micro_batches=micro_batches, slowdown=slowdown)
    found = period_of(steps.graph, steps.add)
    assert found.settled
    _, once = run_step(chain, cost, 1e-3, micro_batches=micro_batches, slowdown=slowdown)
    assert found.seconds == pytest.approx(once.end_s, rel=1e-9, abs=1e-12)


@settings(max_examples=60)
@given(
    chains(most=6), networks(), st.integers(1, 2), st.sampled_from([1.0, 1.3]),
    st.sampled_from([0.0, 0.3, 0.8, 1.5, 4.0]), st.data(),
)  # fmt: skip
def test_a_sharded_step_takes_the_longer_of_device_and_host(
    profile: Profile, network: Network, micro_batches: int, slowdown: float, host: float, data: st.DataObject
) -> None:
    """The host never waits for the device there, so nothing else leads from one step to the next."""
    chain = chain_of(profile, data.draw(sharded_plans(profile)))
    cost = ShardedCost.of(profile, network, chain.sharding)
    assume(not cost.blocking)
    steps = UnitSteps(chain, cost, 1e-3, micro_batches=micro_batches, slowdown=slowdown)

    def add_issued() -> int:
        first, last = len(steps.graph), steps.add()
        for op in range(first, last + 1):
            if (event := steps.calls[op].event) in ("forward", "backward", "update"):
                took = host if event != "update" else 1.0
                steps.graph.wait(op, steps.graph.add(HOST, took * steps.graph.seconds[op]))
        # A call for each op: those of the host have none.
        steps.calls += [Call("update", ROOT)] * (len(steps.graph) - len(steps.calls))
        return last

    found = period_of(steps.graph, add_issued)
    device_s = run_step(chain, cost, 1e-3, micro_batches=micro_batches, slowdown=slowdown)[1].end_s
    host_s = micro_batches * host * sum(one.forward_s + one.backward_s for one in chain.parts) + 1e-3
    if found.settled:
        assert found.seconds == pytest.approx(paced_s(device_s, host_s), rel=1e-6)
    else:
        # So close to even that many steps do not tell who is slower.
        assert found.seconds == pytest.approx(paced_s(device_s, host_s), rel=0.1)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_bundled_step_is_its_own_period(way: str) -> None:
    profile = device_alone(Profile.load("llama-8b-b1-bf16-adamw-h200"))
    network = Network.load("aws-p5en").at(workers=64)
    plan = planned(profile, network, way)
    slowdowns = {"network": slowdown_of(profile, network, sharded=way == "fsdp").factor}
    if way == "fsdp":
        chain = chain_of(profile, plan)
        cost = ShardedCost.of(profile, network, chain.sharding)
        sharded = UnitSteps(chain, cost, 1e-3, slowdown=slowdowns["network"])
        found = period_of(sharded.graph, sharded.add)
    else:
        schedule, _ = Schedule.of_plan(profile, plan)
        times = network.cost.times(schedule.sizes)
        whole = (profile.forward_s, profile.backward_s, profile.update_s)
        forward_s, backward_s, update_s = whole
        steps = BucketSteps(
            BucketStep(
                schedule=schedule, times=times, forward_s=forward_s, backward_s=backward_s, update_s=update_s,
                slowdowns=slowdowns,
            )
        )  # fmt: skip
        found = period_of(steps.graph, lambda: steps.add().update)
    assert found.settled
    assert found.seconds == pytest.approx(found.times.ends[found.ends[0]])


works = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4)


@given(works, works, st.tuples(seconds, seconds), seconds)
def test_with_a_host_it_is_the_longest_way_round(
    forward: list[tuple[float, float]],
    backward: list[tuple[float, float]],
    update: tuple[float, float],
    tail: float,
) -> None:
    """Every work begins when the host has issued it and the device has done those before it; the host reads the status
    of a step when the next backward opens."""
    graph = Graph()
    status: list[int] = []

    def issue(work: tuple[float, float], *after: int) -> int:
        issued = graph.add(("host",), work[0], after=after)
        return graph.add(("device",), work[1], after=(issued,))

    def add_step() -> int:
        for work in forward:
            issue(work)
        for index, work in enumerate(backward):
            done = issue(work, *(() if index else status[-1:]))
        status.append(graph.add(("communicator",), tail, after=(done,)))
        issued = graph.add(("host",), update[0])
        return graph.add(("device",), update[1], after=(issued, status[-1]))

    issuing, computing = (sum(one[side] for one in (*forward, *backward)) for side in (0, 1))
    status_s = done_s([IssuedWork(*work) for work in backward]) + tail
    found = period_of(graph, add_step)
    expected = max(computing + tail + update[1], issuing + update[0], status_s)
    assert found.settled or len(found.ends) == MOST_STEPS
    if found.settled:
        assert found.seconds == pytest.approx(expected, rel=1e-9, abs=1e-9)
    else:
        # So close to even that many steps do not tell who is slower.
        assert found.seconds == pytest.approx(expected, rel=0.1)


def test_a_host_that_is_ahead_at_first_and_late_in_the_end() -> None:
    graph = Graph()
    late = graph.add(("device",), 20.0)

    def add_step() -> int:
        issued = graph.add(("host",), 3.0)
        return graph.add(("device",), 2.0, after=(issued,))

    assert late == 0
    # Two steps of 2 s at first, while the device is behind.
    found = period_of(graph, add_step)
    assert found.seconds == 3.0
    assert found.settled


def test_steps_that_take_turns_have_a_mean() -> None:
    graph = Graph()

    def add_step() -> int:
        return graph.add(("device",), float(len(graph) % 2))

    found = period_of(graph, add_step)
    assert not found.settled
    assert found.seconds == pytest.approx(0.5, rel=0.05)


def test_too_many_ops_are_refused() -> None:
    graph = Graph()

    def add_step() -> int:
        for _ in range(20_000):
            graph.add(("device",), 1.0)
        return len(graph) - 1

    with pytest.raises(InputError, match="operations: at most 50000"):
        period_of(graph, add_step)
