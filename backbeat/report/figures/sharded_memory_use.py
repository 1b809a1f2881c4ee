"""Device memory over one sharded step, by kind, against what the device has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backbeat.simulate.sharded_course import MemoryLevel

SHARDED_KINDS = {
    "parameter": "parameter shards",
    "optimizer": "optimizer state shards",
    "other": "buffers, batch, workspaces",
    "gradient": "gradient shards",
    "activation": "activations",
    "gathered": "gathered parameters",
    "gather_buffer": "all-gather buffers",
    "whole_gradient": "whole gradients",
    "scatter_input": "reduce-scatter inputs",
}
"""From what is there all the time to what comes and goes; the order in which they are piled up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    label: str
    times_s: tuple[float, ...]
    """Corners of the stairs: a level holds from one to the next, two corners each."""
    where: tuple[str, ...]
    kinds: tuple[tuple[str, tuple[int, ...]], ...]
    """(words, bytes at every corner), present ones only."""
    peak_bytes: int
    peak_s: float
    limit_bytes: int | None


def step_memory(label: str, levels: Sequence[MemoryLevel], limit_bytes: int | None = None) -> StepMemory:
    """The levels as stairs."""
    highest = max(levels, key=lambda level: level.total_bytes)
    corners = [(moment, level) for level in levels for moment in (level.start_s, level.end_s)]
    return StepMemory(
        label=label,
        times_s=tuple(moment for moment, _ in corners),
        where=tuple(f"{level.phase} of {level.where}" for _, level in corners),
        kinds=tuple(
            (words, tuple(level.held[kind] for _, level in corners))
            for kind, words in SHARDED_KINDS.items()
            if any(level.held[kind] for level in levels)
        ),
        peak_bytes=highest.total_bytes,
        peak_s=(highest.start_s + highest.end_s) / 2,
        limit_bytes=limit_bytes,
    )
