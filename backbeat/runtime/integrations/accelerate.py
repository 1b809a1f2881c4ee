"""Accelerate and the Hugging Face Trainer: both wrap the model themselves, so the wrapper is exchanged while they do.

from backbeat.runtime.integrations.accelerate import planned

with planned(plan="auto"):
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)   # or: trainer.train()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from backbeat.runtime.reduce.torch_ddp import TorchDDP
from backbeat.runtime.reduce.wrapper import DistributedDataParallel


@contextmanager
def planned(**options: Any) -> Iterator[type[DistributedDataParallel]]:
    """Within it `torch.nn.parallel.DistributedDataParallel` is backbeat's, with these options.

    A class and not a function, since the frameworks ask `isinstance` of it as well; models wrapped by torch's own class
    before still count as instances.
    """
    configured = _configured(options)
    parallel: Any = torch.nn.parallel
    before = parallel.DistributedDataParallel
    parallel.DistributedDataParallel = configured
    try:
        yield configured
    finally:
        parallel.DistributedDataParallel = before


def _configured(options: dict[str, Any]) -> type[DistributedDataParallel]:
    class Kind(type(DistributedDataParallel)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, TorchDDP)

    class Configured(DistributedDataParallel, metaclass=Kind):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            # The model that comes out is of the plain class, which pickles.
            return DistributedDataParallel(*args, **{**kwargs, **options})

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

    return Configured
