"""What one iteration will take, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model.gpu_memory import MemoryByKind
from backbeat.model.layout import Layout
from backbeat.model.plan import Plan, PlanPrediction
from backbeat.model.rule import Fits

COMPUTE = ("matmul", "attention", "memory", "host", "recompute", "update")
"""Parts of a layout's step that are computation; the rest is waiting for others."""

_WORTH_IT = 0.5
"""Past the knee an added worker brings less than this share of what one worker does alone."""


class Span(msgspec.Struct, frozen=True):
    """One bar of a timeline. Lanes are `compute` and `communicator 0`, `communicator 1`, …"""

    lane: str
    name: str
    start_s: float
    end_s: float
    bytes: int = 0

    @property
    def carries_gradients(self) -> bool:
        return self.lane != "compute" and self.name != "buffers"


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time goes. What buckets and units expose adds up to the exposed time. Parts of a layout's step are of
    the stage that has most to do, and add up to the step."""

    matmul_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    """Norms, activations, residuals, loss: what moves bytes."""
    recompute_s: float = 0.0
    update_s: float = 0.0
    tensor_s: float = 0.0
    """Exposed collectives of tensor parallelism; likewise of context and expert parallelism."""
    context_s: float = 0.0
    expert_s: float = 0.0
    parameters_s: float = 0.0
    """A layout waiting for sharded parameters and gradients in each pass (ZeRO 2 and 3)."""
    bubble_s: float = 0.0
    """The pipeline fills and drains, waits for slower stages and for sends."""
    reduce_s: float = 0.0
    """A layout's exposed reduction of gradients."""
    latency_s: float = 0.0
    """After backward, some message is starting and none is moving bytes."""
    bandwidth_s: float = 0.0
    """Bytes moving after backward that would not have fitted behind it on this link, whatever the bucketing."""
    waiting_s: float = 0.0
    """The rest of the communication after backward: it was held back until the last gradients were ready."""
    stragglers_s: float = 0.0
    """Waiting for the slowest worker."""
    buffers_s: float = 0.0
    """Broadcasting module buffers before forward."""
    contention_s: float = 0.0
    """Computation that takes longer beside communication, which takes multiprocessors and memory bandwidth from it."""
    gather_s: float = 0.0
    """Forward waiting for parameters that another worker updated, where a framework shards the update."""
    copies_s: float = 0.0
    """Sharded plans: parameters copied out of gathered buffers, gradients copied into reduce-scatter inputs."""
    sharding_s: float = 0.0
    """What a sharded update takes less than a whole one: zero or negative."""
    host_s: float = 0.0
    """The device waiting for the host to issue work: in a layout all of it, elsewhere what goes beyond that of one
    worker; negative where it waits for communication instead, which then costs that much less."""

    @property
    def parts(self) -> dict[str, float]:
        """By name, without the unit."""
        return {name.removesuffix("_s"): getattr(self, name) for name in self.__struct_fields__}


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """How much iterations differ from each other, as the profile's own iteration times say."""

    p10_s: float
    p90_s: float
    extrapolated: bool = False
    """More workers than measured iterations: the tail is fitted, not seen."""


