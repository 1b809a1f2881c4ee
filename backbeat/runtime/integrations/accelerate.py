"""Accelerate and the Hugging Face Trainer wrap the model themselves; `planned` makes them use backbeat's wrapper.

from backbeat.runtime.integrations.accelerate import planned

with planned(plan="auto"):
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)   # or: trainer.train()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from backbeat.runtime.ddp.wrapper import DistributedDataParallel
from backbeat.runtime.torch_internals import TorchDDP


@contextmanager
def planned(**options: Any) -> Iterator[type[DistributedDataParallel]]:
    """In this context `torch.nn.parallel.DistributedDataParallel` is backbeat's, with these options.

    It is a class, because the frameworks call `isinstance` with it. Models that torch's own class wrapped before still
    count as instances.
    """

    class AcceptsTorch(type(DistributedDataParallel)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, TorchDDP)

    class Configured(DistributedDataParallel, metaclass=AcceptsTorch):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            # An instance of the plain class, which can be pickled.
            return DistributedDataParallel(*args, **{**kwargs, **options})

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

    parallel: Any = torch.nn.parallel
    before = parallel.DistributedDataParallel
    parallel.DistributedDataParallel = Configured
    try:
        yield Configured
    finally:
        parallel.DistributedDataParallel = before
