"""How fast a device and its host copy to each other."""

from __future__ import annotations

from statistics import median

import torch

from backbeat.comm.clock import Clock
from backbeat.model import HostLink

_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}
_COPIES = 3


def measure_host_link(device: torch.device, clock: Clock) -> HostLink:
    """Rates of copies to and from pinned memory of the host (on a CPU, within memory), one direction at a time."""
    size = _BYTES.get(device.type, 16 << 20)
    host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    here = torch.empty(size, dtype=torch.uint8, device=device)
    rates = []
    for target, source in ((host, here), (here, host)):
        seconds = []
        for _ in range(_COPIES + 1):
            first = clock.mark()
            target.copy_(source, non_blocking=True)
            last = clock.mark()
            clock.synchronize()
            seconds.append(clock.between(first, last))
        # The first touches the pages.
        rates.append(size / max(median(seconds[1:]), 1e-9))
    return HostLink(to_host_bytes_per_s=round(rates[0]), to_device_bytes_per_s=round(rates[1]))
