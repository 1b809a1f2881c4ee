"""One training iteration, marked: forward and backward of every micro-batch, then the update. It runs in one of four
precisions, by PyTorch's own switches, and with an optimizer given or by name.

Hooks mark when each gradient is complete, and when each module that owns parameters begins its forward, in iterations
of their own, so that neither kind of hook costs the other's figures anything. Forward time is divided where modules
begin: a module's share lasts until the next module with parameters begins. So activation functions, attention products
and the loss count with the module before them, and the shares add up to the whole forward.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch

from backbeat.comm.clock import Clock, Mark
from backbeat.errors import InputError, MeasurementError
from backbeat.measure.model.chain import untraced

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adam", "adamw")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
Owner = tuple[torch.nn.Module, int]
"""A module, and the gradient that its forward time and activations are booked on."""
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


def find_owners(
    model: torch.nn.Module, gradients: list[torch.nn.Parameter], blocks: Iterable[torch.nn.Module] | None = None
) -> list[Owner]:
    """Every module with parameters of its own that get gradients. A tied weight's modules share its entry.

    Given blocks, these with all that they hold: modules inside a compiled block are not called one by one.
    """
    index_of = {id(parameter): index for index, parameter in enumerate(gradients)}
    owners = []
    for module in model.modules() if blocks is None else blocks:
        held = module.parameters(recurse=blocks is not None)
        mine = [index_of[id(parameter)] for parameter in held if id(parameter) in index_of]
        if mine:
            owners.append((module, mine[0]))
    return owners


class PhaseMarks(ExitStack):
    """A context in which one phase of observed iterations is recorded: of each, which gradient was marked when.

    It is told about the last micro-batch, the one that completes the gradients. With a head start, which is not timed,
    the device is kept busy for so long before the phase.
    """

    def __init__(self, phase: Literal["forward", "backward"], clock: Clock, head_start_s: float) -> None:
        super().__init__()
        self.recordings: list[list[tuple[int, Mark]]] = []
        self._current: list[tuple[int, Mark]] | None = None
        self._phase = phase
        self._clock = clock
        self._head_start_s = head_start_s

    def watch_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Mark each gradient's completion."""
        for index, parameter in enumerate(parameters):
            register: Any = parameter.register_post_accumulate_grad_hook
            self.enter_context(register(self._hook(index)))

    def watch_modules(self, owners: list[Owner]) -> None:
        """Mark the beginning of every owning module."""
        for module, gradient in owners:
            self.enter_context(module.register_forward_pre_hook(untraced(self._hook(gradient))))

    def begin(self, phase: Literal["forward", "backward", "end"]) -> None:
        """Checkpointed modules run forward again inside backward; those calls are backward's time."""
        self._current = None
        if phase == self._phase:
            if self._head_start_s > 0:
                self._clock.delay(self._head_start_s)
            self._current = []
            self.recordings.append(self._current)

    def _hook(self, index: int) -> Any:
        mark = self._clock.mark

        def hook(*_: Any) -> None:
            if self._current is not None:
                self._current.append((index, mark()))

        return hook


class Allocator(Protocol):
    """Counts the bytes that tensors take on a device."""

    def level(self) -> int: ...

    def peak(self) -> int:
        """The highest level since it was reset."""

    def reset(self) -> None: ...


@dataclass(frozen=True)
class CudaAllocator:
    """The caching allocator of a GPU. It counts what the host has issued, so nothing waits for the device."""

    device: torch.device

    def level(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


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

    @property
    def allocator(self) -> Allocator | None:
        """None on a CPU, whose allocator does not count."""
        return CudaAllocator(self.device) if self.device.type == "cuda" else None

    def iterate(self, observer: PhaseMarks | None = None) -> Marks:
        begin = self.clock.mark()
        micro_batches = []
        for index in range(self.accumulation):
            watched = observer if index == self.accumulation - 1 else None
            micro_batches.append(self.micro_batch(begin if index == 0 else self.clock.mark(), watched))
        self.update()
        return Marks(begin, tuple(micro_batches), self.clock.mark())

    def micro_batch(self, forward_begin: Mark, observer: PhaseMarks | None = None) -> MicroBatch:
        if observer is not None:
            observer.begin("forward")
            forward_begin = self.clock.mark()
        loss = self.forward()
        forward_end = backward_begin = self.clock.mark()
        if observer is not None:
            observer.begin("backward")
            backward_begin = self.clock.mark()
        loss.backward()  # type: ignore[no-untyped-call]
        backward_end = self.clock.mark()
        if observer is not None:
            observer.begin("end")
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


def ready_shares(recorded: Iterable[tuple[MicroBatch, list[tuple[int, Mark]]]], clock: Clock) -> dict[int, float]:
    """For each gradient, the share of backward that has passed when it is ready: the median over the recordings."""
    shares: dict[int, list[float]] = {}
    for marks, ready in recorded:
        backward_s = clock.between(marks.backward_begin, marks.backward_end)
        # Reentrant checkpointing may accumulate into a parameter several times: the last one completes it.
        for index, mark in dict(ready).items():
            share = clock.between(marks.backward_begin, mark) / backward_s if backward_s > 0 else 1.0
            shares.setdefault(index, []).append(min(max(share, 0.0), 1.0))
    return {index: median(values) for index, values in shares.items()}


def forward_shares(recorded: Iterable[tuple[MicroBatch, list[tuple[int, Mark]]]], clock: Clock) -> dict[int, float]:
    """For each gradient that a module is booked on, its share of forward; the shares add up to 1."""
    sums: dict[int, list[float]] = {}
    for marks, begins in recorded:
        if not begins:
            return {}
        spans: dict[int, float] = {}
        # What runs before the first owning module is booked on it.
        edges = [marks.forward_begin, *(mark for _, mark in begins[1:]), marks.forward_end]
        for (index, _), first, last in zip(begins, edges, edges[1:], strict=False):
            spans[index] = spans.get(index, 0.0) + max(clock.between(first, last), 0.0)
        for index, seconds in spans.items():
            sums.setdefault(index, []).append(seconds)
    medians = {index: median(values) for index, values in sums.items()}
    total = sum(medians.values())
    return {index: seconds / total for index, seconds in medians.items()} if total > 0 else {}


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
