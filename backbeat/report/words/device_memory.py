"""Whether one worker's iteration fits the device it is to run on."""

from __future__ import annotations

from dataclasses import dataclass

from backbeat.cost.accelerators import Accelerator, accelerator
from backbeat.model import Memory, MemoryPlan, Plan, Profile
from backbeat.simulate.memory_timeline import memory_timeline
from backbeat.simulate.resident_memory import ResidentMemory
from backbeat.simulate.sharded_memory import sharded_memory
from backbeat.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    peak_bytes: int
    device: str
    device_bytes: int
    optimizer: str | None = None
    """What the profile's memory was measured with."""

    @classmethod
    def of(
        cls, peak_bytes: int, device: Accelerator, budget_bytes: int | None, optimizer: str | None = None
    ) -> DeviceFit:
        """A budget takes the place of the device's memory."""
        return cls(
            peak_bytes=peak_bytes,
            device=device.name if budget_bytes is None else f"{device.name} (as budgeted)",
            device_bytes=device.memory_bytes if budget_bytes is None else budget_bytes,
            optimizer=optimizer,
        )

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.device_bytes

    def __str__(self) -> str:
        if self.fits:
            whole = format_bytes(self.device_bytes)
            return f"{format_bytes(self.peak_bytes)} of the {whole} of one {self.device}: fits{self._given}"
        return self.too_much(": does not fit")

    def too_much(self, why: str = "") -> str:
        """For what does not fit: what it needs, and what to do."""
        peak, whole = format_bytes(self.peak_bytes), format_bytes(self.device_bytes)
        advice = "shard it (FSDP), or keep less (plan --memory)"
        return f"{peak} on one {self.device} of {whole}{why}{self._given}; {advice}"

    @property
    def _given(self) -> str:
        return f" (optimizer: {self.optimizer})" if self.optimizer else ""


def device_fit(
    profile: Profile, plan: Plan | None = None, workers: int | None = None, *, budget_bytes: int | None = None
) -> DeviceFit | None:
    """The peak against the device's memory, or a budget of it; None where the profile or the table of accelerators does
    not say.

    Without a memory plan all is kept, and gradients are held as stock DDP does: in buckets, and beside them until the
    step ends.
    """
    device = accelerator(profile.device)
    if profile.memory is None or device is None:
        return None
    return DeviceFit.of(_peak(profile, profile.memory, plan, workers), device, budget_bytes, profile.optimizer)


def _peak(profile: Profile, measured: Memory, plan: Plan | None, workers: int | None) -> int:
    if plan is not None and plan.sharding is not None and (held := sharded_memory(profile, plan)) is not None:
        return held.total_bytes
    memory = plan.memory if plan is not None else None
    resident = ResidentMemory.of(profile, plan, memory.residuals if memory else "device", workers).total_bytes
    if profile.blocks:
        peak = memory_timeline(profile, memory or MemoryPlan(), plan, workers=workers).peak_bytes
    else:
        whole = measured.peak_bytes + profile.total_bytes if measured.peak_bytes else 0
        peak = max(resident + measured.activation_bytes, whole)
    return peak if memory is not None else max(peak, resident + profile.total_bytes)
