"""Whether a way of a profile fits its GPU."""

from __future__ import annotations

from msgspec.structs import replace

from backbeat.cost.accelerators import Accelerator
from backbeat.model import MemoryPlan, Prediction, Profile
from backbeat.model.memory import device_bytes
from backbeat.model.resident import ResidentMemory
from backbeat.model.rule import MEMORY_ERROR, fits
from backbeat.steps.memory_timeline import memory_timeline


def fitted(found: Prediction, profile: Profile, gpu: Accelerator | None, most: int | None) -> Prediction:
    """The prediction with what the GPU has and whether that is enough; `most` is what a GPU may take."""
    limit = most if most is not None else None if gpu is None else device_bytes(gpu)
    peak = found.peak_bytes or _peak(found, profile)
    if limit is None or peak is None:
        return replace(found, device_bytes=limit)
    return replace(found, peak_bytes=peak, device_bytes=limit, fits=fits(peak, limit, MEMORY_ERROR["profile"]))


def _peak(found: Prediction, profile: Profile) -> int | None:
    """Where all is kept, and gradients are held as stock DDP does: in buckets, and beside them until the step ends."""
    memory, plan = profile.memory, found.plan
    if memory is None:
        return None
    resident = ResidentMemory.of(profile, plan, "device", found.workers).total_bytes
    if profile.blocks:
        peak = memory_timeline(profile, MemoryPlan(), plan, workers=found.workers).peak_bytes
    else:
        whole = memory.peak_bytes + profile.total_bytes if memory.peak_bytes else 0
        peak = max(resident + memory.activation_bytes, whole)
    return max(peak, resident + profile.total_bytes)
