"""Device memory of one worker by kind: at its peak or over a sharded step, against a budget or what the device has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backbeat.model import Memory
from backbeat.simulate.sharded_levels import MemoryLevel

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
class MemoryUse:
    kinds: tuple[tuple[str, int], ...]
    """(kind, bytes), present ones only; `workspace` is what the peak holds beyond all kinds that were counted."""
    peak_bytes: int
    budget_bytes: int | None

    @property
    def fits(self) -> bool | None:
        """Whether the peak stays within the budget; None without one."""
        return None if self.budget_bytes is None else self.peak_bytes <= self.budget_bytes


def memory_use(memory: Memory, budget_bytes: int | None = None) -> MemoryUse:
    counted = {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
        "buffers": memory.buffer_bytes,
        "activations": memory.activation_bytes,
    }
    known = sum(counted.values())
    kinds = {**counted, "workspace": memory.peak_bytes - known}
    present = tuple((kind, size) for kind, size in kinds.items() if size > 0)
    return MemoryUse(kinds=present, peak_bytes=memory.peak_bytes or known, budget_bytes=budget_bytes)


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
