"""Sharded steps as a graph, against the streams."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from backbeat import api
from backbeat.engine import run
from backbeat.model import Network, Plan, Profile
from backbeat.simulate.contention import slowdown_of
from backbeat.simulate.host_lane import device_alone
from backbeat.simulate.sharded_cost import ShardedCost
from backbeat.simulate.sharded_step import run_step
from backbeat.simulate.sharded_units import ShardedChain, chain_of
from backbeat.steps.unit_graph import UnitGraph, UnitStep, unit_graph
from tests.chains import chains
from tests.problems import networks
from tests.sharded_problems import sharded_plans

CLUSTERS = (("100gbe", 64), ("aws-p5en", 64), ("dgx-h100", 8), ("ib400", 256))


def compare(profile: Profile, network: Network, plan: Plan, micro_batches: int, slowdown: float) -> None:
    chain = chain_of(profile, plan)
    cost = ShardedCost.of(profile, network, chain.sharding)
    theirs = run_step(chain, cost, profile.update_s, micro_batches=micro_batches, slowdown=slowdown)
    made = graph_of(chain, cost, profile.update_s, micro_batches, slowdown)
    times = run(made.graph)
    assert times.ends == pytest.approx(theirs.times.ends, rel=1e-9, abs=1e-12)
    assert times.starts == pytest.approx(theirs.times.starts, rel=1e-9, abs=1e-12)
    assert made.calls == theirs.calls


def graph_of(chain: ShardedChain, cost: ShardedCost, update_s: float, micro_batches: int, slowdown: float) -> UnitGraph:
    slowdowns = {"network": slowdown}
    return unit_graph(
        UnitStep(chain=chain, cost=cost, update_s=update_s, micro_batches=micro_batches, slowdowns=slowdowns)
    )


@settings(max_examples=300)
@given(chains(), networks(), st.integers(1, 3), st.sampled_from([1.0, 1.3, 2.0]), st.booleans(), st.data())
def test_random_plans_take_what_streams_take(
    profile: Profile, network: Network, micro_batches: int, slowdown: float, blocking: bool, data: st.DataObject
) -> None:
    if blocking:
        network = replace(network, backend="gloo")
    # Streams know no latencies that slow each other down.
    assume(all(factor == 1 for factor in network.cost.stretches.values()))
    compare(profile, network, data.draw(sharded_plans(profile)), micro_batches, slowdown)


@pytest.mark.parametrize(("cluster", "gpus"), CLUSTERS)
@pytest.mark.parametrize("way", ["fsdp", "hsdp:8", "zero1", "zero2"])
def test_a_bundled_profile_takes_what_streams_take(cluster: str, gpus: int, way: str) -> None:
    profile = device_alone(Profile.load("llama-8b-b1-bf16-adamw-h200"))
    network = Network.load(cluster).at(workers=gpus)
    plan = api.plan(profile, network, way)
    for slowdown in (1.0, slowdown_of(profile, network, sharded=True).factor):
        compare(profile, network, plan, 2, slowdown)


def test_nothing_shares_pace_without_contention_on_one_communicator() -> None:
    profile = device_alone(Profile.load("llama-8b-b1-bf16-adamw-h200"))
    network = Network.load("aws-p5en").at(workers=64)
    chain = chain_of(profile, api.plan(profile, network, "fsdp"))
    cost = ShardedCost.of(profile, network, chain.sharding)
    assert not graph_of(chain, cost, 0.0, 1, 1.0).graph.shares_pace()
    assert graph_of(chain, cost, 0.0, 1, 1.2).graph.shares_pace()


@pytest.mark.parametrize("way", ["fsdp", "hsdp:8"])
def test_a_quieter_network_is_the_same_graph_with_other_times(way: str) -> None:
    profile = device_alone(Profile.load("llama-8b-b1-bf16-adamw-h200"))
    network = Network.load("aws-p5en").at(workers=64)
    chain = chain_of(profile, api.plan(profile, network, way))
    made = graph_of(chain, ShardedCost.of(profile, network, chain.sharding), 1e-3, 2, 1.2)
    assert network.edges is not None
    for other in network.edges:
        cost = ShardedCost.of(profile, other, chain.sharding)
        again = graph_of(chain, cost, 1e-3, 2, 1.2)
        assert run(made.on(cost)).ends == run(again.graph).ends
        assert run(made.on(cost)).ends != run(made.graph).ends
