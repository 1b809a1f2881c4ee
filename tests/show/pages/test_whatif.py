"""The what-if page's answers: what `predict` says, for whatever the controls can be set to."""

from __future__ import annotations

import gzip
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.cost.collectives import traffic
from backbeat.errors import InputError
from backbeat.model import files
from backbeat.planners.planned import planned, predicted
from backbeat.show.pages.server import keep, unpacked
from backbeat.show.pages.whatif import Library, State, respond, scaled_network, study_of
from tests.problems import affine, curve, networks
from tests.show.hostile import hostile_network, hostile_profile


def library() -> Library:
    return Library({"mine": hostile_profile()}, {"ours": hostile_network()})


def test_the_curve_is_what_predict_says() -> None:
    state = State.parse({"profile": "mine", "network": "ours", "workers": "64", "bucket": "5", "communicators": "2"})
    said, curves = respond(state, library(), thorough=True), study_of(state, library(), thorough=True).curves
    assert list(curves) == ["ddp", "ddp, 5 MiB", "optimal, 2 communicators", "best for 64"]
    for point in curves["ddp"]:
        there = hostile_network().at(workers=point.workers)
        assert point.iteration_s == predicted(hostile_profile(), there, "ddp").iteration_s
    there = hostile_network().at(workers=64)
    bucketed = planned(hostile_profile(), there, "ddp", bucket_bytes=5 * 2**20)
    assert curves["ddp, 5 MiB"][-1].iteration_s == predicted(hostile_profile(), there, bucketed).iteration_s
    assert curves["best for 64"][-1].iteration_s == predicted(hostile_profile(), there, "best").iteration_s
    assert said["figures"]["memory"]
    msgspec.json.encode(said)


def test_a_quick_answer_has_the_same_shape() -> None:
    state = State(profile="mine", network="ours")
    quick, thorough = (respond(state, library(), thorough=one) for one in (False, True))
    assert set(quick) == set(thorough)
    assert "best for 64" in thorough["timelines"]
    assert "best for 64" not in quick["timelines"]


@given(networks(), st.sampled_from([0.1, 0.5, 1.0, 4.0]), st.sampled_from([0.1, 1.0, 10.0]))
def test_more_bandwidth_and_less_latency_never_cost_more(network: bb.Network, bandwidth: float, latency: float) -> None:
    sizes = [1, 4096, 10**6, 10**8, 10**10]  # the last two are beyond what was measured
    now = scaled_network(network, bandwidth=bandwidth, latency=latency).cost.time(sizes)
    faster = scaled_network(network, bandwidth=2 * bandwidth, latency=latency).cost.time(sizes)
    sooner = scaled_network(network, bandwidth=bandwidth, latency=latency / 2).cost.time(sizes)
    assert (faster <= now * (1 + 1e-9)).all()
    assert (sooner <= now * (1 + 1e-9)).all()


def test_scaling_an_affine_network_scales_its_two_numbers_and_keeps_how_messages_share() -> None:
    made = scaled_network(affine(1e-3, 1e-9), bandwidth=2, latency=3)
    assert made.all_reduce.alpha_s == pytest.approx(3e-3)
    assert made.all_reduce.beta_s_per_byte == pytest.approx(5e-10)
    rows = ({"bytes": 2**22, "messages": 2, "communicators": 2, "seconds": 1e-3 + 2e-9 * 2**22 / 1.5},)
    shared = affine(1e-3, 1e-9, concurrency=tuple(msgspec.convert(row, bb.model.ConcurrencyPoint) for row in rows))
    assert scaled_network(shared, bandwidth=2).cost.efficiency(2) == pytest.approx(shared.cost.efficiency(2))


def test_beyond_the_last_point_of_a_noisy_curve_bytes_keep_their_slope() -> None:
    noisy = curve([(2**20, 1e-3), (2**23, 1e-3), (2**26, 1.6e-3)])
    slope = noisy.all_reduce.curve.link_s_per_byte
    for bandwidth, latency in ((2.0, 1.0), (0.5, 1.0), (1.0, 10.0), (1.0, 0.1)):
        there = scaled_network(noisy, bandwidth=bandwidth, latency=latency).cost
        for size in (2**26, 2**30, 2**33):
            assert float(there.time(2 * size) - there.time(size)) == pytest.approx(slope / bandwidth * size)


def test_inside_a_node_nothing_changes() -> None:
    network = bb.Network.load("nvlink-ib400")
    faster = scaled_network(network, bandwidth=1000, latency=1e-3)
    inside = bb.model.CollectiveTimes
    assert isinstance(network.topology.inside, inside)
    floor = network.at(workers=network.topology.gpus_per_node).cost.time([10**8])
    assert float(faster.cost.time([10**8])[0]) >= float(floor[0]) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["nvlink-ib100", "aws-p4d", "dgx-h100"])
