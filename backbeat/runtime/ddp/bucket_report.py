"""`model.report()`: how a reducer's buckets ran, beside what was predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backbeat.model import PlanPrediction
from backbeat.runtime.reduce.timing import median
from backbeat.show.tables.bucket_table import BucketReport, Report

if TYPE_CHECKING:
    from backbeat.runtime.ddp.reducer import Reducer


def make_report(reducer: Reducer) -> Report:
    """How a reducer's buckets ran: those that run now, by their own prediction and by steps that ran under them."""
    tuner, plan, ranks = reducer.tuner, reducer.running_plan, reducer.communicators.size
    known = tuner.running if tuner is not None else None
    recorded = reducer.recorder.steps() or (known.timed if known is not None else ())
    # Where buckets may be skipped, not all leave in each step.
    skips = reducer.settings.skip_unused
    timed = [found for found in recorded if skips or len(found.launched_s) == len(reducer.buckets)]
    forecast, predicted, notes = PlanPrediction(), {}, []
    if plan is not None and plan.predicted is not None:
        forecast = plan.predicted
        times = zip(forecast.launch_s, forecast.done_s, strict=False)
        predicted = {frozenset(bucket.gradients): found for bucket, found in zip(plan.buckets, times, strict=False)}
        if plan.workers not in (None, ranks):
            notes = [f"what is predicted is for {plan.workers} ranks, as the plan was made; this job has {ranks}"]
    buckets = []
    for index, bucket in enumerate(reducer.buckets):
        gradients = tuple(reducer.managed.names[member] for member in bucket.members)
        begin, end = predicted.get(frozenset(gradients), (None, None))
        buckets.append(
            BucketReport(
                gradients=gradients,
                communicator=bucket.spec.communicator,
                bytes=bucket.bytes,
                predicted_launch_s=begin,
                predicted_done_s=end,
                launched_s=median(one.launched_s.get(index) for one in timed),
                done_s=median(one.done_s.get(index) for one in timed),
            )
        )
    exposed = median(found.exposed_s for found in timed)
    iteration = known.iteration_s if known is not None else None
    return Report(
        strategy=reducer.partition.strategy,
        state=tuner.state.value if tuner is not None else "running",
        steps=reducer.steps,
        buckets=tuple(buckets),
        predicted_iteration_s=forecast.iteration_s,
        predicted_exposed_s=forecast.exposed_s,
        iteration_s=iteration if iteration is not None else median(found.iteration_s for found in timed),
        exposed_s=exposed if exposed is not None else (known.exposed_s if known is not None else None),
        late_buckets=reducer.runner.late_buckets,
        history=tuple(tuner.history) if tuner is not None else (),
        notes=tuple(notes),
    )
