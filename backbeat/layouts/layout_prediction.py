"""What is predicted of one layout."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from backbeat.layouts.layout_memory import MemoryByKind
from backbeat.model.layout import Job, Layout
from backbeat.model.prediction import Span

Family = Literal["closed-form", "events", "execution"]
"""How a step was found: by formula, by simulating its events, or by running it in the lab."""

COMPUTE = ("matmul", "attention", "memory", "host", "recompute", "update")
"""The parts of a step that are computation; the rest is waiting for others."""


class StepBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step of the stage that has most to do. The parts add up to the step."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Norms, activations, residuals, loss: what moves bytes."""
    host: float = 0.0
    """Waiting for the host to submit operators."""
    recompute: float = 0.0
    tensor: float = 0.0
    """Exposed collectives of tensor parallelism; likewise of context and expert parallelism."""
    context: float = 0.0
    expert: float = 0.0
    contention: float = 0.0
    """Computation that takes longer beside communication."""
    parameters: float = 0.0
    """Waiting for sharded parameters and gradients in each pass (ZeRO 2 and 3)."""
    bubble: float = 0.0
    """The pipeline fills and drains, waits for slower stages and for sends."""
    reduce: float = 0.0
    """Exposed reduction of gradients."""
    update: float = 0.0
    gather: float = 0.0
    """Exposed gathering of updated parameters."""
    stragglers: float = 0.0
    """Waiting for ranks that compute more slowly than others."""

    @property
    def parts(self) -> dict[str, float]:
        return msgspec.structs.asdict(self)

    @property
    def limit(self) -> str:
        """The largest part that is not plain arithmetic, where it takes a tenth of the step; compute otherwise."""
        parts = self.parts
        total = sum(parts.values())
        name = max((one for one in parts if one not in ("matmul", "attention")), key=lambda one: parts[one])
        return name if parts[name] > 0.1 * total else "compute"


class LayoutPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """One layout of one job on one cluster."""

    model: str
    cluster: str
    layout: Layout
    job: Job
    gpus: int
    family: Family
    step_s: float
    mfu: float
    """Model FLOPs over what the GPUs could do at the peak rate of this precision."""
    memory: MemoryByKind
    limit_bytes: int
    """What the GPU holds."""
    breakdown: StepBreakdown
    bubble_share: float
    """Of the pipeline's time, what the average stage does nothing in."""
    band_s: tuple[float, float] | None = None
    """Where the steps of such layouts are found: on a quiet and on a busy cluster, and as far off as nine of ten
    published ones were."""
    spread_s: tuple[float, float] | None = None
    """The 10th and the 90th percentile of single steps, where a measured block says how much these vary."""
    timeline: tuple[Span, ...] = ()
    """One lane a stage; empty in closed form."""
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens / self.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.gpus

    @property
    def memory_bytes(self) -> int:
        return round(self.memory.total)

    @property
    def limited_by(self) -> str:
        return self.breakdown.limit

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.limit_bytes

    def data(self) -> dict[str, Any]:
        """The answer as JSON holds it."""
        # A layout leaves out what is at its default; here it is whole.
        found = {**msgspec.to_builtins(self), "layout": msgspec.structs.asdict(self.layout)}
        derived = ("tokens_per_s", "tokens_per_s_per_gpu", "memory_bytes", "fits", "limited_by")
        return found | {name: getattr(self, name) for name in derived}
