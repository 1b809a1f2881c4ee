"""Timelines as Chrome trace events, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from backbeat.model import Span
from backbeat.report.figures.timeline import SHARDED_LANES, with_gradients

_COMPUTE_THREAD = 1
_FIRST_COLLECTIVE_THREAD = 2
_FIRST_COMMUNICATOR_THREAD = 10


Iteration = tuple[str, Sequence[Span], Sequence[Sequence[str]]]
"""A title, spans, and the gradients of each communication span in order, or nothing where they are not known."""


def trace(iterations: Sequence[Iteration]) -> dict[str, Any]:
    """One process for each iteration, with a thread for every lane. Times are microseconds."""
    events: list[dict[str, Any]] = []
    for process, (title, spans, buckets) in enumerate(iterations, start=1):
        events.append(_about("process_name", process, 0, name=title))
        events.append(_about("process_sort_index", process, 0, sort_index=process))
        for lane in sorted({span.lane for span in spans}, key=_thread):
            events.append(_about("thread_name", process, _thread(lane), name=lane))
            events.append(_about("thread_sort_index", process, _thread(lane), sort_index=_thread(lane)))
        events += _events(process, spans, buckets)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def encode(document: dict[str, Any]) -> bytes:
    return msgspec.json.encode(document) + b"\n"


def _events(process: int, spans: Sequence[Span], buckets: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    events = []
    for span, gradients in with_gradients(spans, buckets):
        event: dict[str, Any] = {
            "name": span.name,
            "cat": "compute" if span.lane == "compute" else "communication",
            "ph": "X",
            "pid": process,
            "tid": _thread(span.lane),
            "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
        }
        if span.lane != "compute":
            event["args"] = {"bytes": span.bytes}
            if gradients:
                event["args"]["gradients"] = list(gradients)
        events.append(event)
    return events


def _thread(lane: str) -> int:
    if lane == "compute":
        return _COMPUTE_THREAD
    if lane in SHARDED_LANES:
        return _FIRST_COLLECTIVE_THREAD + SHARDED_LANES.index(lane)
    number = lane.removeprefix("communicator ")
    return _FIRST_COMMUNICATOR_THREAD + int(number) if number.isdecimal() else _FIRST_COMMUNICATOR_THREAD - 1


def _about(kind: str, process: int, thread: int, **facts: object) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": facts}
