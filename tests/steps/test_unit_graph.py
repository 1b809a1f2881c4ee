"""Sharded steps as a graph."""

from __future__ import annotations

import pytest

from backbeat.engine import run
from backbeat.model import Network, Profile
from backbeat.model.profile import device_alone
from backbeat.model.slowdown import slowdown_of
from backbeat.planners.planned import planned
from backbeat.steps.model_chain import ShardedChain, chain_of
from backbeat.steps.unit_graph import ShardedCost, UnitSteps, run_step


def graph_of(chain: ShardedChain, cost: ShardedCost, update_s: float, micro_batches: int, slowdown: float) -> UnitSteps:
    return run_step(chain, cost, update_s, micro_batches=micro_batches, slowdown=slowdown)[0]


@pytest.mark.parametrize(
    ("cluster", "gpus", "way", "plain_s", "contended_s"),
    [
        ("100gbe", 64, "fsdp", 11.011115093761049, 11.011115093761049),
        ("100gbe", 64, "hsdp:8", 10.99489208985492, 10.99489208985492),
        ("100gbe", 64, "zero1", 4.784259262680535, 4.784259262680535),
        ("100gbe", 64, "zero2", 7.351719372165342, 7.351719372165342),
        ("aws-p5en", 64, "fsdp", 1.039703239102961, 1.1521682116636447),
        ("aws-p5en", 64, "zero1", 0.9778565545514813, 1.0185596104292736),
        ("aws-p5en", 64, "zero2", 1.0107308545959135, 1.0770928306490228),
        ("ib400", 256, "fsdp", 2.892341488388548, 2.892341488388548),
        ("ib400", 256, "hsdp:8", 2.883178086570203, 2.883178086570203),
        ("ib400", 256, "zero1", 1.623244008198078, 1.623244008198078),
        ("ib400", 256, "zero2", 2.0858160488945745, 2.0858160488945745),
    ],
)
def test_a_bundled_profile_takes_what_was_recorded(
    cluster: str, gpus: int, way: str, plain_s: float, contended_s: float
) -> None:
    """Two micro-batches, by a simulator of streams that shared no code with the engine."""
    profile = device_alone(Profile.load("llama-8b-b1-bf16-adamw-h200"))
    network = Network.load(cluster).at(workers=gpus)
    chain = chain_of(profile, planned(profile, network, way))
    cost = ShardedCost.of(profile, network, chain.sharding)
    factor = slowdown_of(profile, network, sharded=True).factor
    for slowdown, recorded_s in ((1.0, plain_s), (factor, contended_s)):
        made = graph_of(chain, cost, profile.update_s, 2, slowdown)
        assert run(made.graph).end_s == pytest.approx(recorded_s, rel=1e-9)


def test_nothing_shares_pace_without_contention_on_one_communicator() -> None:
    profile = device_alone(Profile.load("llama-8b-b1-bf16-adamw-h200"))
    network = Network.load("aws-p5en").at(workers=64)
    chain = chain_of(profile, planned(profile, network, "fsdp"))
    cost = ShardedCost.of(profile, network, chain.sharding)
    assert not graph_of(chain, cost, 0.0, 1, 1.0).graph.shares_pace()
    assert graph_of(chain, cost, 0.0, 1, 1.2).graph.shares_pace()


@pytest.mark.parametrize("way", ["fsdp", "hsdp:8"])
def test_a_quieter_network_is_the_same_graph_with_other_times(way: str) -> None:
    profile = device_alone(Profile.load("llama-8b-b1-bf16-adamw-h200"))
    network = Network.load("aws-p5en").at(workers=64)
    chain = chain_of(profile, planned(profile, network, way))
    made = graph_of(chain, ShardedCost.of(profile, network, chain.sharding), 1e-3, 2, 1.2)
    assert network.edges is not None
    for other in network.edges:
        cost = ShardedCost.of(profile, other, chain.sharding)
        again = graph_of(chain, cost, 1e-3, 2, 1.2)
        assert run(made.on(cost, 1.2)).ends == run(again.graph).ends
        assert run(made.on(cost, 1.2)).ends != run(made.graph).ends
