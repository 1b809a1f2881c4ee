"""One training iteration, marked: forward and backward of every micro-batch, then the update; in one of the four
precisions that a profile can be taken in, as PyTorch's own switches, and with an optimizer given or by name."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, Protocol, cast

import torch

from backbeat.comm.clock import Clock, Mark
from backbeat.errors import InputError, MeasurementError

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adam", "adamw")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Large enough to keep small gradients, small enough that no warm-up step is skipped for an overflow.
_FIRST_SCALE = 1024.0


class OutOfMemoryError(MeasurementError):
    """The device is too small for this batch."""


class MicroBatch(NamedTuple):
    """Marks around forward and backward of one micro-batch."""

    forward_begin: Mark
    forward_end: Mark
    backward_begin: Mark
    """The end of forward, unless an observer came in between."""
    backward_end: Mark


class Marks(NamedTuple):
    """Marks of one iteration."""

    begin: Mark
    micro_batches: tuple[MicroBatch, ...]
    end: Mark


class Observer(Protocol):
    """Told about the last micro-batch, the one that completes the gradients. What it does first is not timed."""

    def before_forward(self) -> None: ...

    def before_backward(self) -> None: ...

    def after_backward(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model with all it takes to train it for one iteration."""

    model: torch.nn.Module
    batch: Any
    loss: Loss
    optimizer: torch.optim.Optimizer
    device: torch.device
    precision: str
    accumulation: int = 1
    scaler: Any = None
    clock: Clock

    def iterate(self, observer: Observer | None = None) -> Marks:
        begin = self.clock.mark()
        micro_batches = []
        for index in range(self.accumulation):
            watched = observer if index == self.accumulation - 1 else None
            micro_batches.append(self.micro_batch(begin if index == 0 else self.clock.mark(), watched))
        self.update()
        return Marks(begin, tuple(micro_batches), self.clock.mark())

    def micro_batch(self, forward_begin: Mark, observer: Observer | None = None) -> MicroBatch:
        if observer is not None:
            observer.before_forward()
            forward_begin = self.clock.mark()
        loss = self.forward()
        forward_end = backward_begin = self.clock.mark()
        if observer is not None:
            observer.before_backward()
            backward_begin = self.clock.mark()
        loss.backward()  # type: ignore[no-untyped-call]
        backward_end = self.clock.mark()
        if observer is not None:
            observer.after_backward()
        return MicroBatch(forward_begin, forward_end, backward_begin, backward_end)

    def forward(self) -> torch.Tensor:
        """What backward starts from: the loss, averaged over micro-batches and scaled where fp16 needs it."""
        return self.scaled(self.plain_loss())

    def plain_loss(self) -> torch.Tensor:
        with autocast(self.precision, self.device):
            return self.loss(self.model, self.batch)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        if self.accumulation > 1:
            loss = loss / self.accumulation
        return loss if self.scaler is None else cast(torch.Tensor, self.scaler.scale(loss))

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def median_phases(iterations: Sequence[Marks], clock: Clock) -> tuple[float, float]:
    """Forward and backward of one micro-batch."""
    micro_batches = [micro_batch for marks in iterations for micro_batch in marks.micro_batches]
    return (
        median(clock.between(marks.forward_begin, marks.forward_end) for marks in micro_batches),
        median(clock.between(marks.backward_begin, marks.backward_end) for marks in micro_batches),
    )


def make_optimizer(kind: str, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, or Adam or AdamW in their fused form, as trainers of transformers run them."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
    if kind not in OPTIMIZERS:
        raise InputError(f"optimizer is {kind!r}: it must be one of {', '.join(OPTIMIZERS)}")
    adam = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    if not any(parameter.is_meta for parameter in parameters):
        return adam(parameters, lr=1e-4, fused=True)
    # Torch refuses to fuse tensors without data; what runs on them is estimated, and only needs to know the choice.
    made = adam(parameters, lr=1e-4)
    for settings in (made.defaults, *made.param_groups):
        settings["fused"] = True
    return made


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Its class and what changes its memory or its time.

    >>> weight = [torch.nn.Parameter(torch.zeros(1))]
    >>> describe_optimizer(make_optimizer("sgd", weight)), describe_optimizer(make_optimizer("adamw", weight))
    ('SGD with momentum', 'AdamW, fused')
    """
    defaults = getattr(optimizer, "defaults", {})
    momentum = " with momentum" if defaults.get("momentum") else ""
    return f"{type(optimizer).__name__}{momentum}{', fused' if defaults.get('fused') else ''}"


def rounded(seconds: float) -> float:
    """To what a clock tells apart."""
    return round(seconds, 8)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "not enough memory" in text or "CUDNN_STATUS_ALLOC_FAILED" in text
    )


def release(device: torch.device) -> None:
    """Models may hold themselves: what is gone should not count to what comes next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def check_precision(precision: str, device: torch.device) -> None:
    if precision not in PRECISIONS:
        hint = "; fp8 is computed, not measured: add --analytic GPU" if precision == "fp8" else ""
        raise InputError(f"precision is {precision!r}: it must be one of {', '.join(PRECISIONS)}{hint}")
    if precision == "tf32" and device.type != "cuda":
        raise InputError(f"precision tf32 on {device.type}: it is a mode of NVIDIA GPUs; use fp32, or --device cuda")


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """What forward and loss run under."""
    dtype = AUTOCAST.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def scaler_for(precision: str, device: torch.device) -> Any:
    """fp16 gradients need loss scaling; the others do without."""
    return torch.amp.GradScaler(device.type, init_scale=_FIRST_SCALE) if precision == "fp16" else None


@contextlib.contextmanager
def tensor_cores(precision: str, device: torch.device) -> Iterator[None]:
    """fp32 means fp32 everywhere and tf32 means tf32 everywhere; by default cuDNN and cuBLAS disagree."""
    if device.type != "cuda" or precision not in ("fp32", "tf32"):
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
