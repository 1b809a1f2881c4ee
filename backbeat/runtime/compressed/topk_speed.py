"""What top-k takes on a device, for profiles: its kernels timed as training launches them."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import torch

from backbeat.measure.model.training_step import Training, is_out_of_memory
from backbeat.runtime.compressed.cuda_graphs import CudaGraphs
from backbeat.runtime.compressed.residual import accumulate, add_all
from backbeat.runtime.compressed.topk import TopK

_FEWEST_ELEMENTS = 2**20
_SMALL_ELEMENTS = 2**17
"""A small bucket whose message still has the format of a large one's."""
_WARMUP, _REPEATS = 3, 7
_HEAD_START_S = 4e-3
"""The device spins so long before each sample, so that the host is ahead and the device's own time is measured."""


class TopKCost(NamedTuple):
    """The cost of compressing a bucket: `s_per_bucket` plus `s_per_byte` for each byte of its gradients."""

    s_per_byte: float
    s_per_bucket: float


def measure_topk(training: Training, gradient_bytes: int) -> TopKCost | None:
    """Measure top-k on the training's device, on buckets of up to `gradient_bytes`; None where memory runs out."""
    most = 2**22 if training.device.type == "cpu" else 2**24
    elements = min(max(gradient_bytes // 4, _FEWEST_ELEMENTS), most)
    try:
        # With a head start the device alone is timed, without one the host, which launches the kernels.
        host_s, _ = _samples(training, _SMALL_ELEMENTS, head_start=False)
        _, small_s = _samples(training, _SMALL_ELEMENTS, head_start=True)
        _, large_s = _samples(training, elements, head_start=True)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    s_per_byte = max(large_s - small_s, 0.0) / (4 * (elements - _SMALL_ELEMENTS))
    return TopKCost(float(f"{s_per_byte:.3g}"), float(f"{max(host_s, small_s):.3g}"))


def _samples(training: Training, elements: int, *, head_start: bool) -> tuple[float, float]:
    """Median seconds that the host takes to launch a bucket of this size, and that the device takes to run it."""
    clock = training.clock
    clock.reserve(2 * (_WARMUP + _REPEATS))
    random = torch.Generator(training.device).manual_seed(0)
    gradient = torch.randn(elements, device=training.device, generator=random)
    residual = torch.zeros_like(gradient)
    result = torch.empty_like(gradient)
    # The same kernels as in training, but launched one by one: the default stream captures no graph. So the host takes
    # as long as it ever does.
    on_host = training.device.type == "cpu"
    compressor = TopK(0.01, None if on_host else CudaGraphs())
    marks, launch_s = [], []
    with torch.no_grad():
        for _ in range(_WARMUP + _REPEATS):
            if head_start:
                clock.delay(_HEAD_START_S)
            begun, called = clock.mark(), clock.host_s()
            if on_host:
                accumulate([residual], [gradient])
            else:
                add_all(residual, [residual], [gradient])
            compressor.decode(compressor.encode(residual), result, 1.0)
            launch_s.append(clock.host_s() - called)
            marks.append((begun, clock.mark()))
    clock.synchronize()
    return median(launch_s[_WARMUP:]), median(clock.between(*pair) for pair in marks[_WARMUP:])
