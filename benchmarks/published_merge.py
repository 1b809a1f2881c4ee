"""MG-WFBP's merge written out as the paper states it: after every merge, every communication start is computed again.

Layers 0..L-1 stand in forward order; backward runs from the last to the first. tb is backward time, taub its start, tc
communication time, tauc its start. O(L²): the side that `backbeat.planners` is compared with, for time and for result.
"""

from __future__ import annotations


def merge(ready: list[float], sizes: list[float], alpha: float, beta: float) -> list[int]:
    """Where buckets end in ready order, for gradients given in ready order."""
    count = len(ready)
    layer_ready, layer_bytes = ready[::-1], sizes[::-1]
    tc = [_time(size, alpha, beta) for size in layer_bytes]
    tauc = _starts(layer_ready, tc)
    merged = [False] * count
    for layer in range(count - 1, 0, -1):
        following = layer_ready[layer - 1]
        if following >= tauc[layer] + tc[layer]:
            continue
        if tauc[layer] > following or following - tauc[layer] < alpha:
            layer_bytes[layer - 1] += layer_bytes[layer]
            layer_bytes[layer] = 0.0
            tc[layer] = 0.0
            tc[layer - 1] = _time(layer_bytes[layer - 1], alpha, beta)
            tauc = _starts(layer_ready, tc)
            merged[layer] = True
    return [count - layer for layer in range(count - 1, -1, -1) if not merged[layer]]


def _starts(layer_ready: list[float], tc: list[float]) -> list[float]:
    count = len(tc)
    tauc = [0.0] * count
    tauc[count - 1] = layer_ready[count - 1]
    for layer in range(count - 2, -1, -1):
        tauc[layer] = max(tauc[layer + 1] + tc[layer + 1], layer_ready[layer])
    return tauc


def _time(size: float, alpha: float, beta: float) -> float:
    return alpha + beta * size if size > 0 else 0.0
