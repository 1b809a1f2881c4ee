"""Device memory of one worker, by kind, against a budget."""

from __future__ import annotations

from dataclasses import dataclass

from backbeat.model import Memory


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
