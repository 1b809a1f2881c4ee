"""Layouts on the lab's nodes: the third family of predictors, beside the closed form and the simulation of events.

Each layout is run by torch (`spun_steps`), and predicted in closed form and as events from what the same links take
for a send, an all-gather and a reduce-scatter by themselves. All three answers are a `Prediction`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, Literal

import msgspec

from backbeat.cost import Curve
from backbeat.cost.collectives import Collective
from backbeat.cost.samples import quantile
from backbeat.errors import InputError
from backbeat.lab.experiment import Repeated, play, slowest
from backbeat.lab.jobs import LayoutJob, TransferJob, TransferKind
from backbeat.lab.session import Session
from backbeat.lab.setting import Setting
from backbeat.model import CollectiveTimes, Network
from backbeat.model.accelerator import Accelerator
from backbeat.model.architecture import Architecture
from backbeat.model.cluster import Cluster
from backbeat.model.framework import Streams, framework_named
from backbeat.model.layout import Job, Layout
from backbeat.model.possible_layout import check_layout
from backbeat.model.prediction import COMPUTE, Note, Prediction
from backbeat.steps.predict_layout import PREDICTED, Family, LayoutPredictor
from backbeat.steps.stage_layers import split_layers

Answered = Family | Literal["execution"]
"""How an answer was found: predicted, or run."""

FRAMEWORK = "torchtitan"
"""What torch's pipelining and DTensor do is what it does."""


@dataclass(frozen=True, slots=True)
class TimedLinks:
    """What is known of the lab's links before a layout is run."""

    curves: Mapping[tuple[TransferKind, int], Curve]
    """What a transfer takes by itself, by its kind and the ranks of a group: until its last rank has it; `late` once
    the receiver is ready."""
    streams: Streams = "direction"


FREE = TimedLinks({})
"""Links that take no time."""


@dataclass(frozen=True)
class LabCluster(Cluster):
    """GPUs on the lab's links, which take what was timed."""

    links: TimedLinks = FREE

    def collective_s(self, kind: Collective, size: float, workers: int, stride: int = 1) -> float:
        return self._timed(kind, size, workers) if workers > 1 else 0.0  # type: ignore[arg-type]

    def waited_s(self, kind: Collective, size: float, workers: int) -> float:
        return self.collective_s(kind, size, workers)

    def send_s(self, size: float, workers: int, stride: int) -> float:
        return self._timed("send", size, 2)

    def late_s(self, size: float) -> float | None:
        return self._timed("late", size, 2) if ("late", 2) in self.links.curves else None

    def _timed(self, kind: TransferKind, size: float, workers: int) -> float:
        return self.links.curves[kind, workers].at(size) if self.links is not FREE else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCase:
    """What is run under a layout: a model's computation on a GPU, so many times as long."""

    model: Architecture
    job: Job
    layout: Layout
    accelerator: Accelerator
    dilation: float

    def __post_init__(self) -> None:
        check_layout(self.model, self.layout, self.job)
        runnable(self.layout)
        # torch's schedules know nothing of a head that shares the embedding's weights: its gradient is not reduced.
        object.__setattr__(self, "model", msgspec.structs.replace(self.model, tied=False))

    def predictor(self, setting: Setting, links: TimedLinks) -> LayoutPredictor:
        times = CollectiveTimes(alpha_s=0.0, beta_s_per_byte=8 / setting.rate_bits)
        network = Network(name=setting.name, workers=setting.ranks, all_reduce=times)
        cluster = LabCluster(network, self.accelerator, links=links)
        framework = framework_named(FRAMEWORK, streams=links.streams, kernels="fused")
        return LayoutPredictor(
            model=self.model,
            cluster=cluster,
            job=self.job,
            framework=framework,
            compute_factor=self.dilation,
            spun=True,
        )

    def run_job(self, setting: Setting) -> LayoutJob:
        """What is computed where links take no time."""
        model, job, layout, free = self.model, self.job, self.layout, self.predictor(setting, FREE)
        return LayoutJob(
            layout=layout,
            micro_batches=layout.micro_batches(job),
            rows=layout.micro_batch * job.sequence,
            row_bytes=2 * model.hidden,
            chunks=tuple(zip(free.timer(layout).stages(), split_layers(model, layout), strict=True)),
            update_s=free.predict(layout, "closed-form").breakdown.update_s,
        )


