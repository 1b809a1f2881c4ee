"""What it costs to pick what is sent of a group, and to put together what came: top-k, per byte and per group."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

from backbeat.measure.model.training_step import is_out_of_memory

if TYPE_CHECKING:
    from backbeat.measure.model.training_step import Training

DENSITY = 0.01
_FEWEST_ELEMENTS = 2**20
_SMALL_ELEMENTS = 2**17
"""Few, but enough for a message of the usual format."""
_MOST_ELEMENTS = {"cpu": 2**22}
_MOST_ELEMENTS_ELSEWHERE = 2**24
_WARMUP, _REPEATS = 3, 7
# The host queues this much ahead, so that the device's time is taken and not the host's.
_HEAD_START_S = 4e-3


class Compression(NamedTuple):
    """What compression a group costs: so much a byte, and so much however small it is."""

    s_per_byte: float
    s_per_bucket: float


def compression_of(training: Training, gradient_bytes: int) -> Compression | None:
    """Of groups up to the size of all gradients together; None where the device has no memory left."""
    most = _MOST_ELEMENTS.get(training.device.type, _MOST_ELEMENTS_ELSEWHERE)
    elements = min(max(gradient_bytes // 4, _FEWEST_ELEMENTS), most)
    try:
        # The host's pace is measured where it decides, the device's where it does not.
        host_s, _ = _samples(training, _SMALL_ELEMENTS, head_start=False)
        _, floor_s = _samples(training, _SMALL_ELEMENTS, head_start=True)
        _, whole_s = _samples(training, elements, head_start=True)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    rate = max(whole_s - floor_s, 0.0) / (4 * (elements - _SMALL_ELEMENTS))
    return Compression(float(f"{rate:.3g}"), float(f"{max(host_s, floor_s):.3g}"))


def _samples(training: Training, elements: int, *, head_start: bool) -> tuple[float, float]:
    """Median seconds of the host, to submit a group of this size, and of the device."""
    # Here, since most who measure never send sparse gradients.
    from backbeat.runtime.compressed.cuda_graphs import Recordings
    from backbeat.runtime.compressed.residual import Residual, accumulate, add_all
    from backbeat.runtime.compressed.topk import TopK

    clock = training.clock
    clock.reserve(2 * (_WARMUP + _REPEATS))
    drawn = torch.Generator(training.device).manual_seed(0)
    gradient = torch.randn(elements, device=training.device, generator=drawn)
    residual = Residual(torch.zeros_like(gradient))
    result = torch.empty_like(gradient)
    # The kernels that train on a GPU. On this stream, the default one, they are not recorded: the host's share, which
    # is then submitted launch by launch, is the most that it can be.
    on_host = training.device.type == "cpu"
    compressor = TopK(DENSITY, None if on_host else Recordings())
    marks, submitted = [], []
    with torch.no_grad():
        for _ in range(_WARMUP + _REPEATS):
            if head_start:
                clock.delay(_HEAD_START_S)
            begun, called = clock.mark(), clock.host_s()
            if on_host:
                accumulate([residual.values], [gradient])
            else:
                add_all(residual.values, [residual.values], [gradient])
            compressor.decode(compressor.encode(residual), result, 1.0)
            submitted.append(clock.host_s() - called)
            marks.append((begun, clock.mark()))
    clock.synchronize()
    return median(submitted[_WARMUP:]), median(clock.between(*pair) for pair in marks[_WARMUP:])
