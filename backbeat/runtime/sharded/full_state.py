"""A parallel model's whole state, in one call: to save as a plain file, or to load from one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of the model as it was before sharding or wrapping, on the host; empty on every rank but rank 0.

    Every rank calls it. Names, shapes and dtypes are the plain model's, buffers are rank 0's: `torch.save` it, and
    `load_state_dict` takes it in a model that is not sharded.
    """
    return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a plain state dict into a parallel model of any kind, on any number of ranks.

    Every rank calls it; rank 0's counts, the others may give an empty one.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # torch takes the names of wrapped models from rank 0's alone, and finds the others' unknown.
    set_model_state_dict(model, dict(state) if dist.get_rank() == 0 else {}, options=options)
