"""Moves two virtual clocks on by what every operator takes: the host's to submit it, the device's to run it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backbeat.comm.clock import Clock, Mark
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Traffic, Work, family_of
from backbeat.measure.model.chain import in_backward, tensors_of
from backbeat.measure.model.kernel_fusion import Fusion
from backbeat.measure.model.operator_work import in_fp8, work_of


class VirtualClock(Clock):
    """Two clocks that stand still until they are told how long something took."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """The device's."""
        self.submitted_s = 0.0
        """The host's."""

    def mark(self) -> Mark:
        return self.now_s

    def host_s(self) -> float:
        return self.now_s

    def submit(self, host_s: float, device_s: float) -> None:
        """The host takes its time; then the device, as soon as it is free, takes its own."""
        self.submitted_s += host_s
        if device_s > 0:
            self.now_s = max(self.now_s, self.submitted_s) + device_s


class Estimator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator under it moves the clock on."""

    def __init__(self, model: OperatorModel, clock: VirtualClock, precision: str, compiled: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.clock = clock
        self.precision = precision
        self.fusion = Fusion() if compiled else None
        self.working = True
        self.by_family = dict.fromkeys(("matmul", "attention", "memory"), 0.0)
        """Seconds of the device in forward and backward, of all iterations."""
        self.updated_bytes: float | None = None
        """While an optimizer's operators are part of large kernels: what they move."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and self.updated_bytes is not None:
            # The number of the step, which an optimizer corrects its averages by: any will do.
            return 1.0
        result = func(*args, **kwargs)
        if func.namespace != "aten" or not self.working:
            return result
        works = work_of(func, args, kwargs, result, "fp32" if self.precision == "fp32" else "tf32")
        if self.updated_bytes is not None:
            self.updated_bytes += sum(work.bytes for work in works if isinstance(work, Traffic))
            return result
        if self.precision == "fp8":
            works = in_fp8(works)
        if self.fusion is not None:
            works = self.fusion.add(works, tensors_of((args, kwargs)), tensors_of(result)) if works else ()
        self.submit(works)
        return result

    def submit(self, works: tuple[Work, ...]) -> None:
        """Its first kernel tells what submitting an operator takes; a view has none."""
        host = self.model.host
        if self.fusion is not None:
            host_s = host.compiled_s * len(works)
        elif not works:
            host_s = host.view_s
        else:
            host_s = (host.backward_s if in_backward() else host.forward_s).get(family_of(works[0]), 0.0)
        self.clock.submit(host_s, 0.0)
        for work in works:
            seconds = self.model.seconds(work)
            family = family_of(work)
            self.by_family["matmul" if family == "convolution" else family] += seconds
            self.clock.submit(0.0, seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is no work of its own on a GPU."""
        self.working = False
        try:
            yield
        finally:
            self.working = True

    def flush(self) -> None:
        """End the chain that is being fused."""
        if self.fusion is not None:
            self.submit(self.fusion.flush())
