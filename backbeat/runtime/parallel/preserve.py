"""What `parallelize` leaves as it was: it trains copies of the model, restores random generators, and frees memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from backbeat.errors import InputError
from backbeat.measure.model.training_step import is_out_of_memory

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


def free(device: torch.device) -> None:
    """Hand back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
