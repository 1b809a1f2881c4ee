"""Predicted steps as timelines and traces take them: spans, and the gradients that each message carries."""

from __future__ import annotations

from collections.abc import Iterable

from backbeat.model import Plan, Prediction, Profile
from backbeat.show.chrome_trace import TracedIteration
from backbeat.show.figures.timeline import by_collective


def buckets_of(plan: Plan, profile: Profile) -> list[tuple[str, ...]]:
    """The names that each communication span carries, in order; empty where buckets form at run time."""
    if plan.dynamic is not None:
        return []
    buckets = [bucket.gradients for bucket in plan.buckets]
    missing = plan.missing(profile)
    return [*buckets, tuple(missing)] if missing else buckets


def traced(predictions: Iterable[Prediction], profile: Profile | None) -> list[TracedIteration]:
    """Each step that has a timeline. Of a pipeline only as many micro-batches as are simulated one by one."""
    found: list[TracedIteration] = []
    for one in predictions:
        if not one.timeline:
            continue
        spans = one.timeline if one.plan is None else by_collective(one.timeline, one.plan)
        buckets = [] if one.plan is None or profile is None else buckets_of(one.plan, profile)
        found.append((f"predicted: {one.way}, {one.gpus} GPUs", spans, buckets))
    return found
