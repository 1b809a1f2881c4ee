"""One step under FSDP2's rules: examples to check by hand, and what holds of every plan."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.engine.events import run_events
from backbeat.engine.run import run_in_order
from backbeat.model import (
    Block,
    CollectiveTimes,
    Gradient,
    Network,
    Plan,
    Prediction,
    Profile,
    Topology,
    WorkersRow,
)
from backbeat.model.accelerator import accelerator_named
from backbeat.model.collective_times import CollectivePair, ShardedTimes
from backbeat.planners.planned import planned, predicted
from backbeat.show.words.notes import worded
from backbeat.steps.model_chain import ROOT, chain_of, owning_module
from backbeat.steps.unit_graph import ShardedCost, run_step
from tests.call_order import call_order
from tests.chains import chains
from tests.problems import affine, make_profile, networks, profiles
from tests.sharded_problems import sharded_plan, sharded_plans
from tests.steps.stepped import Stepped, stepped

STRATEGIES = ("fsdp", "hsdp:4", "zero1", "zero2")


def row(count: int, elements: int = 1000, forward: float = 1.0, backward: float = 2.0, update: float = 0.0) -> Profile:
    """Equal blocks, each with one parameter."""
    return Profile(
        name="row", model="row", batch_size=1, precision="fp32", device="cpu", forward_s=count * forward,
        backward_s=count * backward, update_s=update,
        gradients=tuple(
            Gradient(name=f"b.{count - 1 - index}.w", bytes=4 * elements, ready_s=(index + 1) * backward)
            for index in range(count)
        ),
        blocks=tuple(
            Block(name=f"b.{index}", forward_s=forward, backward_s=backward, input_bytes=0, output_bytes=0,
                  saved_bytes=0, forward_peak_bytes=0, backward_peak_bytes=0)
            for index in range(count)
        ),
    )  # fmt: skip


def one_each(profile: Profile, **settings: object) -> Plan:
    fields: dict[str, object] = {"param_dtype": "fp32", **settings}
    return sharded_plan(profile, [(block.name,) for block in profile.blocks], **fields)  # type: ignore[arg-type]


def taking(gather_s: float, scatter_s: float, workers: int = 8) -> Network:
    """Collectives of so many seconds, whatever their size."""
    return Network(
        name="flat",
        workers=workers,
        all_reduce=CollectiveTimes(alpha_s=gather_s + scatter_s, beta_s_per_byte=0.0),
        all_gather=CollectiveTimes(alpha_s=gather_s, beta_s_per_byte=0.0),
        reduce_scatter=CollectiveTimes(alpha_s=scatter_s, beta_s_per_byte=0.0),
    )


def step_s(profile: Profile, network: Network, plan: Plan, **options: float) -> float:
    return stepped(profile, network, plan, **options).end_s  # type: ignore[arg-type]


def copying_at(bytes_per_s: float | None) -> AbstractContextManager[object]:
    """A device whose memory has this bandwidth; None: one that is not in the table."""
    known = None
    if bytes_per_s is not None:
        known = msgspec.structs.replace(accelerator_named("h200"), memory_bandwidth=bytes_per_s)
    return patch("backbeat.steps.unit_graph.accelerator", return_value=known)


def test_gathers_hide_behind_the_unit_before() -> None:
    """Three blocks, F = 1, B = 2, gathers of 0.5: the first is exposed, and all others hide. So does every scatter of 1
    but the last."""
    assert step_s(row(3), taking(0.5, 1.0), one_each(row(3))) == pytest.approx(0.5 + 3 + 6 + 1)


def test_the_first_gather_of_backward_runs_behind_the_last_forward() -> None:
    """Gathers of 1 behind forwards of 1: the last unit is gathered again while its own forward runs."""
    assert step_s(row(2), taking(1.0, 0.0), one_each(row(2))) == pytest.approx(1 + 2 + 4)


def test_the_rate_limit_holds_a_gather_until_the_copy_out_two_before_it() -> None:
    """Forwards of 10 and gathers of 1: the fourth gather waits for the second copy-out, at 11. Without that limit,
    gathered units would fill the memory. Prefetching one unit runs nothing earlier; prefetching two does."""
    network = taking(1.0, 0.0)
    profile = row(4, forward=10.0, backward=20.0)

    def starts(plan: Plan) -> list[float]:
        gathers = [one for one in stepped(profile, network, plan).timeline if one.name.startswith("all-g")]
        return [one.start_s for one in gathers[:4]]

    assert starts(one_each(profile)) == [0, 1, 2, 11]
    assert starts(one_each(profile, prefetch=1)) == [0, 1, 2, 11]
    assert starts(one_each(profile, prefetch=2)) == [0, 1, 2, 3]


def test_computation_waits_for_the_last_reduce_scatter_and_more_buffers_wait_later() -> None:
    """Scatters of 3 behind backwards of 2: with one input held, two of them delay computation by 1 each; with two, none
    does. The scatters take as long either way."""
    profile = row(4)
    ends = []
    for buffers in (1, 2, 4):
        step = stepped(profile, taking(0.0, 3.0), one_each(profile, reshard=False, buffers=buffers))
        assert step.end_s == pytest.approx(4 + 2 + 4 * 3)
        ends.append(max(one.end_s for one in step.timeline if one.name.startswith("backward")))
    assert ends == pytest.approx([4 + 8 + 2, 4 + 8, 4 + 8])


def test_reduce_scatters_hold_up_gathers_unless_they_have_their_own_communicator() -> None:
    """Gathers and scatters of 2 behind backwards of 2: in one row they take 4 a unit, side by side 2."""
    profile = row(6, forward=2.0)
    network = taking(2.0, 2.0)
    together = step_s(profile, network, one_each(profile, buffers=2))
    apart = step_s(profile, network, one_each(profile, buffers=2, separate_reduce_scatter=True))
    assert apart < together - 5


def test_two_communicators_share_the_link_as_gathers_and_scatters_were_measured_to() -> None:
    """The link is the limit: where both together are half as fast again as in turn, the step is shorter; as all-reduces
    share it, which was not measured here, it is as long as in turn."""
    profile = row(6, forward=0.0, backward=0.0, elements=1_000_000)
    plan = one_each(profile, buffers=6, separate_reduce_scatter=True)
    plain = affine(0.0, 1e-6)
    pair = CollectivePair(bytes=2**24, communicators=2, seconds=2.0, alone_s=3.0)
    measured = replace(plain, sharded=ShardedTimes(pairs=(pair,)))
    assert step_s(profile, measured, plan) < step_s(profile, plain, plan)
    one = one_each(profile, buffers=6)
    assert step_s(profile, measured, one) == step_s(profile, plain, one)


@settings(max_examples=30)
@given(chains(most=5), networks(), st.sampled_from(["fsdp", "zero2", "sharded", "hsdp:2"]), st.integers(1, 3))
def test_on_gloo_everything_comes_one_after_the_other(
    profile: Profile, network: Network, strategy: str, micro_batches: int
) -> None:
    """The host waits for every collective, and a reduce-scatter takes what an all-reduce does."""
    assume(network.workers % 2 == 0)
    there = replace(network, backend="gloo")
    plan = planned(profile, there, strategy)
    sharding = plan.sharding
    assert sharding is not None
    chain, cost = chain_of(profile, plan), ShardedCost.of(profile, there, sharding)
    made, times = run_step(chain, cost, 0.0, micro_batches=micro_batches, slowdown=1.5)
    graph = made.graph
    travelling = sum(message.work_s for message in graph.sent.values())
    assert times.end_s == pytest.approx(sum(graph.seconds) + travelling)
    computed = micro_batches * (chain.whole.forward_s + chain.whole.backward_s)
    sent = sum(graph.seconds[op] for op in graph.sent) + travelling
    copied = sum(own for own, cause in zip(graph.seconds, graph.causes, strict=True) if cause == "copy")
    assert times.end_s == pytest.approx(computed + sent + copied)
    bytes_of = 4 * max(chain.elements)
    whole = there.at(workers=sharding.mesh.shard).cost.isolated
    assert cost.scatter.at(bytes_of) == whole.at(bytes_of)
    found = stepped(profile, there, plan, micro_batches=micro_batches)
    # All of the communication is the link's, none is held back.
    assert found.breakdown.latency_s + found.breakdown.bandwidth_s == pytest.approx(sent)
    assert found.bound_s <= found.end_s * (1 + 1e-9)
    # A half takes its time on the link at least. That is more than the whole takes where small messages are over twice
    # as fast, byte by byte, as large ones.
    if (whole.times >= whole.link_s_per_byte / 2 * whole.sizes).all():
        overlapped = stepped(profile, network, plan, micro_batches=micro_batches)
        assert found.end_s >= overlapped.end_s * (1 - 1e-9)


def test_collectives_in_a_row_take_what_was_measured_of_them_in_a_row() -> None:
    """The link is the limit: measured in a row they take 0.8 of what they take alone, and the step with them. On two
    communicators it stays at what was measured there."""
    profile = row(6, forward=0.0, backward=0.0, elements=1_000_000)
    plain = affine(0.0, 1e-6)
    two = CollectivePair(bytes=2**24, communicators=2, seconds=2.0, alone_s=3.0)
    one = CollectivePair(bytes=2**24, communicators=1, seconds=2.4, alone_s=3.0)
    before, after = (replace(plain, sharded=ShardedTimes(pairs=pairs)) for pairs in ((two,), (one, two)))
    in_turn = one_each(profile, buffers=6)
    assert step_s(profile, after, in_turn) == pytest.approx(0.8 * step_s(profile, before, in_turn))
    # Gloo runs two of a row at a time; FSDP2 waits for each there.
    assert step_s(profile, replace(after, backend="gloo"), in_turn) == step_s(
        profile, replace(before, backend="gloo"), in_turn
    )
    alone, in_a_row = (ShardedCost.of(profile, network, in_turn.sharding) for network in (before, after))
    assert in_a_row.gather.at(4_000_000) == pytest.approx(0.8 * alone.gather.at(4_000_000))
    for cost in (alone, in_a_row):
        both_s = 2 * cost.gather.at(4_000_000) / cost.sharing.efficiency(2)
        assert both_s == pytest.approx(2 * alone.gather.at(4_000_000) / 1.5)


def test_copies_of_the_model_are_reduced_behind_their_reduce_scatter() -> None:
    """Two copies of four shards: the all-reduces of 1 hide behind backward, and the last follows the last scatter."""
    profile = row(3)
    node = Network(
        name="node",
        workers=8,
        all_reduce=CollectiveTimes(alpha_s=2.0, beta_s_per_byte=0.0),
        topology=Topology(
            algorithm="hierarchical", gpus_per_node=4, inside=CollectiveTimes(alpha_s=1.0, beta_s_per_byte=0.0)
        ),
    )
    plan = one_each(profile, shard=4, replicate=2)
    assert step_s(profile, node, plan) == pytest.approx(0.5 + 3 + 6 + 0.5 + 1)
    lanes = {one.name.split()[0]: one.lane for one in stepped(profile, node, plan).timeline}
    assert lanes["all-gather"] == lanes["reduce-scatter"] == "communicator 0"
    assert lanes["all-reduce"] == "communicator 1"


def test_the_shards_of_a_node_share_its_link_when_copies_are_reduced() -> None:
    """Without a word on the inside of nodes, 4 ranks of a node send a quarter of the unit each, over one link."""
    profile = row(1, elements=1_000_000)
    plan = one_each(profile, shard=4, replicate=2)
    sizes = {}
    for per_node in (1, 4):
        network = affine(0.0, 1e-9, topology=Topology(algorithm="ring", gpus_per_node=per_node))
        cost = ShardedCost.of(profile, network, plan.sharding)  # type: ignore[arg-type]
        assert cost.replicate is not None
        sizes[per_node] = cost.replicate.at(4e6)
    assert sizes[4] == pytest.approx(4 * sizes[1])
    assert sizes[1] == pytest.approx(float(network.at(workers=2).all_reduce.curve.time(1e6)))


def test_zero2_is_the_decoupled_schedule() -> None:
    """Gathered once, behind the next forward; scattered behind backward."""
    profile = row(4)
    plan = one_each(profile, reshard=False)
    events = Counter(event for event, _ in call_order(profile, plan))
    assert events["all_gather"] == events["reduce_scatter"] == 4
    assert step_s(profile, taking(1.0, 2.0), plan) == pytest.approx(1 + 4 + 8 + 2)


def test_only_the_last_micro_batch_reduces_where_it_is_told_so() -> None:
    profile = row(2)
    last = one_each(profile, reshard=False, gradient_sync="last", reshard_after_backward=False)
    every = one_each(profile, reshard=False, reshard_after_backward=False)
    network = taking(1.0, 5.0)
    assert step_s(profile, network, last, micro_batches=3) == pytest.approx(1 + 3 * (2 + 4) + 5 + 3)
    scatters = [call_order(profile, plan, micro_batches=3).count(("reduce_scatter", 0)) for plan in (last, every)]
    assert scatters == [1, 3]
    assert step_s(profile, network, every, micro_batches=3) > step_s(profile, network, last, micro_batches=3)


def test_each_rank_updates_its_own_shard() -> None:
    profile = row(1, update=8.0)
    assert step_s(profile, taking(0.0, 0.0), one_each(profile)) == pytest.approx(1 + 2 + 1)


def test_copies_pass_the_devices_memory() -> None:
    """1000 elements of 4 bytes: out of the buffer and into the parameters, twice; gradients into the input, once; the
    own eighth into the buffer, which holds up the first gather alone."""
    profile = row(1)
    alone = step_s(profile, taking(0.0, 0.0), one_each(profile))
    with copying_at(8000.0):
        copied = step_s(profile, taking(0.0, 0.0), one_each(profile))
    assert copied - alone == pytest.approx(1.0 + 1.0 + 1.0 + 0.125, rel=1e-9)


@pytest.mark.parametrize(("param", "reduced", "width"), [("bf16", "fp32", 4), ("fp32", "bf16", 4), ("bf16", "bf16", 2)])
def test_the_largest_message_is_a_units_parameters_or_its_gradients(param: str, reduced: str, width: int) -> None:
    profile = row(2)
    plan = sharded_plan(profile, [("b.0", "b.1")], param_dtype=param, reduce_dtype=reduced)
    assert stepped(profile, taking(0.0, 0.0), plan).largest_bytes == 2000 * width


@pytest.mark.parametrize(("param", "reduced", "gather_in"), [("fp32", "fp32", 8), ("bf16", "fp32", 4 + 2 + 4)])
def test_parameters_that_are_gathered_narrower_are_cast_first(param: str, reduced: str, gather_in: int) -> None:
    """The own eighth of 1000 elements, read and written for the cast and once more into the buffer."""
    profile = row(1)
    plan = one_each(profile, param_dtype=param, reduce_dtype=reduced)
    assert plan.sharding is not None
    with copying_at(1000.0):
        cost = ShardedCost.of(profile, affine(0.0, 0.0), plan.sharding)
    elements, width = chain_of(profile, plan).elements[0], 4 if param == "fp32" else 2
    assert cost.gather_in_s(elements) == pytest.approx(gather_in / 8)
    assert cost.copy_out_s(elements) == pytest.approx(2 * width)
    assert cost.scatter_in_s(elements) == pytest.approx(width + 4)


def test_copies_are_reduced_on_the_shards_link_where_shards_span_nodes() -> None:
    profile, network = row(1), bb.Network.load("dgx-h100").at(workers=64)
    for shard, one_link in ((4, False), (8, False), (16, True)):
        plan = one_each(profile, shard=shard, replicate=64 // shard)
        cost = ShardedCost.of(profile, network, plan.sharding)  # type: ignore[arg-type]
        assert cost.one_link == one_link
        assert cost.replicate is not None
    alone = one_each(profile, shard=64)
    assert ShardedCost.of(profile, network, alone.sharding).replicate is None  # type: ignore[arg-type]
    # All copies inside one node: an all-reduce of two of its GPUs, of a quarter of the unit.
    inside = one_each(profile, shard=4, replicate=2)
    found = ShardedCost.of(profile, network.at(workers=8), inside.sharding).replicate  # type: ignore[arg-type]
    assert found is not None
    assert found.at(4e8) == pytest.approx(float(network.at(workers=2).all_reduce.curve.time(1e8)))


def test_slowed_computation_beside_a_collective() -> None:
    """A gather of 1 behind a forward of 1 that it slows down to half its pace, and so on."""
    profile = row(2)
    network = taking(1.0, 0.0)
    assert step_s(profile, network, one_each(profile), slowdown=2.0) > step_s(profile, network, one_each(profile))
    whole = stepped(profile, network, one_each(profile), slowdown=2.0).breakdown
    assert whole.contention_s > 0


@settings(max_examples=150)
@given(chains(), networks(), st.data())
def test_the_bound_holds_and_the_parts_add_up(profile: Profile, network: Network, data: st.DataObject) -> None:
    plan = data.draw(sharded_plans(profile))
    micro_batches = data.draw(st.integers(1, 3))
    slowdown = data.draw(st.sampled_from([1.0, 1.0, 1.3]))
    rate = data.draw(st.sampled_from([None, 1e7]))
    with copying_at(rate):
        step = stepped(profile, network, plan, micro_batches=micro_batches, slowdown=slowdown)
    assert step.bound_s <= step.end_s * (1 + 1e-9)
    whole = chain_of(profile, plan).whole
    single = micro_batches * (whole.forward_s + whole.backward_s) + profile.update_s
    assert _parts(step) == pytest.approx(step.end_s - single, rel=1e-6, abs=1e-9)
    parts = step.breakdown
    assert min(parts.latency_s, parts.bandwidth_s, parts.waiting_s, parts.copies_s) >= -1e-12
    assert parts.contention_s >= -1e-9
    assert step.end_s >= single - profile.update_s - 1e-9


def _parts(step: Stepped) -> float:
    return float(sum(msgspec.structs.astuple(step.breakdown)))


@settings(max_examples=100)
@given(chains(), st.sampled_from([0.0, 1e-4, 1e-3]), st.sampled_from([1e-8, 1e-7]), st.data())
def test_more_bandwidth_and_less_latency_are_never_slower(
    profile: Profile, alpha: float, beta: float, data: st.DataObject
) -> None:
    plan = data.draw(sharded_plans(profile, one_communicator=True))
    slow, fast, near = affine(alpha, beta), affine(alpha, beta / 2), affine(alpha / 2, beta)
    assert step_s(profile, fast, plan) <= step_s(profile, slow, plan) * (1 + 1e-9)
    assert step_s(profile, near, plan) <= step_s(profile, slow, plan) * (1 + 1e-9)


@settings(max_examples=100)
@given(chains(), networks(), st.data())
def test_a_slowdown_never_makes_it_faster(profile: Profile, network: Network, data: st.DataObject) -> None:
    plan = data.draw(sharded_plans(profile, one_communicator=True))
    found = [step_s(profile, network, plan, slowdown=by) for by in (1.0, 1.2, 2.0)]
    assert found[0] <= found[1] * (1 + 1e-9)
    assert found[1] <= found[2] * (1 + 1e-9)


@settings(max_examples=60)
@given(chains(), networks(), st.data())
def test_more_buffers_and_more_prefetch_are_never_slower(
    profile: Profile, network: Network, data: st.DataObject
) -> None:
    plan = data.draw(sharded_plans(profile, one_communicator=True))
    sharding = plan.sharding
    assert sharding is not None
    more = [
        replace(sharding, reduce_scatter_buffers=sharding.reduce_scatter_buffers + 1),
        replace(
            sharding,
            units=tuple(replace(unit, prefetch=unit.prefetch + 1) for unit in sharding.units),
        ),
    ]
    for other in more:
        better = replace(plan, sharding=other)
        assert step_s(profile, network, better) <= step_s(profile, network, plan) * (1 + 1e-9)


@settings(max_examples=60)
@given(chains(), networks(), st.data())
def test_the_engine_of_events_is_the_recursion_where_nothing_shares(
    profile: Profile, network: Network, data: st.DataObject
) -> None:
    plan = data.draw(sharded_plans(profile, one_communicator=True))
    assert plan.sharding is not None
    with copying_at(1e8):
        cost = ShardedCost.of(profile, network, plan.sharding)
    graph = run_step(chain_of(profile, plan), cost, 1e-3, micro_batches=2)[0].graph
    one, other = run_in_order(graph), run_events(graph)
    for left, right in ((one.starts, other.starts), (one.on_link, other.on_link), (one.ends, other.ends)):
        assert left == pytest.approx(right, rel=1e-9, abs=1e-12)


@settings(max_examples=60)
@given(chains(), networks(), st.data())
def test_bytes_are_conserved(profile: Profile, network: Network, data: st.DataObject) -> None:
    """Every parameter is in one unit, gathered before each use and scattered once a reduction, padded by less than one
    element a shard."""
    plan = data.draw(sharded_plans(profile))
    sharding = plan.sharding
    assert sharding is not None
    chain, shards = chain_of(profile, plan), sharding.mesh.shard
    total = sum(-(-gradient.bytes // 4) for gradient in profile.gradients)
    held = sum(chain.elements)
    assert total <= held < total + shards * len(profile.gradients) or held == total
    events = Counter(call_order(profile, plan, micro_batches=2))
    reductions = 1 if sharding.gradient_sync == "last" else 2
    for index in (*range(chain.count), ROOT):
        if chain.elements[index]:
            assert events["reduce_scatter", index] == reductions
            assert events["all_reduce", index] == (reductions if sharding.mesh.replicate > 1 else 0)
            assert events["all_gather", index] == events["copy_out", index]
            assert (events["all_gather", index] > 0) == (shards > 1)
    timeline = stepped(profile, network, plan, micro_batches=2).timeline
    moved = sum(one.bytes for one in timeline if one.name.startswith("reduce-scatter"))
    size = 2 if sharding.reduce_dtype == "bf16" else 4
    assert moved in (0, held * size * reductions)


@settings(max_examples=40)
@given(profiles(), networks(), st.sampled_from(STRATEGIES), st.integers(1, 3))
def test_profiles_without_blocks_are_predicted_too(
    profile: Profile, network: Network, strategy: str, accumulation: int
) -> None:
    result = predicted(profile, network, strategy, accumulation=accumulation)
    assert result.bound_s <= result.iteration_s * (1 + 1e-9)
    assert float(sum(msgspec.structs.astuple(result.breakdown))) == pytest.approx(result.exposed_s, rel=1e-6, abs=1e-9)
    assert any("no blocks" in note for note in worded(result.notes))


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp:1", "zero1", "zero2"])
def test_on_one_worker_nothing_travels(strategy: str) -> None:
    profile, network = bb.Profile.load("gpt2-b8-bf16-h200"), bb.Network.load("ib400").at(workers=1)
    result = predicted(profile, network, strategy)
    assert result.iteration_s == result.single_s == result.bound_s


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp:8", "zero1", "zero2"])
def test_a_sharded_plan_is_predicted_like_any_other(strategy: str) -> None:
    profile, network = bb.Profile.load("llama-1b-b2-bf16-h200"), bb.Network.load("nvlink-ib400").at(workers=16)
    plan = planned(profile, network, strategy)
    result: Prediction = predicted(profile, network, plan)
    assert plan.predicted is not None
    assert plan.predicted.iteration_s == result.iteration_s
    assert plan.predicted.peak_bytes == result.peak_bytes
    assert result.buckets == 17
    assert result.band is not None
    assert result.breakdown.buffers_s == 0.0
    halved = predicted(profile, network, strategy, reduce_dtype="bf16")
    assert halved.iteration_s < result.iteration_s


def test_a_mesh_of_another_size_is_refused() -> None:
    profile, network = bb.Profile.load("gpt2-b8-bf16-h200"), bb.Network.load("ib400")
    plan = planned(profile, network.at(workers=8), "fsdp")
    with pytest.raises(bb.InputError, match=r"mesh replicate\(1\) \* shard\(8\) != workers\(16\).*--gpus 16"):
        predicted(profile, network.at(workers=16), plan)


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ([("b.1",), ("b.0",)], "in the order of forward"),
        ([("b.0", "b.2")], "consecutive blocks"),
        ([("b.0.w",)], "part of a block"),
        ([("b.9",)], "not in the profile"),
    ],
)
def test_units_that_are_no_runs_of_blocks_are_refused(units: list[tuple[str, ...]], words: str) -> None:
    with pytest.raises(bb.InputError, match=words):
        predicted(row(3), affine(0, 0), sharded_plan(row(3), units))


def test_gradients_without_blocks_are_grouped_by_the_module_that_repeats() -> None:
    assert owning_module("model.layers.11.mlp.experts.3.weight") == "model.layers.11"
    profile = make_profile([4] * 4, [1.0, 2.0, 3.0, 4.0])
    named = replace(
        profile,
        gradients=tuple(
            replace(one, name=name)
            for one, name in zip(profile.gradients, ("head.w", "layers.1.w", "layers.0.w", "embed.w"), strict=True)
        ),
    )
    chain = chain_of(named, sharded_plan(named, [("layers.0",), ("layers.1",)]))
    assert [(part.unit, part.backward_s) for part in chain.parts] == [(-1, 1), (0, 1), (1, 1), (-1, 1)]


def test_copies_on_different_nodes_are_not_reduced_at_the_speed_of_one() -> None:
    """A file that has times inside a node: eight copies of eight shards lie on eight nodes."""
    profile, network = bb.Profile.load("llama-1b-b2-bf16-h200"), bb.Network.load("dgx-h100").at(workers=64)
    plan = planned(profile, network, "hsdp:8")
    cost = ShardedCost.of(profile, network, plan.sharding)  # type: ignore[arg-type]
    assert cost.replicate is not None
    assert not cost.one_link
    inside = float(network.at(workers=8).all_reduce.curve.time(1e8))
    assert inside < cost.replicate.at(1e8) <= float(network.all_reduce.curve.time(1e8))


def test_copies_are_reduced_by_a_ring_for_each_rank_of_a_node() -> None:
    """Two nodes of two: one ring over all takes 3/2 of a unit across, two rings over the nodes half of it each."""
    second_per_byte = 1e-9

    def measured(workers: int, speed: float) -> dict[str, CollectiveTimes]:
        share = (workers - 1) / workers * second_per_byte / speed
        return {
            "all_reduce": CollectiveTimes(alpha_s=0.0, beta_s_per_byte=2 * share),
            "all_gather": CollectiveTimes(alpha_s=0.0, beta_s_per_byte=share),
        }

    own = measured(2, 5.0)
    nodes = Topology(gpus_per_node=2, algorithm="hierarchical", inside=own["all_reduce"])
    network = Network(name="two", workers=4, topology=nodes, rows=(WorkersRow(workers=2, **own),), **measured(4, 1.0))
    profile = make_profile([4000] * 4, [1.0, 2.0, 3.0, 4.0], forward=2.0)
    plan = planned(profile, network, "hsdp:2")
    cost = ShardedCost.of(profile, network, plan.sharding)  # type: ignore[arg-type]
    assert cost.replicate is not None
    assert cost.replicate.at(1e8) == pytest.approx(1e8 * second_per_byte)
    # Where the all-reduce crosses faster, as by switches that add up, it is taken: 2/3 of these bytes, less the inner.
    slow = replace(network, all_gather=CollectiveTimes(alpha_s=0.0, beta_s_per_byte=10 * second_per_byte))
    found = ShardedCost.of(profile, slow, plan.sharding).replicate  # type: ignore[arg-type]
    assert found is not None
    assert found.link_s_per_byte == pytest.approx((1.5 - 0.2) * second_per_byte)


@pytest.mark.parametrize("workers", [4, 8])
def test_copies_are_reduced_by_what_is_known_of_larger_messages(workers: int) -> None:
    """All-reduces of up to 1 MiB, which a buffer let through at once, do not say what larger ones take."""

    def points(s_per_byte: float, *sizes: int) -> CollectiveTimes:
        return CollectiveTimes(points=tuple((size, 1e-4 + s_per_byte * size) for size in sizes))

    larger = (2**12, 2**20, 2**24)
    halves = {"all_gather": points(0.5e-9, *larger), "reduce_scatter": points(0.5e-9, *larger)}
    network = Network(name="four", workers=4, backend="nccl", all_reduce=points(0.1e-9, *larger[:2]), **halves)
    profile = make_profile([4000] * 4, [1.0, 2.0, 3.0, 4.0], forward=2.0)
    there = network.at(workers=workers)
    plan = planned(profile, there, "hsdp:2")
    found = ShardedCost.of(profile, there, plan.sharding).replicate  # type: ignore[arg-type]
    assert found is not None
    # Half of a unit is each rank's, and all of it is sent over one link.
    assert found.link_s_per_byte == pytest.approx(there.at(workers=workers // 2).cost.isolated.link_s_per_byte / 2)
    assert there.cost.isolated.link_s_per_byte > 0.9e-9


def test_a_busy_cluster_is_slower() -> None:
    profile, network = bb.Profile.load("llama-1b-b2-bf16-h200"), bb.Network.load("dgx-h100").at(workers=64)
    for strategy in ("fsdp", "hsdp:16"):
        band = predicted(profile, network, strategy).network_band
        assert band is not None
        assert band.quiet_s < band.busy_s
