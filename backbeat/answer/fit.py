"""Whether a way of a profile fits its GPU."""

from __future__ import annotations

from msgspec.structs import replace

from backbeat.model import Prediction
from backbeat.model.accelerator import Accelerator
from backbeat.model.gpu_memory import device_bytes, fitting


def fitted(found: Prediction, known: str, gpu: Accelerator | None, most: int | None) -> Prediction:
    """The prediction with what the GPU has for it and whether that is enough; `most` is what a GPU may take. `known`:
    its `profile` or its `shape`."""
    limit = most if most is not None else None if gpu is None else device_bytes(gpu)
    return replace(found, device_bytes=limit, fits=fitting(found.memory, limit, known))
