"""gloo as communicators need it: one worker thread each, shared devices, a reduce-scatter with the bytes of one.

Gloo's own `reduce_scatter` is an all-reduce of which each rank keeps its part: on 2 and on 4 ranks (torch 2.13) it
moves as many bytes as the all-reduce. Here each rank sends every other rank that one's part and adds up what it
receives, which moves (N - 1)/N of the message, as a ring's reduce-scatter does. It takes a second buffer of the
message's size. Half of the bytes is not always half of the time: what it takes, calibration says.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MOST_COMMUNICATORS = 64

_gloo: Any = getattr(dist, "ProcessGroupGloo", None)


def make_gloo(store: Any, rank: int, size: int, timeout: timedelta, devices: list[Any]) -> Any:
    """A gloo process group with one worker thread; torch's own have two, which run two collectives at once."""
    options = _gloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = devices
    group = _gloo(store, rank, size, options)
    # A rank that is connected and closes again fails one that is still connecting.
    group.barrier().wait()
    return group


def gloo_devices(process_group: Any, device: torch.device) -> list[Any]:
    """The process group's own. Each device has a thread that spins while bytes wait for a receive to be posted. One
    more for every communicator would take the cores from the threads that post receives."""
    owned = getattr(getattr(process_group._get_backend(device), "options", None), "_devices", None)
    if owned:
        return list(owned)
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [_gloo.create_device(interface=name) for name in interfaces] or [_gloo.create_default_device()]


def settle_gloo() -> bool:
    """Let the threads of this process's gloo sockets run only when a core is free. False where that is not possible.

    A gloo socket thread spins while bytes wait for a receive that the worker thread has yet to post. Where ranks have
    fewer than three cores each, it spins on the core that the worker thread needs, and one message in four loses a
    scheduler slice of 3 to 4 ms. This takes that out of a measurement. It is for ranks whose computation leaves cores
    idle (a lab that sleeps it): beside threads that compute all the time, the socket threads would hardly ever run.
    """
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/comm") as file:
                if file.read().startswith("gloo_tcp_loop"):
                    os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):
        return False
    return True


def reduce_scatter(group: Any, shard: torch.Tensor, whole: torch.Tensor) -> Summed:
    """Sum `whole` over the ranks and leave this rank's part in `shard`; returns at once."""
    parts = torch.empty_like(whole)
    return Summed(group.alltoall_base(parts, whole, [], []), parts.view(group.size(), shard.numel()), shard)


class Summed:
    """A reduce-scatter on its way; the sum is made by the thread that received the last part."""

    def __init__(self, work: Any, parts: torch.Tensor, shard: torch.Tensor) -> None:
        def add(done: Any) -> torch.Tensor:
            done.wait()
            return torch.sum(parts, dim=0, out=shard)

        self._future = work.get_future().then(add)

    def wait(self) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Any:
        return self._future
