"""Traces hold every span, in microseconds, one process for each iteration."""

from __future__ import annotations

import json

from hypothesis import given

import backbeat as bb
from backbeat.report import perfetto
from backbeat.report.study import buckets_of
from tests.problems import networks, profiles


@given(profiles(), networks())
def test_a_trace_holds_every_span_and_every_gradient(profile: bb.Profile, network: bb.Network) -> None:
    plan = bb.plan(profile, network, "optimal")
    result = bb.predict(profile, network, plan)
    document = json.loads(
        perfetto.encode(perfetto.trace([("one", result.timeline, buckets_of(plan, profile)), ("two", (), ())]))
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
    spans = bb.predict(
        bb.Profile.load("vgg16-b64-bf16-h200"), bb.Network.load("10gbe"), bb.plan(*_pair(), "wfbp", communicators=2)
    ).timeline
    document = perfetto.trace([("vgg", spans, [])])
    names = {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert set(names.values()) == {"compute", "communicator 0", "communicator 1"}
    assert {event["tid"] for event in document["traceEvents"] if event["ph"] == "X"} == set(names)


def _pair() -> tuple[bb.Profile, bb.Network]:
    return bb.Profile.load("vgg16-b64-bf16-h200"), bb.Network.load("10gbe")