def runnable(layout: Layout) -> None:
    """Refuse what the lab does not run."""
    for name in ("dp", "cp", "ep"):
        if getattr(layout, name) > 1:
            raise InputError(f"--layout {layout.label}: the lab runs tp and pp; leave {name} out")
    if layout.tp > 1 and not layout.sequence_parallel:
        raise InputError(f"--layout {layout.label}: the lab runs tp with sequence parallelism only")
    if layout.recompute != "none":
        raise InputError(f"--layout {layout.label}: the lab does not recompute; leave recompute out")
    if layout.gpus < 2:
        raise InputError(f"--layout {layout.label} is one GPU: the lab compares communication, give tp or pp")


@dataclass(frozen=True, kw_only=True)
class ExecutedLayout(Repeated):
    """One layout, by all three families."""

    answers: dict[Answered, Prediction]
    cost_s: dict[Answered, float]
    """What each answer took to find; of execution, its own steps alone, without starting nodes and timing links."""
    series: tuple[list[float], list[float]]

    @property
    def waiting(self) -> float:
        """Of the measured step, what the stage with most to do does not compute: communication and bubbles."""
        parts = self.answers["execution"].breakdown.parts
        return 1 - sum(parts[name] for name in COMPUTE) / self.measured_s

    def error(self, family: Answered) -> float:
        """Predicted over measured, less one."""
        return self.answers[family].step_s / self.measured_s - 1


def communicators(cases: Sequence[LayoutCase]) -> int:
    """As `experiment.open_lab` takes it: layouts of two dimensions use several, which NCCL launches in one order."""
    return 2 if any(case.layout.tp > 1 and case.layout.pp > 1 for case in cases) else 1


def row_of(found: ExecutedLayout) -> dict[str, Any]:
    """A layout as data, every step included."""
    ran = found.answers["execution"]
    return {
        "layout": ran.strategy,
        "parallelism": " and ".join(word for part, word in (("tp", "tensor"), ("pp", "pipeline")) if part in ran.mesh),
        "schedule": ran.layout.schedule if ran.layout is not None and "pp" in ran.mesh else None,
        "measured_s": found.measured_s,
        "repeat": found.repeat,
        "spread_s": found.spread_s,
        "waiting": found.waiting,
        "predicted_s": {family: found.answers[family].step_s for family in PREDICTED},
        "error": {family: found.error(family) for family in PREDICTED},
        "cost_s": found.cost_s,
        "series_s": found.series,
    }


