"""A layout's step, put together: stages, their pipeline, and what replicas add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backbeat.model.layout import Layout
from backbeat.model.prediction import Span
from backbeat.steps.pipeline import PipelineRun
from backbeat.steps.replicas import ReplicaTimes
from backbeat.steps.stage_graph import StageTimes, causes_added

_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}


@dataclass(frozen=True)
class PipelineStep:
    """A step of one pipeline."""

    stages: Sequence[StageTimes]
    """One micro-batch through all chunks of each."""
    passes: PipelineRun
    afters: Sequence[ReplicaTimes]
    update_s: float
    gather_s: float
    idle_share: float
    """Of the passes' time, what the average stage does nothing in."""

    @property
    def reduced_s(self) -> float:
        """All stages wait for the norm of all gradients before they update."""
        ends = zip(self.passes.end_s, self.afters, strict=True)
        return max(end + after.reduce.seconds for end, after in ends)

    @property
    def step_s(self) -> float:
        return self.reduced_s + self.update_s + self.gather_s

    def spans(self) -> tuple[Span, ...]:
        passes, update, gather = self.passes, self.update_s, self.gather_s
        if not passes.performed:
            return ()
        spans = []
        for stage, (kind, micro_batch, chunk), start_s, end_s in passes.performed:
            name = f"{_NAMES[kind]} {micro_batch}" + (f" chunk {chunk}" if chunk else "")
            spans.append(Span(f"stage {stage}", name, start_s, end_s))
        end = self.step_s - gather
        for stage, (done, after) in enumerate(zip(passes.end_s, self.afters, strict=True)):
            if after.reduce.seconds:
                spans.append(Span(f"stage {stage}", "reduce gradients", done, done + after.reduce.seconds))
            spans.append(Span(f"stage {stage}", "update", end - update, end))
            if gather:
                spans.append(Span(f"stage {stage}", "gather parameters", end, self.step_s))
        return tuple(spans)

    def parts(self, layout: Layout, count: int) -> dict[str, float]:
        """Where the step of so many micro-batches goes, in the stage that has most to do."""
        passes = self.passes
        busiest = max(self.stages, key=lambda each: sum(each.causes.values()))
        known_s = sum(busiest.causes.values())
        last = max(range(layout.pp), key=lambda stage: passes.end_s[stage] + self.afters[stage].reduce.seconds)
        reducing = self.reduced_s - passes.seconds
        slower = min(self.afters[last].reduce.slower_s, reducing)
        gather = max(self.afters, key=lambda each: each.gather.seconds).gather
        return causes_added(
            busiest.times(count).causes,
            {
                "contention": slower + gather.slower_s,
                "parameters": count * (busiest.total_s - known_s) if layout.zero >= 2 else 0.0,
                "bubble": max(0.0, passes.seconds - count * busiest.total_s) if layout.pp > 1 else 0.0,
                "reduce": reducing - slower,
                "update": self.update_s,
                "gather": self.gather_s - gather.slower_s,
            },
        )
