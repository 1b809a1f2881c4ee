"""What slows a layout down beside its own work: slow ranks, times that vary, computation beside communication."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backbeat as bb
from backbeat.cost.stragglers import straggling
from backbeat.model.cluster import cluster_of
from backbeat.model.framework import Framework, framework_named
from backbeat.model.layout import Layout
from backbeat.model.prediction import Note
from backbeat.model.slowdown import Slowdown
from backbeat.steps.predict_layout import predict_layout
from backbeat.steps.slow_ranks import slow_pipelines, step_wait

H100 = {each: replace(cluster_of("dgx-h100"), contention=each) for each in (False, True)}
"""Shared, so that each of its collectives is looked up once."""
JOB: dict[str, Any] = {"global_batch": 32, "sequence": 4096, "band": False}
SIZES = st.sampled_from([1, 2, 4])
SCHEDULES = st.sampled_from(["1f1b", "gpipe", "zero-bubble", "interleaved"])


@st.composite
def some_layouts(draw: st.DrawFn) -> Layout:
    schedule = draw(SCHEDULES)
    pp = draw(st.sampled_from([2, 4] if schedule == "interleaved" else [1, 2, 4]))
    return Layout(
        dp=draw(SIZES),
        tp=draw(SIZES),
        cp=draw(st.sampled_from([1, 2])),
        pp=pp,
        schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1,
        zero=draw(st.sampled_from([0, 1, 2, 3])),
    )


FAMILIES = st.sampled_from(["events", "closed-form"])
NO_OVERLAP, TP_OVERLAP = (framework_named("megatron", overlap=overlap) for overlap in ("none", "dp+tp"))
FRAMEWORKS = st.sampled_from(["megatron", TP_OVERLAP, NO_OVERLAP, "nanotron", "torchtitan"])


@settings(max_examples=30, deadline=None)
@given(some_layouts(), FAMILIES, FRAMEWORKS, st.data(), st.floats(1.0, 3.0))
def test_nothing_gets_faster_with_a_straggler(
    layout: Layout, family: Any, framework: Framework | str, data: st.DataObject, slowdown: float
) -> None:
    rank = data.draw(st.integers(0, layout.gpus - 1))
    fields: dict[str, Any] = {**JOB, "family": family, "framework": framework}
    plain, one, slow, worse = (
        predict_layout("llama-3-8b", H100[True], layout, stragglers=stragglers, **fields)
        for stragglers in ({}, {rank: 1.0}, {rank: slowdown}, {rank: slowdown + 0.5})
    )
    assert one == plain
    assert plain.step_s <= slow.step_s <= worse.step_s * (1 + 1e-12)
    assert slow.step_s <= plain.step_s * slowdown * (1 + 1e-9)
    assert sum(slow.breakdown.parts.values()) == pytest.approx(slow.step_s, rel=1e-6)
    assert slow.breakdown.stragglers_s == pytest.approx(slow.step_s - plain.step_s, abs=1e-9)
    assert slow.mfu * slow.step_s == pytest.approx(plain.mfu * plain.step_s)
    if slow.timeline:
        assert max(span.end_s for span in slow.timeline) == pytest.approx(slow.step_s)


def test_whoever_shares_a_layer_waits_for_its_slowest_rank() -> None:
    even = Layout(dp=2, tp=2, cp=2, pp=2)
    assert slow_pipelines(even, {}) == []
    for rank in range(4):
        assert slow_pipelines(even, {rank: 1.5}) == [(1.5, 1.0)]
        assert slow_pipelines(even, {8: 1.2, 9: 1.1, 8 + rank: 1.5}) == [(1.0, 1.5)]
    # Two pipelines, each with a slow stage of its own, and one with both.
    assert slow_pipelines(even, {0: 1.2, 12: 1.3}) == [(1.0, 1.3), (1.2, 1.0)]
    assert slow_pipelines(even, {0: 1.2, 8: 1.3}) == [(1.2, 1.3)]
    # Replicas that gather parameters in every pass wait in every pass, and so do those that share experts.
    for zero in (2, 3):
        assert slow_pipelines(msgspec.structs.replace(even, zero=zero), {0: 1.2, 12: 1.3}) == [(1.2, 1.3)]
    assert slow_pipelines(msgspec.structs.replace(even, ep=8), {0: 1.2, 12: 1.3}) == [(1.2, 1.3)]


def test_one_slow_gpu_alone_takes_as_many_times_as_long() -> None:
    plain, slow = (
        predict_layout("llama-3-8b", H100[False], Layout(), stragglers=each, **JOB).step_s for each in ({}, {0: 1.7})
    )
    assert slow == pytest.approx(1.7 * plain)


def test_slow_stages_of_different_pipelines_cost_less_than_of_one() -> None:
    fields: dict[str, Any] = {**JOB, "dp": 2, "pp": 2, "tp": 2}
    apart, together = (
        predict_layout("llama-3-8b", H100[False], stragglers=slow, **fields).step_s
        for slow in ({0: 1.3, 6: 1.3}, {0: 1.3, 4: 1.3})
    )
    assert apart < together


@pytest.mark.parametrize(
    ("stragglers", "why"),
    [
        ({8: 1.3}, "ranks of 8 GPUs are 0 to 7"),
        *(({0: slowdown}, "it is 1 or more") for slowdown in (0.5, float("nan"), float("inf"))),
    ],
)
def test_stragglers_that_cannot_be_are_refused(stragglers: dict[int, float], why: str) -> None:
    with pytest.raises(bb.InputError, match=why):
        predict_layout("llama-3-8b", H100[False], dp=8, stragglers=stragglers, **JOB)


ALONE = framework_named(NO_OVERLAP, name="alone", tensor_overlap="none", context_exchange="all-to-all")
"""Nothing of its communication runs beside computation."""


@settings(max_examples=30, deadline=None)
@given(some_layouts(), FAMILIES, FRAMEWORKS)
def test_contention_is_only_where_computation_and_communication_overlap(
    layout: Layout, family: Any, framework: Framework | str
) -> None:
    fields: dict[str, Any] = {**JOB, "family": family}
    off, on = (
        predict_layout("llama-3-8b", H100[each], layout, framework=framework, **fields) for each in (False, True)
    )
    assert off.breakdown.contention_s == 0
    assert on.step_s >= off.step_s * (1 - 1e-12)
    assert sum(on.breakdown.parts.values()) == pytest.approx(on.step_s, rel=1e-6)
    if framework == TP_OVERLAP and layout.tp > 1:
        assert on.breakdown.contention_s > 0
        assert any(note.kind == "beside" for note in on.notes)
    if layout.zero < 2:
        alone = [predict_layout("llama-3-8b", H100[each], layout, framework=ALONE, **fields) for each in (False, True)]
        assert alone[1].breakdown.contention_s == 0
        assert alone[1].step_s == pytest.approx(alone[0].step_s, rel=1e-12)
    if layout.gpus == 1:
        assert on == off


def test_what_a_network_measured_comes_first_and_without_a_transport_nothing_is_assumed() -> None:
    silent = bb.Network.load("gcp-a3-high")
    assert silent.topology.transport is None
    fields: dict[str, Any] = {**JOB, "dp": 8}
    off, on = (
        predict_layout("llama-3-8b", replace(cluster_of(silent), contention=each), **fields) for each in (False, True)
    )
    assert on == off
    measured = msgspec.structs.replace(silent, slowdown=Slowdown(matmul=1.5))
    slow = predict_layout("llama-3-8b", measured, **fields)
    assert slow.breakdown.contention_s > 0
    assert any("as measured on this cluster" in str(note.values.get("origin")) for note in slow.notes)


def test_only_what_computes_is_slowed_and_by_its_kind() -> None:
    measured = msgspec.structs.replace(bb.Network.load("dgx-h100"), slowdown=Slowdown(matmul=1.5, memory=2.0))
    there = cluster_of(measured)
    assert there.slowdown(8, matmul=1.0) == pytest.approx(1.5)
    assert there.slowdown(8, memory=1.0) == pytest.approx(2.0)
    # Half of the time is neither.
    assert there.slowdown(8, matmul=0.5) == pytest.approx(1.25)
    assert there.slowdown(8, matmul=0.25, memory=0.25) == pytest.approx(1 + 0.25 * 0.5 + 0.25 * 1.0)
    assert there.slowdown(8) == there.slowdown(1, matmul=1.0) == 1
    assert replace(there, contention=False).slowdown(8, matmul=1.0) == 1


def test_steps_vary_as_measured_iterations_do() -> None:
    fields: dict[str, Any] = {**JOB, "dp": 4, "tp": 2}
    steady = predict_layout("llama-3-8b", H100[False], iteration_s=[0.03] * 20, **fields)
    assert steady.jitter_s is None
    assert steady.breakdown.stragglers_s == 0
    times = [0.03 * (1 + 0.01 * (index % 7)) for index in range(40)]
    varied = predict_layout("llama-3-8b", H100[False], iteration_s=times, **fields)
    assert varied.step_s > steady.step_s
    assert varied.breakdown.stragglers_s == pytest.approx(varied.step_s - steady.step_s)
    assert varied.jitter_s is not None
    assert steady.step_s < varied.jitter_s[0] < varied.step_s < varied.jitter_s[1]
    # Ranks that wait for each other in every layer wait longer than those that do at the end of the step.
    apart = predict_layout("llama-3-8b", H100[False], iteration_s=times, **{**fields, "dp": 8, "tp": 1})
    assert apart.breakdown.stragglers_s / apart.step_s < varied.breakdown.stragglers_s / varied.step_s


@pytest.mark.parametrize(
    ("fields", "group"),
    [({"dp": 16}, 1), ({"dp": 4, "tp": 4}, 4), ({"pp": 16}, 1), ({"dp": 16, "zero": 2}, 16)],
)
def test_a_group_waits_in_every_block_and_the_step_for_the_slowest_group(fields: dict[str, int], group: int) -> None:
    """A step of 50 blocks, each twice as long as the measured ones are on average."""
    times = tuple(0.02 + 0.001 * (place % 5) ** 2 for place in range(10))
    layout = Layout(**fields)
    inside, between = straggling(times, group), straggling(times, 16 // group, 50)
    assert inside is not None
    assert between is not None
    found = step_wait(times, layout, 50 * 2 * statistics.fmean(times), 50)
    assert found is not None
    always = 50 * inside.wait_s
    assert found.wait_s == pytest.approx(2 * (always + between.wait_s))
    assert (found.p10_s, found.p90_s) == pytest.approx((2 * (always + between.p10_s), 2 * (always + between.p90_s)))
    # Ten times of a block do not show the slowest of sixteen, wherever these wait for each other.
    assert found.extrapolated == (group in (1, 16))


def test_a_stage_varies_with_the_layers_it_has() -> None:
    times = tuple(0.03 * (1 + 0.01 * (place % 7)) for place in range(40))
    layout = Layout(dp=4, pp=2)
    found = predict_layout("llama-3-8b", H100[False], layout, iteration_s=times, **JOB)
    parts = found.breakdown
    computed = parts.matmul_s + parts.attention_s + parts.memory_s + parts.host_s
    # Eight micro-batches through sixteen of 32 layers.
    waits = step_wait(times, layout, computed, 8 * 16)
    assert waits is not None
    assert parts.stragglers_s == pytest.approx(waits.wait_s)
    without = found.step_s - waits.wait_s
    assert found.jitter_s == pytest.approx((without + waits.p10_s, without + waits.p90_s))


def test_a_step_says_where_its_slowest_rank_was_never_seen() -> None:
    times = [0.03 * (1 + 0.01 * (place % 7)) for place in range(10)]
    notes = [predict_layout("llama-3-8b", H100[False], iteration_s=times, dp=dp, **JOB).notes for dp in (8, 16)]
    assert notes[1][:-1] == notes[0]
    assert notes[1][-1] == Note("slowest_extrapolated", {"workers": 16, "iterations": 10})