def transfers(jobs: Sequence[LayoutJob], byte_s: float) -> tuple[TransferJob, ...]:
    """What has to be timed to predict these: each collective and send at half, one and two times the sizes sent. A late
    receiver is ready when all could have come in."""
    wanted: dict[tuple[TransferKind, int], set[int]] = {}
    for job in jobs:
        tp, pp, size = job.layout.tp, job.layout.pp, job.activation_bytes
        groups: list[tuple[TransferKind, int, int]] = []
        if tp > 1:
            groups += [("all_gather", tp, size), ("reduce_scatter", tp, size)]
        if pp > 1:
            # Predictions need no swap; it says whether links work both ways at once.
            groups += [(kind, 2, size // tp) for kind in ("send", "swap", "late")]
        for kind, workers, sent in groups:
            wanted.setdefault((kind, workers), set()).update((sent // 2, sent, 2 * sent))
    return tuple(
        TransferJob(
            kind=kind,
            bytes=max(size, 4 * workers),
            workers=workers,
            late_s=2 * size * byte_s if kind == "late" else 0.0,
        )
        for (kind, workers), sizes in wanted.items()
        for size in sorted(sizes)
    )


def time_links(session: Session, jobs: Sequence[LayoutJob], setting: Setting, budget_s: float) -> list[dict[str, Any]]:
    """What each transfer of these jobs takes by itself, at half, one and two times its size; `links_of` reads it."""
    timed = transfers(jobs, 8 / setting.rate_bits)
    expected = [job.late_s + 2 * job.bytes * 8 / setting.rate_bits for job in timed]
    found = play(session, timed, expected, budget_s / len(timed))
    return [
        {**msgspec.to_builtins(job), "seconds": sorted(chain(*slowest(ranks)))}
        for job, ranks in zip(timed, found, strict=True)
    ]


def links_of(rows: Sequence[Mapping[str, Any]], setting: Setting, torch_version: str) -> TimedLinks:
    """Curves through the medians of what `time_links` timed.

    >>> rows = [{"kind": "send", "workers": 2, "bytes": size, "seconds": [size * 1e-6] * 3} for size in (1000, 2000)]
    >>> links_of(rows, Setting(nodes=2, rate_bits=1e9), "2.13.0").curves["send", 2].at(1500)
    0.0015
    """
    points: dict[tuple[TransferKind, int], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: float(row["bytes"])):
        # Gloo sends nothing before the receiver says that it is ready.
        if row["kind"] != "late" or setting.backend == "nccl":
            seconds = max(0.0, median(row["seconds"]) - row.get("late_s", 0.0))
            points.setdefault((row["kind"], row["workers"]), []).append((row["bytes"], seconds))
    curves = {which: Curve.through(each) for which, each in points.items()}
    return TimedLinks(curves, streams_of(setting.backend, torch_version))


def streams_of(backend: str, torch_version: str) -> Streams:
    """Before 2.13 torch sends everything through one communicator; since, through one for each pair of ranks. Gloo has
    one connection for each pair, on which a rank says that it is ready to receive after what it sends.

    >>> streams_of("nccl", "2.11.0+cu130"), streams_of("nccl", "2.13.0"), streams_of("gloo", "2.11.0")
    ('rank', 'pair', 'connection')
    """
    if backend != "nccl":
        return "connection"
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return "pair" if (major, minor) >= (2, 13) else "rank"


def measure_layouts(
    session: Session, cases: Sequence[LayoutCase], setting: Setting, links: TimedLinks, seconds_each: float
) -> list[ExecutedLayout]:
    """Run the layouts by turns, each beside what is predicted of it."""
    jobs = [case.run_job(setting) for case in cases]
    predicted = [predicted_layout(case, setting, links) for case in cases]
    expected = [answers["events"].step_s for answers, _ in predicted]
    found = play(session, jobs, expected, seconds_each)
    return [executed(*both, slowest(ranks)) for both, ranks in zip(predicted, found, strict=True)]


def predicted_layout(
    case: LayoutCase, setting: Setting, links: TimedLinks
) -> tuple[dict[Answered, Prediction], dict[Answered, float]]:
    """In closed form and as events; and the seconds that each took."""
    answers: dict[Answered, Prediction] = {}
    cost: dict[Answered, float] = {}
    predictor = case.predictor(setting, links)
    for family in PREDICTED:
        begun = time.perf_counter()
        answers[family] = predictor.predict(case.layout, family)
        cost[family] = time.perf_counter() - begun
    return answers, cost


def executed(
    answers: Mapping[Answered, Prediction],
    cost_s: Mapping[Answered, float],
    series: tuple[list[float], list[float]],
) -> ExecutedLayout:
    """With what was measured as the third answer. Of its parts computation is known; the rest is waiting, which counts
    as a bubble in a pipeline and to tensor parallelism elsewhere."""
    events = answers["events"]
    step_s = quantile(sorted(chain(*series)), 0.5)
    rest = step_s - events.step_s
    piped = events.mesh.get("pp", 1) > 1
    part = "bubble" if piped else "tensor"
    waited_s = max(0.0, events.breakdown.parts[part] + rest)
    ratio = events.step_s / step_s
    found = msgspec.structs.replace(
        events,
        iteration_s=step_s,
        scaling_factor=events.scaling_factor * ratio,
        exposed_s=events.exposed_s + rest,
        samples_per_s=events.samples_per_s * ratio,
        breakdown=msgspec.structs.replace(events.breakdown, **{f"{part}_s": waited_s}),
        bubble_share=max(0.0, 1 - (1 - events.bubble_share) * ratio) if piped else 0.0,
        timeline=(),
        notes=(*events.notes, Note("executed")),
    )
    return ExecutedLayout(
        answers={**answers, "execution": found}, cost_s={**cost_s, "execution": sum(chain(*series))}, series=series
    )
