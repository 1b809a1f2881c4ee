"""Device memory of one worker, by kind, against a budget."""

from __future__ import annotations

from dataclasses import dataclass

from backbeat.model import Memory

KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")


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
    counted = (
        memory.parameter_bytes,
        memory.gradient_bytes,
        memory.optimizer_bytes,
        memory.buffer_bytes,
        memory.activation_bytes,
    )
    kinds = [(kind, size) for kind, size in zip(KINDS, counted, strict=True) if size > 0]
    beyond = memory.peak_bytes - sum(counted)
    if beyond > 0:
        kinds.append(("workspace", beyond))
    return MemoryUse(kinds=tuple(kinds), peak_bytes=memory.peak_bytes or sum(counted), budget_bytes=budget_bytes)
