"""gloo as communicators need it: one worker thread each, shared devices."""

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
