"""Traces hold every span, in microseconds, one process for each iteration."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given

import backbeat as bb
from backbeat.planners.planned import planned, predicted
from backbeat.show.chrome_trace import chrome_trace
from backbeat.show.steps_traced import buckets_of, traced
from tests.problems import networks, profiles


@given(profiles(), networks())
def test_a_trace_holds_every_span_and_every_gradient(profile: bb.Profile, network: bb.Network) -> None:
    plan = planned(profile, network, "optimal")
    result = predicted(profile, network, plan)
    document = json.loads(
        msgspec.json.encode(chrome_trace([("one", result.timeline, buckets_of(plan, profile)), ("two", (), ())]))
    )
    bars = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == len(result.timeline)
    for event, span in zip(bars, result.timeline, strict=True):
        assert event["name"] == span.name
        assert event["ts"] == span.start_s * 1e6
        assert event["dur"] >= 0
    named = [name for event in bars for name in event.get("args", {}).get("gradients", [])]
    assert named == [gradient.name for gradient in profile.gradients]
    titles = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert titles == ["one", "two"]


def test_lanes_are_threads_with_names() -> None:
    spans = predicted(
        bb.Profile.load("vgg16-b64-bf16-h200"), bb.Network.load("10gbe"), planned(*_pair(), "wfbp", communicators=2)
    ).timeline
    document = chrome_trace([("vgg", spans, [])])
    names = {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert set(names.values()) == {"compute", "communicator 0", "communicator 1"}
    assert {event["tid"] for event in document["traceEvents"] if event["ph"] == "X"} == set(names)


def test_the_collectives_of_a_sharded_step_are_threads_and_its_units_bars() -> None:
    profile = bb.Profile.load("gpt2-b8-bf16-h200")
    document = chrome_trace(traced([bb.predict(profile, "dgx-h100", "hsdp:8", gpus=16)], profile))
    names = {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert [names[thread] for thread in sorted(names)] == ["compute", "all-gather", "reduce-scatter", "all-reduce"]
    gathers = [event for event in document["traceEvents"] if event["ph"] == "X" and names[event["tid"]] == "all-gather"]
    assert gathers[1]["name"] == "transformer.h.0"
    assert gathers[1]["args"]["bytes"] > 0


def _pair() -> tuple[bb.Profile, bb.Network]:
    return bb.Profile.load("vgg16-b64-bf16-h200"), bb.Network.load("10gbe")
