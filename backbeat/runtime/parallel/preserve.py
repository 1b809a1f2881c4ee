"""What `parallelize` leaves as it was: it trains copies of the model where memory has room, puts back what the loss
reaches besides, restores random generators, and frees memory."""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from backbeat.errors import InputError
from backbeat.measure.model.inputs import kept_random
from backbeat.measure.model.memory_by_kind import storage_bytes
from backbeat.measure.model.training_step import Loss, is_out_of_memory, release
from backbeat.model import Profile
from backbeat.runtime.parallel.kept_state import KeptState
from backbeat.units import format_bytes


@contextlib.contextmanager
def preserved_state(model: nn.Module, loss: Loss, batch: Any, device: torch.device) -> Iterator[Loss]:
    """Yields the loss to call. Puts back afterwards what `loss(model, batch)` reaches besides the model, and the random
    generators of Python, numpy, torch and the device; frees cached memory."""
    python, numpy = random.getstate(), np.random.get_state()
    kept = KeptState(loss, batch)
    kept.warn(model)
    try:
        with kept_random(device):
            yield kept.loss
    finally:
        kept.put_back()
        random.setstate(python)
        np.random.set_state(numpy)
        release(device)


def copy_of(model: nn.Module) -> nn.Module:
    """A copy to train, without gradients."""
    try:
        made = copy.deepcopy(model)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"plans are tried on copies, and copy.deepcopy(model) raises {type(error).__name__}: {error}; give the "
            "model without what cannot be copied, or a plan"
        ) from error
    made.zero_grad(set_to_none=True)
    return made


def without_original(profile: Profile, model: nn.Module) -> Profile:
    """The profile of a copy as if `model`, which was on the same GPU meanwhile, had not been there."""
    held = profile.memory
    beside = storage_bytes(one for one in (*model.parameters(), *model.buffers()) if one.device.type == "cuda")
    if held is None or not beside:
        return profile
    steady, peak = (max(one - beside, 0) for one in (held.steady_bytes, held.peak_bytes))
    return replace(profile, memory=replace(held, steady_bytes=steady, peak_bytes=peak))


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
