"""Whether memory has room for a copy of the model in training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from backbeat.units import format_bytes

if TYPE_CHECKING:
    from backbeat.model import Profile


def room_for(profile: Profile, device: torch.device) -> str | None:
    """Why there is no memory for a trained copy beside the model; None where there is."""
    if profile.memory is None:
        return None
    need = profile.memory.peak_bytes or 2 * profile.memory.steady_bytes
    have = _free_bytes(device)
    if have is None or need * 1.1 <= have:
        return None
    return f"a copy in training takes {format_bytes(need)}, and {format_bytes(have)} are free"


def _free_bytes(device: torch.device) -> int | None:
    """Memory that this rank may take; None where the machine does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return None if kilobytes is None else kilobytes * 1024 // ranks