def test_a_control_that_hardly_moves_changes_hardly_anything(name: str) -> None:
    """Nodes with an inside of their own: what a byte takes of the link is kept apart from the latency."""
    network = bb.Network.load(name)
    moved, same = scaled_network(network, bandwidth=0.999), scaled_network(network, latency=1.001)
    for other in (moved, same):
        for workers in (network.workers, 4 * network.workers):
            before, after = (one.at(workers=workers).cost.isolated for one in (network, other))
            assert after.link_s_per_byte == pytest.approx(before.link_s_per_byte, rel=0.01)
            assert after.time([2**20, 2**28, 2**33]) == pytest.approx(before.time([2**20, 2**28, 2**33]), rel=0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workers": "1"}, "workers is '1': it must be `int` >= 2"),
        ({"workers": "1e99"}, "workers is '1e99'"),
        ({"workers": "nan"}, "workers is 'nan'"),
        ({"workers": "2.5"}, "workers is '2.5': it must be `int`"),
        ({"communicators": "many"}, "communicators is 'many'"),
        ({"__class__": "1"}, "`__class__`: that is not a control"),
        ({"profile": "../../etc/passwd"}, "there is no profile"),
        ({"network": "/etc/passwd"}, "there is no network"),
    ],
)
def test_bad_states_are_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        respond(State.parse(fields), library())


def test_uploads_are_checked_like_any_file() -> None:
    kept = Library({}, {})
    raw = files.encode(hostile_profile())
    said = keep(kept, raw)
    assert said["kind"] == "profile"
    assert kept.profile(said["id"]) == hostile_profile()
    assert keep(kept, gzip.compress(raw))["id"] == said["id"]
    assert keep(kept, files.encode(hostile_network()))["kind"] == "network"
    for bad, message in [
        (b"", "empty"),
        (b"{}", "schema"),
        (b"\x80\x04\x95", "not JSON|line 1"),
        (b'{"schema": "backbeat.profile/1"}', "missing required field"),
        (gzip.compress(raw)[:40], "cut short"),
        (b"\x1f\x8b\x08rubbish", "damaged|cut short"),
        (gzip.compress(b" " * (70 * 2**20)), "unpacks to more"),
    ]:
        with pytest.raises(InputError, match=message):
            keep(kept, bad)


def test_only_the_last_uploads_are_kept() -> None:
    kept = Library({}, {})
    for number in range(20):
        keep(kept, files.encode(replace(affine(1e-3, 1e-9), name=f"network {number}")))
    assert len(kept.networks) == 16
    assert unpacked(b"plain") == b"plain"


def test_a_network_on_which_small_messages_take_no_time_can_be_scaled() -> None:
    rows = tuple(
        bb.model.ConcurrencyPoint(bytes=size, messages=4, communicators=communicators, seconds=1e-3)
        for size in (1, 2**20)
        for communicators in (1, 2)
    )
    network = curve([(1, 0.0), (2**20, 1e-3), (2**22, 4e-3)], concurrency=rows)
    faster = scaled_network(network, bandwidth=2.0, latency=0.5).cost
    assert float(faster.time(2**22)) == pytest.approx(float(network.cost.time(2**22)) / 2, rel=0.01)


def test_commands_name_what_was_chosen_or_are_left_out() -> None:
    def advised(**changes: str) -> str:
        fields = {"profile": "llama-8b-b1-bf16-adamw-h200", "network": "dgx-h100", "workers": "16", **changes}
        return "".join(action["code"] for action in respond(State.parse(fields), library())["answer"]["actions"])

    said = advised()
    assert "backbeat plan llama-8b-b1-bf16-adamw-h200 dgx-h100 --workers 16 --strategy " in said
    changed = advised(bandwidth="2")
    assert "fully_shard(model" in changed
    assert "backbeat plan" not in changed


def test_a_control_that_hardly_moves_keeps_what_gathers_say_of_the_link() -> None:
    def ring(collective: Any, workers: int, largest: int, slower: float = 1.0) -> bb.model.CollectiveTimes:
        each = traffic(collective, "ring", workers) * 1e-11 * slower
        sizes = [2**power for power in range(10, 31, 2) if 2**power <= largest]
        return bb.model.CollectiveTimes(points=tuple((size, 1e-4 + each * size) for size in sizes))

    halves = {name: ring(name, 16, 2**30) for name in ("all_gather", "reduce_scatter")}
    inside = bb.model.CollectiveTimes(alpha_s=1e-5, beta_s_per_byte=1e-12)
    nodes = bb.model.Topology(algorithm="hierarchical", gpus_per_node=8, inside=inside)
    # All-reduces that buffers take in at twice the link's speed.
    network = bb.Network(
        name="x", workers=16, backend="nccl", topology=nodes, all_reduce=ring("all_reduce", 16, 2**26, 0.5), **halves
    )
    for other in (scaled_network(network, bandwidth=1.001), scaled_network(network, latency=1.0001)):
        for workers in (16, 64):
            before, after = (float(one.at(workers=workers).cost.time(2.0**32)) for one in (network, other))
            assert after == pytest.approx(before, rel=0.01)
