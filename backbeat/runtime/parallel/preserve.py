"""What `parallelize` leaves as it was: it trains copies of the model, restores random generators, and frees memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.measure.model.memory_by_kind import storage_bytes
from backbeat.measure.model.training_step import is_out_of_memory
from backbeat.model import Profile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextlib.contextmanager
def preserved_state(device: torch.device) -> Iterator[None]:
    """Restores the random generators of Python, numpy, torch and the device afterwards, and frees cached memory."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        free(device)


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
    alone = replace(
        held,
        steady_bytes=max(held.steady_bytes - beside, 0),
        peak_bytes=max(held.peak_bytes - beside, 0),
    )
    return replace(profile, memory=alone)


def free(device: torch.device) -> None:
    """Hand back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
