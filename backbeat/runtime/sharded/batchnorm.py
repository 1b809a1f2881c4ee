"""BatchNorm in units that are gathered in a lower dtype.

FSDP2 casts parameters and leaves buffers alone, and torch's BatchNorm wants its scale and shift in the dtype of its
running statistics. Where a unit is gathered in a lower dtype, they are cast to that one for each forward: the gather
has rounded them, and this widens them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_CAST = ("weight", "bias")


def keep_statistics_dtype(modules: Iterable[nn.Module], gathered: torch.dtype | None) -> None:
    """Let the BatchNorms among these modules and theirs run, where parameters are gathered in this dtype."""
    for module in modules:
        for norm in module.modules():
            statistics = norm.running_mean if isinstance(norm, _BatchNorm) and norm.affine else None
            # A unit inside this one may have seen to it.
            seen_to = _cast in norm._forward_pre_hooks.values()
            if gathered is None or statistics is None or statistics.dtype == gathered or seen_to:
                continue
            norm.register_forward_pre_hook(_cast)
            norm.register_forward_hook(_uncast, always_call=True)


def _cast(norm: Any, inputs: Any) -> None:
    for name in _CAST:
        # An attribute hides the parameter of its name, which stays as FSDP2 has it.
        norm.__dict__[name] = norm._parameters[name].to(norm.running_mean.dtype)


def _uncast(norm: Any, inputs: Any, outputs: Any) -> None:
    for name in _CAST:
        norm.__dict__.pop(name, None)
