"""Gradient accumulation, whatever plan a model runs.

with nullcontext() if last else no_sync(model):
    loss(model, batch).backward()
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

from backbeat.runtime.reduce.settings import TorchDDP
from backbeat.runtime.sharded.torch_fsdp import sends_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Forward and backward inside keep their gradients on this rank; the next ones outside send the sum.

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
