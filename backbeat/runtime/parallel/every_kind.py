"""What works alike whatever plan a model runs: gradient accumulation, and its whole state in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

from backbeat.errors import InputError
from backbeat.runtime.sharded.torch_fsdp import sends_gradients
from backbeat.runtime.torch_internals import TorchDDP
from backbeat.units import first_few


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Forward and backward inside keep their gradients on this rank; the next ones outside send the sum.

        with nullcontext() if last else no_sync(model):
            loss(model, batch).backward()

    For wrapped models it is torch's `no_sync`, for units `set_requires_gradient_sync`; also where these are parts of
    the model given, as in a LightningModule. Units then keep whole gradients in memory, which a plan with
    `gradient_sync="every"` does not count on.
    """
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, TorchDDP):
                stack.enter_context(module.no_sync())
            elif isinstance(module, FSDPModule):
                reduces, all_reduces = sends_gradients(module)
                stack.callback(module.set_requires_all_reduce, all_reduces, recurse=False)
                stack.callback(module.set_requires_gradient_sync, reduces, recurse=False)
                module.set_requires_gradient_sync(False, recurse=False)
        yield


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of the model as it was before sharding or wrapping, on the host; empty on every rank but rank 0.

    Every rank calls it. Names, shapes and dtypes are the plain model's, buffers are rank 0's: `torch.save` it, and
    `load_state_dict` takes it in a model that is not sharded.
    """
    return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a plain state dict into a parallel model of any kind, on any number of ranks.

    Every rank calls it; rank 0's counts, the others may give an empty one. Names that do not fit raise on every rank
    before anything is loaded, unless not `strict`; so do shapes in any case.
    """
    given: list[Any] = [{name: _shape(value) for name, value in state.items()}]
    dist.broadcast_object_list(given)
    shapes = given[0]
    own = get_model_state_dict(model)
    if strict:
        missing = [name for name in own if name not in shapes]
        unknown = [name for name in shapes if name not in own]
        if missing or unknown:
            raise InputError(
                f"the state dict does not fit the model: missing {_few(missing)}, unknown {_few(unknown)}; "
                "give strict=False to load what fits"
            )
    # Torch copies shard by shard: it would repeat a dimension of one, or raise on some ranks only.
    others = [
        f"{name} is {shapes[name]} and the model's is {_shape(value)}"
        for name, value in own.items()
        if isinstance(value, torch.Tensor) and name in shapes and shapes[name] != _shape(value)
    ]
    if others:
        raise InputError(f"the state dict does not fit the model: {_few(others)}; load one of the same shapes")
    # torch takes the names of wrapped models from rank 0's alone, and finds the others' unknown.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    set_model_state_dict(model, dict(state) if dist.get_rank() == 0 else {}, options=options)


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _few(names: list[str]) -> str:
    return first_few(names) or "nothing"
