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
| tree of those (NCCL's PAT) | log2 N | 1 |
| broadcast, pipelined ring / tree | N-1 / log2 N | 1 |
| NVLS all-reduce (NVLink SHARP, inside a node) | 2 | (N+1)/N |
| SHARP all-reduce (InfiniBand switches, across nodes) | 1 | 1 |

A tree sends every byte up and down, whatever N is; the two trees each carry half, so that all links work.

With NVLS the NVSwitch adds: a GPU's link carries its whole vector to the switch, its share 1/N of the sums back to it,
that share out again, and every share in; 1 + 1/N each way. On 8 H100 NCCL's ring reaches 370 GB/s of bus bandwidth and
NVLS 480 (github.com/NVIDIA/nccl-tests/issues/212); 5 to 8 GPUs with NVLS all come to 307 to 310 GB/s on the link by
this form (github.com/NVIDIA/nccl/issues/1455). With SHARP a node sends its vector up once and receives the sum once;
NCCL's own model counts one network latency for it, whatever the number of nodes (CollNet in its src/graph/tuning.cc).
Neither changes what an all-gather, a reduce-scatter or a broadcast does: these are rings.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Shape = Literal["ring", "tree", "halving-doubling", "nvls", "sharp"]


def steps(collective: Collective, shape: Shape, workers: int) -> float:
    """Message latencies in a row."""
    if workers <= 1:
        return 0.0
    if collective == "all_reduce" and shape in ("nvls", "sharp"):
        return 2.0 if shape == "nvls" else 1.0
    one_way = math.log2(workers) if shape in ("tree", "halving-doubling") else workers - 1.0
    return 2 * one_way if collective == "all_reduce" else one_way


def traffic(collective: Collective, shape: Shape, workers: int) -> float:
    """Bytes through the busiest link per byte of the vector."""
    if workers <= 1:
        return 0.0
    if collective == "broadcast":
        return 1.0
    if collective == "all_reduce" and shape in ("nvls", "sharp"):
        return 1.0 if shape == "sharp" else (workers + 1) / workers
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
