"""One message timed on the job's own link."""

from __future__ import annotations

import math
import time

import torch
from torch import nn

from backbeat.comm.agreement import RankStore
from backbeat.comm.clock import clock_for

LEAST_BYTES, MOST_BYTES = 2**20, 16 * 2**20
PROBE_S = 1.0
_AT_ONCE = 20


def probe_bytes(ranks: RankStore, model: nn.Module) -> int:
    """How large a message shows the link's rate.

    On gloo 1 MiB takes its bytes over that rate, and larger messages are disturbed more often. NCCL's links are so fast
    that it would be latency alone: the message is as large as the model, within limits.
    """
    if ranks.communicators.backend != "nccl":
        return LEAST_BYTES
    trained = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    return min(max(trained, LEAST_BYTES), MOST_BYTES)


def message_s(ranks: RankStore, size: int, limit_s: float = PROBE_S) -> float:
    """Seconds of a message on the slowest rank, the quickest of those sent within the limit: what disturbs one, such as
    a busy host, makes it slower. The same on every rank, which all call it."""
    clock, communicator = clock_for(ranks.device), ranks.communicators[0]
    message = torch.zeros(size // 4, device=ranks.device)
    communicator.all_reduce(message).wait()
    began, quickest, over = time.monotonic(), math.inf, False
    while not over:
        clock.reserve(2 * _AT_ONCE)
        marks = []
        for _ in range(_AT_ONCE):
            begin = clock.mark()
            communicator.all_reduce(message).wait()
            marks.append((begin, clock.mark()))
        clock.synchronize()
        found = ranks.gather([time.monotonic() - began > limit_s, *(clock.between(*pair) for pair in marks)])
        over = found[0][0]
        quickest = min(quickest, *(max(times) for times in zip(*(seconds for _, *seconds in found), strict=True)))
    return quickest
