"""Measured iterations beside predicted ones: from `backbeat lab` results and from Kineto traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from backbeat.errors import InputError
from backbeat.importers.fsdp_units import unit_collectives
from backbeat.importers.trace_events import TraceReader
from backbeat.importers.trace_facts import Transfer, arrays, collect, union
from backbeat.model import Network, Plan, Profile, Span
from backbeat.model import files as model_files
from backbeat.planners.draft import Draft
from backbeat.show.chrome_trace import TracedIteration
from backbeat.steps.predict import predict
from backbeat.units import first_to_last

_JOIN_S = 20e-6
"""Kernels with a smaller gap than this between them are drawn as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One plan or run, as measured, beside what was predicted of it."""

    label: str
    origin: str
    """`lab` or `trace`."""
    workers: int
    predicted_s: float = 0.0
    measured_s: float = 0.0
    """The median iteration; 0 for a trace, which nobody predicted."""
    low_s: float = 0.0
    high_s: float = 0.0
    """The 10th and the 90th percentile; the median where single iterations were not kept."""
    iterations: int = 0
    measured_spans: tuple[Span, ...] = ()
    predicted_spans: tuple[Span, ...] = ()
    buckets: tuple[tuple[str, ...], ...] = ()

    def traced(self) -> list[TracedIteration]:
        """What was measured after its own prediction, as far as their spans are known."""
        both = (("predicted", self.predicted_spans), ("measured", self.measured_spans))
        title = f"{self.origin} {self.label}, {self.workers} GPUs"
        return [(f"{how}: {title}", spans, self.buckets) for how, spans in both if spans]

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


class _Row(msgspec.Struct, frozen=True):
    """What a report needs of one row of the lab's file; other fields are the lab's own."""

    strategy: str
    plan: str
    communicators: int
    measured_s: float
    predicted_s: float
    launches: list[tuple[int, int]]
    """[number of gradients, communicator] of each bucket, in launch order; other figures of units."""
    units: int | None = None
    """Of a sharded plan."""
    series_s: list[list[float]] = []
    finishes_s: list[float] = []


class _Lab(model_files.Document, frozen=True, kw_only=True, forbid_unknown_fields=False):
    SCHEMA: ClassVar[str] = "backbeat.lab/1"
    FOLDER: ClassVar[str] = "lab"

    nodes: int
    profile: str
    network: dict[str, Any]
    rows: list[_Row]
    dilation: float = 1.0
    stragglers: dict[str, float] = msgspec.field(default_factory=dict)


def read_measured(labs: Sequence[str], traces: Sequence[str], profile: Profile | None) -> list[Measured]:
    """What files of the lab and of torch.profiler hold; the lab's are of a profile."""
    if labs and profile is None:
        raise InputError(f"--lab {labs[0]}: the lab replays profiles, and this is a shape: ask about the profile")
    found = [row for path in labs if profile is not None for row in read_lab(path, profile)]
    return [*found, *(read_trace(path) for path in traces)]


def read_lab(path: str | Path, profile: Profile) -> list[Measured]:
    """The rows of a file that `backbeat lab -o` wrote. Timelines are rebuilt where the profile is the one replayed."""
    where = model_files.existing(path, "what `backbeat lab -o` wrote")
    lab = model_files.decode(model_files.read(where), _Lab, where=str(where))
    network = model_files.decode(msgspec.json.encode(lab.network), Network, where=f"{where}: network")
    return [_of_row(row, lab, network, profile) for row in lab.rows]


