"""Says when training passes its memory budget: at the first steps, and now and then later."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from backbeat.units import format_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from backbeat.model import MemoryPlan

logger = logging.getLogger("backbeat.runtime")

FIRST_STEPS = 10
EVERY = 200


def device_peak(device: torch.device) -> int | None:
    """The most that torch's allocator has held on the device since the process began or the user last reset it. The
    host keeps this number, so nothing waits."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class BudgetWatch:
    """Compares the device's peak with a budget, and warns once."""

    def __init__(self, budget_bytes: int, predicted_bytes: int | None, device: torch.device) -> None:
        self._budget = budget_bytes
        self._predicted = predicted_bytes
        self._device = device
        self._before = device_peak(device)
        """A peak that is still this one came before the model was wrapped, and says nothing about training."""
        self._steps = 0
        self._warned = False

    def after_step(self) -> None:
        self._steps += 1
        if self._warned or (self._steps > FIRST_STEPS and self._steps % EVERY):
            return
        peak = device_peak(self._device)
        if peak is None or peak == self._before or peak <= self._budget:
            return
        self._warned = True
        logger.warning(self._said(peak))

    def _said(self, peak: int) -> str:
        text = (
            f"the memory budget of {format_bytes(self._budget)} is passed: training has taken {format_bytes(peak)} "
            "(torch.cuda.max_memory_allocated() since its last reset)"
        )
        if self._predicted is not None:
            text += f", {format_bytes(self._predicted)} were predicted"
        text += (
            ". Not in a profile are workspaces of convolutions (torch.backends.cudnn.benchmark tries large ones in the "
            "first steps), and whatever else this process keeps on the device."
        )
        if self._predicted is None or peak <= self._predicted:
            return f"{text} Plan again with a smaller --memory"
        more = peak - self._predicted
        if more >= self._budget:
            return f"{text} These alone take more than the budget: look for what is kept besides the model"
        return f"{text} Plan again with --memory {_typed(self._budget - more)}, or with --reserve {_typed(more)}"


def watch_of(
    budget_bytes: int | None, memory: MemoryPlan | None, group: ProcessGroup, device: torch.device
) -> BudgetWatch | None:
    """What watches this budget; None where there is none. All ranks train alike, so rank 0 speaks for them."""
    if budget_bytes is None or dist.get_rank(group) != 0:
        return None
    return BudgetWatch(budget_bytes, memory.peak_bytes if memory is not None else None, device)


def _typed(size: int) -> str:
    """For a command line, to the megabyte."""
    return f"{size // 10**6}MB" if size >= 10**8 else f"{size}B"
