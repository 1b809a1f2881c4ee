"""Iterations as Chrome trace events, with every bar, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backbeat.model import Span
from backbeat.show.figures.timeline import lane_order, with_gradients

TracedIteration = tuple[str, Sequence[Span], Sequence[Sequence[str]]]
"""A title, spans, and the gradients of each communication span in order, or nothing where they are not known."""


def chrome_trace(iterations: Sequence[TracedIteration]) -> dict[str, Any]:
    """One process for each iteration, with a thread for every lane. Times are microseconds."""
    events: list[dict[str, Any]] = []
    for process, (title, spans, buckets) in enumerate(iterations, start=1):
        events.append(_about("process_name", process, 0, name=title))
        events.append(_about("process_sort_index", process, 0, sort_index=process))
        lanes = sorted({span.lane for span in spans}, key=lane_order)
        threads = {lane: thread for thread, lane in enumerate(lanes, start=1)}
        for lane, thread in threads.items():
            events.append(_about("thread_name", process, thread, name=lane))
            events.append(_about("thread_sort_index", process, thread, sort_index=thread))
        for span, gradients in with_gradients(spans, buckets):
            computing = span.lane == "compute"
            event: dict[str, Any] = {
                "name": span.name,
                "cat": "compute" if computing else "communication",
                "ph": "X",
                "pid": process,
                "tid": threads[span.lane],
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
            if not computing:
                event["args"] = {"bytes": span.bytes, **({"gradients": list(gradients)} if gradients else {})}
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _about(kind: str, process: int, thread: int, **facts: object) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": facts}
