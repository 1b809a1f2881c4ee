"""Closed forms of the collective algorithms: how latency and traffic grow with the number of workers.

A collective of M bytes on N workers takes  steps(N)·hop + traffic(N)·M / bandwidth.  `M` is the whole vector: what
each worker holds after an all-reduce or all-gather, or before a reduce-scatter.

| | steps | traffic |
|---|---|---|
| ring all-reduce | 2(N-1) | 2(N-1)/N |
| double binary tree all-reduce | 2·log2 N | 2 |
| halving-doubling all-reduce | 2·log2 N | 2(N-1)/N |
| ring all-gather, reduce-scatter | N-1 | (N-1)/N |
| halving-doubling of those | log2 N | (N-1)/N |
| broadcast, pipelined ring / tree | N-1 / log2 N | 1 |

A tree sends every byte up and down, whatever N is; the two trees each carry half, so that all links work.
"""

from __future__ import annotations

import math
from typing import Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
Shape = Literal["ring", "tree", "halving-doubling"]


def steps(collective: Collective, shape: Shape, workers: int) -> float:
    """Message latencies in a row."""
    if workers <= 1:
        return 0.0
    one_way = float(workers - 1) if shape == "ring" else math.log2(workers)
    return 2 * one_way if collective == "all_reduce" else one_way


def traffic(collective: Collective, shape: Shape, workers: int) -> float:
    """Bytes through the busiest link per byte of the vector."""
    if workers <= 1:
        return 0.0
    if collective == "broadcast":
        return 1.0
    one_way = 1.0 if shape == "tree" else (workers - 1) / workers
    return 2 * one_way if collective == "all_reduce" else one_way


def seconds(
    collective: Collective, shape: Shape, workers: int, size: float, *, hop_s: float, bits_per_s: float
) -> float:
    """Time from a link's latency and bandwidth.

    Physical check of 10 GbE at 9.43 Gbit/s on 8 workers, seconds per byte:

    >>> round(seconds("all_reduce", "ring", 8, 1, hop_s=0, bits_per_s=9.43e9), 12)
    1.485e-09
    """
    return steps(collective, shape, workers) * hop_s + traffic(collective, shape, workers) * size * 8 / bits_per_s


def bus_bandwidth(collective: Collective, workers: int, size: float, time_s: float) -> float:
    """Bits per second through the busiest link, as nccl-tests defines it (ring traffic)."""
    return traffic(collective, "ring", workers) * size * 8 / time_s if time_s > 0 else 0.0