class NetworkBand(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration where others use the network little, and where they use it much."""

    quiet_s: float
    """T(N) on a quiet cluster."""
    busy_s: float
    """T(N) on a busy cluster."""
    quiet_scaling_factor: float
    busy_scaling_factor: float
    margin: float = 0.0
    """How far iterations may lie beyond either edge for reasons other than the network, as a share."""

    @property
    def shortest_s(self) -> float:
        """T(N) that a job may reach on a quiet cluster."""
        return self.quiet_s * (1 - self.margin)

    @property
    def longest_s(self) -> float:
        """T(N) to expect on a busy cluster."""
        return self.busy_s * (1 + self.margin)


class GapParts(msgspec.Struct, frozen=True):
    """What an iteration takes above its bound, by cause."""

    host_s: float
    """The host, which issues work late."""
    contention_s: float
    """Computation that takes longer beside communication, beyond what no plan avoids."""
    communicators_s: float
    """Messages that wait for each other's latencies, where as many communicators as messages would hide them."""
    plan_s: float
    """The rest: what travels together, and when."""


class Note(msgspec.Struct, frozen=True):
    """One thing to know of a prediction; `report.words.notes` words it."""

    kind: str
    values: Mapping[str, str | int | float] = {}

    def __hash__(self) -> int:
        return hash((self.kind, tuple(self.values.items())))


class Cost(msgspec.Struct, frozen=True):
    """What a whole training takes."""

    hours: float
    gpu_hours: float
    money: float | None = None
    """Where the price of a GPU-hour is known."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Measured rows of the same GPU, scale, parallelism, precision, framework and route."""

    inside: bool
    error: float | None = None
    """How far off nine of ten of them were."""
    rows: int = 0


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one cluster in one way, predicted."""

    strategy: str
    """The way, by its name."""
    workers: int
    """GPUs."""
    model: str = ""
    cluster: str = ""
    mesh: Mapping[str, int] = {}
    """Sizes of what GPUs share: replicate, shard, tp, pp, cp, ep; those above 1."""
    framework: str | None = None
    """Whose habits."""
    runs_by: str | None = None
    """What runs it, where the framework does not."""
    global_batch: int = 0
    """Samples, or sequences, of one step over all GPUs."""
    batch: int = 0
    """Of one micro-batch of one replica."""
    micro_batches: int = 1
    recompute: str = "none"
    sequence: int | None = None
    """Tokens of one; None where samples are no sequences."""
    precision: str | None = None
    parameters: int | None = None
    flops: float | None = None
    """Of one step over all GPUs, as MFU counts them."""
    peak_flops: float | None = None
    """What one GPU could do in a second in this precision."""
    layout: Layout | None = None
    """Where the way is one."""
    plan: Plan | None = None
    communicators: int = 1
    buckets: int = 0
    iteration_s: float
    """T(N), straggler wait included."""
    range_s: tuple[float, float] | None = None
    """The 10th and the 90th percentile of where the median step of such a job is found."""
    single_s: float
    """T(1): the same work for each GPU, on one that communicates with nobody. A layout's has unlimited memory."""
    scaling_factor: float
    """T(1) / T(N); under a memory plan, T(1) of a worker that keeps everything."""
    exposed_s: float
    """T(N) - T(1); in a layout what collectives and waits add."""
    bound_s: float | None = None
    """No plan that ends its communication within the iteration is faster than this; None where none is known."""
    samples_per_s: float
    """Samples a second of the whole job."""
    breakdown: Breakdown
    bottleneck: str
    """`compute`, or the largest part of the breakdown: `latency`, `bandwidth`, `waiting`, `stragglers`, `buffers`,
    `contention`, `gather`, `copies`; `memory`, where what is not kept of activations costs more than these; or `host`,
    where it issues work slower than the device does it. Of a layout its largest part that is no plain arithmetic."""
    bubble_share: float = 0.0
    """Of a pipeline's time, what the average stage does nothing in."""
    band: Band | None = None
    network_band: NetworkBand | None = None
    """The iteration on a quiet and on a busy cluster, where the network has a band; `iteration_s` is a typical
    day's."""
    memory: MemoryByKind | None = None
    device_bytes: int | None = None
    """What a GPU has for it: `model.gpu_memory.device_bytes`."""
    fits: Fits | None = None
    extrapolated: bool = False
    """Some figure lies beyond what was measured; `notes` says which."""
    timeline: tuple[Span, ...] = ()
    notes: tuple[Note, ...] = ()
    checked: Compared | None = None
    """What answers like this one were compared with; None where nobody asked through `bb.predict`."""
    gap_parts: GapParts | None = None
    """Where it was asked for."""
    cost: Cost | None = None
    """Where it was said how much is trained."""

    @property
    def way(self) -> str:
        return self.strategy

    @property
    def gpus(self) -> int:
        return self.workers

    @property
    def step_s(self) -> float:
        return self.iteration_s

    @property
    def jitter_s(self) -> tuple[float, float] | None:
        """The 10th and the 90th percentile of single steps."""
        return None if self.band is None else (self.band.p10_s, self.band.p90_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Of the whole job; None where samples are no sequences."""
        return None if self.sequence is None else self.samples_per_s * self.sequence

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        return None if self.tokens_per_s is None else self.tokens_per_s / self.workers

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the GPUs could do at the peak rate of this precision."""
        if not self.flops or not self.peak_flops or self.iteration_s <= 0:
            return None
        return self.flops / (self.iteration_s * self.workers * self.peak_flops)

    @property
    def peak_bytes(self) -> int | None:
        """Device memory at its highest; None where nothing is known of it."""
        return None if self.memory is None else self.memory.peak_bytes

    @property
    def gap(self) -> float:
        """How far this plan is above the bound, as a share of it."""
        return self.iteration_s / self.bound_s - 1 if self.bound_s else 0.0

    @property
    def on_busy(self) -> Prediction:
        """The same on a busy cluster; itself where the network has no band. The breakdown stays the typical one."""
        band = self.network_band
        if band is None or band.busy_s <= 0:
            return self
        return replace(
            self,
            iteration_s=band.busy_s,
            scaling_factor=band.busy_scaling_factor,
            exposed_s=band.busy_s - self.single_s,
            samples_per_s=self.samples_per_s * self.iteration_s / band.busy_s,
        )

    def bucket_times(self) -> list[tuple[float, float]]:
        """When each bucket leaves and is back, in seconds from the start of backward, in launch order. Empty where the
        buckets of the plan are not sent one by one within the iteration."""
        found = [(span.start_s, span.end_s) for span in self.timeline if span.carries_gradients]
        if len(found) != self.buckets:
            return []
        backward = next(span.start_s for span in self.timeline if span.name.startswith("backward"))
        return [(start - backward, end - backward) for start, end in found]

    def kept(self, network: str) -> PlanPrediction:
        """What a plan for that network keeps of its prediction."""
        times = self.bucket_times()
        return PlanPrediction(
            network=network,
            iteration_s=self.iteration_s,
            exposed_s=self.exposed_s,
            bound_s=self.bound_s,
            scaling_factor=self.scaling_factor,
            peak_bytes=self.peak_bytes,
            launch_s=tuple(launch for launch, _ in times),
            done_s=tuple(done for _, done in times),
        )

    def _repr_html_(self) -> str:
        from backbeat.show.notebook import prediction_html  # late: report stands above model

        return prediction_html(self)


def knee(curve: Sequence[Prediction]) -> int | None:
    """The number of workers past which an added one brings less than half of what one does alone.

    Counted from one worker: it is 1 where the first point of the curve does not pay either, however the curve goes on.
    None where all of it pays: the knee lies beyond.
    """
    points = sorted(curve, key=lambda point: point.workers)
    if not points:
        raise InputError("a scaling curve needs at least one number of workers")
    workers = 1
    previous = None
    for point in points:
        if point.workers > 1:
            # Both sides times the scaling factor, which is 0 for a profile that computes nothing.
            each = point.samples_per_s / point.workers
            before = each if previous is None else previous.samples_per_s * point.scaling_factor
            added = point.samples_per_s * point.scaling_factor - before
            if added < _WORTH_IT * each * (point.workers - workers):
                return workers
        workers, previous = point.workers, point
    return None
