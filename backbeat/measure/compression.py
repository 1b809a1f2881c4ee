"""What it costs the device to pick what is sent of a group, and to put together what came: top-k, per byte."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import torch

from backbeat.measure.training import is_out_of_memory
from backbeat.model.encoding import Encoding

if TYPE_CHECKING:
    from backbeat.measure.training import Training

DENSITY = 0.01
_FEWEST_ELEMENTS = 2**20
_MOST_ELEMENTS = {"cpu": 2**22}
_MOST_ELEMENTS_ELSEWHERE = 2**24
_WARMUP, _REPEATS = 3, 7
# The host queues this much ahead, so that the device's time is taken and not the host's.
_HEAD_START_S = 4e-3


def compression_s_per_byte(training: Training, gradient_bytes: int) -> float | None:
    """Seconds per byte of gradients in one group of about their size; None where the device has no memory left."""
    most = _MOST_ELEMENTS.get(training.device.type, _MOST_ELEMENTS_ELSEWHERE)
    elements = min(max(gradient_bytes // 4, _FEWEST_ELEMENTS), most)
    try:
        return float(f"{median(_samples(training, elements)) / (4 * elements):.3g}")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def _samples(training: Training, elements: int) -> list[float]:
    # Here, since most who measure never send sparse gradients.
    from backbeat.sparse.exchange import alone
    from backbeat.sparse.residual import Residual
    from backbeat.sparse.topk import TopK

    clock = training.clock
    clock.reserve(2 * (_WARMUP + _REPEATS))
    drawn = torch.Generator(training.device).manual_seed(0)
    gradient = torch.randn(elements, device=training.device, generator=drawn)
    residual = Residual(torch.zeros_like(gradient))
    result = torch.empty_like(gradient)
    compressor = TopK(Encoding(kind="topk", density=DENSITY), rank=0, ranks=1)
    marks = []
    with torch.no_grad():
        for step in range(_WARMUP + _REPEATS):
            clock.delay(_HEAD_START_S)
            begun = clock.mark()
            residual.values.add_(gradient)
            alone(compressor.exchange(residual, step=step, scale=1.0))(result)
            compressor.forget()
            marks.append((begun, clock.mark()))
    clock.synchronize()
    return [clock.between(*pair) for pair in marks[_WARMUP:]]
