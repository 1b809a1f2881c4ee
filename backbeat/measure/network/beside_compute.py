"""How much longer computation takes beside collectives of this cluster: the real thing, on GPUs.

Each kind of work runs alone and beside collectives in a row (all-reduces, or all-gathers and reduce-scatters), in
turns, on every rank at once. The slowdown is the median over pairs, of the rank that is slowed down most: a synchronous
step waits for it. Nothing of the host counts: launches queue after a spin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

from backbeat.comm.communicators import Communicator
from backbeat.comm.machine import cuda
from backbeat.comm.spin import until
from backbeat.measure.network.bench import max_over_ranks
from backbeat.model.slowdown import Slowdown

_MOST_BYTES, _LONGEST_S = 64 << 20, 10e-3
"""A message has the first of these bytes, or fewer where it would take longer than this: then most of a measurement
would be waiting for the last message to end."""
_SAMPLE_S = 5e-3
_LEAD_CYCLES = 4_000_000
"""Some 2 ms on current GPUs: what the host takes to queue the work."""
_LEAD_S = 4e-3
_PAIRS = 7
_COVERED = 4


def shared_devices(group: Any, device: torch.device) -> bool:
    """Whether two ranks compute on one GPU, as in the lab. Collective."""
    properties = cuda.get_device_properties(device)
    identity = str(getattr(properties, "uuid", None) or f"{properties.name} {device}")
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, identity, group=group)
    return len(set(found)) < len(found)


def measure_slowdown(
    communicator: Communicator,
    device: torch.device,
    seconds_of: Callable[[int], float],
    timeout_s: float,
    *,
    workers: int | None = None,
) -> Slowdown:
    """Collective: every rank calls it alike. `seconds_of` says what a message of so many bytes takes: an all-reduce, or
    with `workers` an all-gather and a reduce-scatter."""
    size = beside_bytes(seconds_of)
    message_s = seconds_of(size)
    message = torch.zeros(size // 4, device=device)
    send = _pairs_of(communicator, message, workers) if workers else lambda: [communicator.all_reduce(message)]
    begin, end, done = (cuda.Event(enable_timing=True) for _ in range(3))

    def seconds(work: Callable[[], object], count: int, messages: int = 0) -> float:
        """Of `count` runs on the current stream, while that many messages pass."""
        # Lines the ranks up: all-reduces last as long as the last rank to join takes.
        communicator.all_reduce(message[:1]).wait()
        # Behind the spin the host is ahead, and the collectives are under way when the work begins.
        sent = [one for _ in range(messages) for one in send()]
        cuda._sleep(_LEAD_CYCLES)
        begin.record()
        for _ in range(count):
            work()
        end.record()
        for one in sent:
            one.wait()
        done.record()
        until(done, timeout_s)
        return float(begin.elapsed_time(end)) * 1e-3

    factors = torch.ones(3, dtype=torch.float64, device=device)
    for index, work in enumerate(_works(device)):
        seconds(work, 3)
        (once_s,) = max_over_ranks(communicator, [seconds(work, 3) / 3], device, timeout_s)
        count = max(1, min(200, round(_SAMPLE_S / once_s)))
        messages = messages_beside(count * once_s, message_s)
        ratios = [seconds(work, count, messages) / alone for _ in range(_PAIRS) if (alone := seconds(work, count)) > 0]
        factors[index] = max(median(ratios), 1.0)
    matmul, attention, memory = max_over_ranks(communicator, factors.tolist(), device, timeout_s)
    return Slowdown(matmul=matmul, attention=attention, memory=memory)


def beside_bytes(seconds_of: Callable[[int], float]) -> int:
    """64 MiB, halved while a message takes longer than 10 ms, down to 1 MiB.

    >>> beside_bytes(lambda size: size / 100e9) >> 20, beside_bytes(lambda size: size / 0.8e9) >> 20
    (64, 4)
    """
    size = _MOST_BYTES
    while size > 1 << 20 and seconds_of(size) > _LONGEST_S:
        size //= 2
    return size


def messages_beside(work_s: float, message_s: float, *, covered: float = _COVERED, lead_s: float = _LEAD_S) -> int:
    """How many messages in a row last for `covered` times what the work beside them takes alone, which begins after
    `lead_s`.

    >>> messages_beside(5e-3, 1e-3)
    25
    """
    return 1 + math.ceil((lead_s + covered * work_s) / max(message_s, 1e-5))


def _pairs_of(communicator: Communicator, message: torch.Tensor, workers: int) -> Callable[[], list[Any]]:
    """An all-gather and a reduce-scatter, as sharded steps send them."""
    each = message.numel() // workers
    whole, shard = message[: each * workers], torch.zeros(each, device=message.device)
    return lambda: [communicator.all_gather(whole, shard), communicator.reduce_scatter(shard, whole)]


def _works(device: torch.device) -> list[Callable[[], object]]:
    """A matrix product, attention and an addition, of the sizes that transformers have."""
    dtype = torch.bfloat16 if cuda.is_bf16_supported() else torch.float16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    left, right = random(8192, 4096), random(4096, 4096)
    product = torch.empty_like(left)
    query, key, value = (random(4, 16, 2048, 128) for _ in range(3))
    total = torch.empty_like(left)
    return [
        lambda: torch.mm(left, right, out=product),
        lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True),
        lambda: torch.add(left, product, out=total),
    ]
