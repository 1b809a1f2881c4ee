"""One row of an answer: a way on a number of GPUs, with what its prediction alone does not say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from backbeat.answer.ways import OURS as RUNTIME
from backbeat.model.prediction import Prediction
from backbeat.model.rule import by_hand, simplicity

NOISY_STEPS = 0.2
"""Single steps that differ by this share hide what is gained, and are worth a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    prediction: Prediction
    changes: tuple[str, ...] = ()
    """What it changes, unasked, of what is computed or of what the optimizer sees: `compression`, a dtype."""

    def __getattr__(self, name: str) -> Any:
        """A row is its prediction, and more."""
        return getattr(self.prediction, name)

    @property
    def noise(self) -> float:
        """Jitter where it is worth a line: below that, medians of steps tell apart what single steps do not."""
        return self.jitter if self.jitter >= NOISY_STEPS else 0.0

    @property
    def jitter(self) -> float:
        """How much single steps differ: p10 to p90 over the step."""
        edges = self.prediction.jitter_s
        return 0.0 if edges is None or self.prediction.step_s <= 0 else (edges[1] - edges[0]) / self.prediction.step_s

    @property
    def possible(self) -> bool:
        """It fits, or nobody knows."""
        return self.prediction.fits != "no"

    @property
    def seconds(self) -> float:
        """For one sample: rows are compared by it."""
        rate = self.prediction.samples_per_s
        return 1.0 / rate if rate > 0 else float("inf")

    @property
    def peak(self) -> int | None:
        """Bytes of one GPU at its highest."""
        one = self.prediction
        return one.memory.peak_bytes if one.memory is not None else one.peak_bytes

    @property
    def by_hand(self) -> bool:
        return by_hand(self.prediction.way)

    @property
    def simplicity(self) -> tuple[int, ...]:
        one = self.prediction
        own = one.runs_by == RUNTIME
        return simplicity(one.way, one.mesh, communicators=one.communicators, buckets=one.buckets, plan_file=own)

    @property
    def range_s(self) -> tuple[float, float]:
        return self.prediction.range_s or (self.step_s, self.step_s)

    @property
    def gpu_seconds(self) -> float:
        """For one sample."""
        return self.seconds * self.prediction.gpus

    @property
    def limit(self) -> str:
        """What holds it back, by one name for one thing."""
        name = self.prediction.bottleneck
        if name != "memory":
            return name
        return "memory bandwidth" if self.prediction.layout is not None else "recompute"

    def data(self) -> dict[str, Any]:
        """As `backbeat.answer/1` has it, but for the words of its notes."""
        one = self.prediction
        tokens = one.tokens_per_s
        peak = self.peak
        found: dict[str, Any] = {
            "way": one.way,
            "gpus": one.gpus,
            "mesh": dict(one.mesh),
            "framework": one.framework,
            "runs_by": one.runs_by,
            "global_batch": one.global_batch,
            "batch": one.batch,
            "micro_batches": one.micro_batches,
            "recompute": one.recompute,
            "step_s": one.step_s,
            "range_s": list(self.range_s),
            "samples_per_s": one.samples_per_s,
            "tokens_per_s": tokens,
            "tokens_per_s_per_gpu": None if tokens is None else tokens / one.gpus,
            "mfu": one.mfu,
            "parameters": one.parameters,
            "memory": None
            if peak is None
            else {
                "peak_bytes": peak,
                "device_bytes": one.device_bytes,
                "by_kind": {}
                if one.memory is None
                else {kind: round(size) for kind, size in one.memory.by_kind.items()},
            },
            "fits": one.fits,
            "bound_s": one.bound_s,
            "exposed_s": one.exposed_s,
            "limit": self.limit,
            "checked": msgspec.to_builtins(self.checked),
            "notes": [{"kind": note.kind, **note.values} for note in one.notes],
        }
        if one.jitter_s is not None:
            found["jitter_s"] = list(one.jitter_s)
        if one.cost is not None:
            found["cost"] = msgspec.to_builtins(one.cost)
        return found
