from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backbeat.errors import InputError
from backbeat.model import Network
from backbeat.model.collective_times import CollectiveTimes
from backbeat.model.topology import FALL, Fabric, FabricKind, Load, Topology

KINDS = st.sampled_from(get_args(FabricKind))
LOADS = st.sampled_from(get_args(Load))
NODES = st.integers(1, 10**6)
RATIOS = st.floats(1, 64)
FIT = Path(__file__).parents[2] / "validation" / "published" / "fabric" / "fit.py"


@given(KINDS, LOADS, NODES, st.integers(0, 10**6), RATIOS)
def test_a_share_never_rises_with_more_nodes(kind: FabricKind, load: Load, nodes: int, more: int, ratio: float) -> None:
    few = Fabric(kind=kind, oversubscription=ratio).share(nodes, load)
    many = Fabric(kind=kind, oversubscription=ratio).share(nodes + more, load)
    assert 0 < many <= few <= 1


@given(KINDS, NODES, RATIOS)
def test_a_busier_fabric_never_has_more(kind: FabricKind, nodes: int, ratio: float) -> None:
    quiet, typical, busy = (Fabric(kind=kind, oversubscription=ratio).share(nodes, load) for load in get_args(Load))
    assert quiet >= typical >= busy


@given(KINDS, LOADS, NODES, RATIOS, RATIOS)
def test_more_oversubscription_never_gives_more(
    kind: FabricKind, load: Load, nodes: int, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    fewer_uplinks = Fabric(kind=kind, oversubscription=high).share(nodes, load)
    assert fewer_uplinks <= Fabric(kind=kind, oversubscription=low).share(nodes, load)


@given(KINDS, RATIOS)
def test_two_quiet_nodes_keep_everything(kind: FabricKind, ratio: float) -> None:
    assert Fabric(kind=kind, oversubscription=ratio).share(2, "quiet") == 1


def test_half_the_uplinks_cost_at_most_half_the_bandwidth() -> None:
    plain = Fabric(kind="fat-tree").share(10**6, "busy")
    assert Fabric(kind="fat-tree", oversubscription=2).share(10**6, "busy") == pytest.approx(plain / 2, rel=1e-4)


@pytest.mark.parametrize(("kind", "below"), [("rail-optimised", 32), ("fat-tree", 4), ("cloud", 16)])
@pytest.mark.parametrize(("load", "crossing"), [("quiet", 0.0), ("typical", 0.5), ("busy", 1.0)])
def test_what_uplinks_cost_by_hand(kind: FabricKind, below: int, load: Load, crossing: float) -> None:
    """Of four times the nodes below one switch, three quarters are outside it."""
    all_uplinks, third = (Fabric(kind=kind, oversubscription=ratio).share(4 * below, load) for ratio in (1, 3))
    assert third == pytest.approx(all_uplinks / (1 + 2 * crossing * 3 / 4))
    assert Fabric(kind=kind, oversubscription=3).share(below, load) == Fabric(kind=kind).share(below, load)


def test_the_table_is_the_one_that_was_fitted() -> None:
    assert runpy.run_path(str(FIT))["fit"]() == FALL


@pytest.mark.parametrize(
    ("arguments", "ratio"),
    [(("mesh", 4, "quiet"), 1), (("cloud", 4, "asleep"), 1), (("cloud", 0, "quiet"), 1), (("cloud", 4, "quiet"), 0.5)]
    + [(("cloud", 4, "quiet"), bad) for bad in (math.inf, math.nan)],
)
def test_what_no_fabric_has_is_refused(arguments: tuple[FabricKind, int, Load], ratio: float) -> None:
    kind, nodes, load = arguments
    with pytest.raises(InputError):
        Fabric(kind=kind, oversubscription=ratio).share(nodes, load)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(2, 16), KINDS, LOADS, st.floats(1e-6, 1e-4), st.floats(1e-12, 1e-9))
@example(8, 8, "cloud", "typical", 1e-4, 5e-11)
def test_fewer_workers_never_take_longer(
    per_node: int, nodes: int, kind: FabricKind, load: Load, latency_s: float, byte_s: float
) -> None:
    """Of a cluster that was measured on many nodes alone."""
    measured = Network(
        name="measured",
        workers=per_node * nodes,
        all_reduce=CollectiveTimes(alpha_s=latency_s, beta_s_per_byte=byte_s),
        topology=Topology(gpus_per_node=per_node, fabric=Fabric(kind=kind)),
    )
    counts = [count for count in (2, 3, 4, 7, 8, 9, 16, 17, 32, 64, 128) if count <= 2 * measured.workers]
    curves = [measured.at(workers=count, load=load).cost.isolated for count in counts]
    for size in (1.0, 2.0**20, 2.0**28, 2.0**32):
        times = [float(curve.time(size)) for curve in curves]
        assert all(less <= more * (1 + 1e-9) for less, more in itertools.pairwise(times)), (size, times)