def read_trace(path: str | Path) -> Measured:
    """One iteration of a trace that torch.profiler exported: the last whole one."""
    where = model_files.existing(path, "a trace that torch.profiler exported")
    facts = collect(TraceReader(where))
    # The iterations: profiler steps, or from the end of one optimizer step to the end of the next.
    steps = sorted((mark.start, mark.end) for mark in facts.marks if mark.name.startswith("ProfilerStep#"))
    steps = steps or list(pairwise(sorted(mark.end for mark in facts.marks if mark.name.startswith("Optimizer.step#"))))
    computing = facts.kernels if len(facts.kernels.start) else facts.operators
    busy = np.stack(arrays(computing.start, computing.end), axis=1)
    if not busy.size:
        raise InputError(f"{where}: holds no operators or kernels: export a trace of training with torch.profiler")
    low, high = steps[-1] if steps else (float(busy[:, 0].min()), float(busy[:, 1].max()))
    gap = np.array([0.0, _JOIN_S])
    spans = [
        Span("compute", "computing", start - low, end - low)
        for start, end in (union(busy[(low <= busy[:, 0]) & (busy[:, 0] < high)] + gap) - gap).tolist()
    ]
    if units := unit_collectives(facts):
        sent = [(one.kind.replace("_", "-"), unit, one) for unit, one in units]
    else:
        inside = [one for one in facts.transfers if low <= one.start < high]
        inside.sort(key=lambda one: (one.start, one.end, one.name, one.bytes or 0))
        sent = [(f"communicator {lane}", one.name, one) for lane, one in zip(_lanes(inside), inside, strict=True)]
    spans += [
        Span(lane, name, one.start - low, one.end - low, one.bytes or 0)
        for lane, name, one in sent
        if low <= one.start < high
    ]
    return Measured(
        label=f"trace {where.name}",
        origin="trace",
        workers=max((one.workers or 1 for one in facts.transfers), default=1),
        measured_spans=tuple(spans),
    )


def _of_row(row: _Row, lab: _Lab, network: Network, profile: Profile) -> Measured:
    samples = sorted(sample for series in row.series_s for sample in series)
    low_s, high_s = (samples[len(samples) * tenths // 10] if samples else row.measured_s for tenths in (1, 9))
    # The nodes' compute was dilated, and all waited for the slowest of them.
    replayed = profile.replayed(lab.dilation * max([1.0, *lab.stragglers.values()]))
    plan = _plan(row, replayed, network.workers) if profile.name == lab.profile else None
    return Measured(
        label=row.plan,
        origin="lab",
        workers=lab.nodes,
        predicted_s=row.predicted_s,
        measured_s=row.measured_s,
        low_s=low_s,
        high_s=high_s,
        iterations=len(samples),
        measured_spans=finished_spans(replayed, plan, row.finishes_s) if plan else (),
        predicted_spans=predict(replayed, network, plan, broadcast_buffers=False).timeline if plan else (),
        buckets=tuple(bucket.gradients for bucket in plan.buckets) if plan else (),
    )


def finished_spans(profile: Profile, plan: Plan, finishes_s: Sequence[float]) -> tuple[Span, ...]:
    """Measured finish times as spans. A start was not measured: it is when the bucket was ready and its communicator
    free."""
    if len(finishes_s) != len(plan.buckets):
        return ()
    forward, backward = profile.forward_s, profile.backward_s
    end = max(backward, *finishes_s)
    spans = [
        Span("compute", "forward", 0.0, forward),
        Span("compute", "backward", forward, forward + backward),
        Span("compute", "update", forward + end, forward + end + profile.update_s),
    ]
    free: dict[int, float] = {}
    for bucket, finish in zip(plan.buckets, finishes_s, strict=True):
        members = [profile.gradients[profile.index[name]] for name in bucket.gradients]
        start = min(max(max(one.ready_s for one in members), free.get(bucket.communicator, 0.0)), finish)
        free[bucket.communicator] = finish
        label = first_to_last(bucket.gradients)
        size = sum(one.bytes for one in members)
        spans.append(Span(f"communicator {bucket.communicator}", label, forward + start, forward + finish, size))
    return tuple(spans)


def _plan(row: _Row, profile: Profile, workers: int) -> Plan | None:
    """The plan that ran; None where it has no buckets of this profile's gradients: units, another model."""
    if row.units is not None:
        return None
    if sum(count for count, _ in row.launches) != len(profile.gradients):
        return None
    return Draft.of_launches(row.launches, row.communicators).named(profile, row.strategy, workers)


def _lanes(transfers: Sequence[Transfer]) -> list[int]:
    """The first lane that is free, for each transfer in order of start."""
    ends: list[float] = []
    lanes = []
    for one in transfers:
        lane = next((index for index, until in enumerate(ends) if until <= one.start), len(ends))
        ends[lane : lane + 1] = [one.end]
        lanes.append(lane)
    return lanes
