"""Reading the ranks' word one step late, where the host should not wait for the device.

The word on a step is a few numbers behind its last group. They are on the device when the step ends, and the host
learns them when the next round opens. Until then a guard stands for it: on the device, in the stream's own order, the
numbers are compared with what they must be, and all gradients become NaN if one differs. So the sum of different steps,
or one that lacks a rank's part, is never seen as a gradient; the named error follows with the next backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from backbeat.runtime.reduce.status_layout import STAMPS

if TYPE_CHECKING:
    from backbeat.runtime.reduce.status_layout import Ledger

DEVICES = {"cuda"}
"""Kinds of device whose word is read late."""


class Deferral:
    """The word on one step, on its way to the host."""

    def __init__(self, ledger: Ledger, sums: Sequence[torch.Tensor]) -> None:
        device = ledger.device
        layout = ledger.layout
        # Late gradients and stamps must be as expected. That another rank did not use a parameter is no fault: its
        # share was zero, and since this rank used it the mean is right.
        self._told = slice(1, layout.used_at)
        self._expected = [row[self._told].to(device) for row in ledger.sums]
        kinds = {(tensor.dtype, tensor.device) for tensor in sums}
        self._sums = [(*kind, [t for t in sums if (t.dtype, t.device) == kind]) for kind in sorted(kinds, key=str)]
        self._cuda = device.type == "cuda"
        self._host = torch.empty(layout.length, dtype=ledger.dtype, pin_memory=self._cuda)
        self._event: Any = torch.cuda.Event() if self._cuda else None
        self._step: int | None = None

    def put_off(self, numbers: torch.Tensor, step: int) -> None:
        """Send the numbers to the host without waiting for them, and guard the sums meanwhile."""
        self._host.copy_(numbers, non_blocking=True)
        if self._cuda:
            self._event.record()
        self._step = step
        right = (numbers[self._told] == self._expected[step % STAMPS]).all()
        # 1 / 1, or 0 / 0.
        factor = torch.div(right, right)
        for dtype, device, sums in self._sums:
            torch._foreach_mul_(sums, factor.to(device=device, dtype=dtype))

    def take(self) -> tuple[int, torch.Tensor] | None:
        """The step whose word is outstanding, and its numbers; waits for them."""
        step, self._step = self._step, None
        if step is None:
            return None
        if self._cuda:
            self._event.synchronize()
        return step, self._host
