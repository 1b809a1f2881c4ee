"""The raw figures of a training run: times of plain iterations, shares from hooked ones, memory by kind."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from backbeat.errors import InputError, MeasurementError
from backbeat.measure.inputs import check_loss
from backbeat.measure.memory import SavedTensors, device_bytes, optimizer_tensors, storage_bytes
from backbeat.measure.training import Marks, Training, is_out_of_memory, tensors_in, where_raised
from backbeat.measure.watch import Owner, Watch, find_owners, forward_shares, is_compiled, ready_shares
from backbeat.model import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

_HOOKED_ITERATIONS = 15
_FEWEST_ITERATIONS = 8
_LEAD_PROBES = 3


@dataclass(frozen=True)
class Gradients:
    names: list[str]
    parameters: list[torch.nn.Parameter]
    sizes: list[int]
    frozen: list[str]
    unused: list[str]


@dataclass(frozen=True)
class Figures:
    gradients: Gradients
    forward_s: float
    backward_s: float
    update_s: float
    iteration_s: list[float]
    hooked_s: float
    ready: dict[int, float]
    forward: dict[int, float]
    activations: dict[int, int]
    memory: Memory
    lead: tuple[float, float] | None
    """Host and device time of forward and backward, from a drained device."""
    compiled: bool


def take(training: Training, iterations: int, warmup: int, time_limit_s: float | None) -> Figures:
    clock = training.clock
    gradients = _first_iteration(training)
    for _ in range(max(0, warmup - 2)):
        training.iterate()
    clock.synchronize()
    started = time.perf_counter()
    training.iterate()
    clock.synchronize()
    one_s = time.perf_counter() - started
    hooked_iterations = min(iterations, _HOOKED_ITERATIONS)
    if time_limit_s is not None:
        affordable = int(time_limit_s / max(one_s, 1e-9))
        iterations = max(min(iterations, affordable * 2 // 3), min(iterations, _FEWEST_ITERATIONS))
        hooked_iterations = max(
            min(hooked_iterations, affordable // 3), min(hooked_iterations, _FEWEST_ITERATIONS // 2)
        )

    compiled = is_compiled(training.model)
    owners = [] if compiled else find_owners(training.model, gradients.parameters)
    memory, activations = _weigh(training, gradients, owners)
    watch = Watch(gradients.parameters, owners, clock)
    per_iteration = watch.marks + 3 * training.accumulation + 2
    # Each half is preceded by one iteration that refills the device's queue; modules may be called more than once.
    clock.reserve(2 * per_iteration * (hooked_iterations + 1) + (3 * training.accumulation + 2) * (iterations + 2))

    # Plain halves before and after the hooked iterations: a device that slows down as it warms does so to both.
    plain = _block(training, (iterations + 1) // 2)
    with watch:
        hooked = _block(training, hooked_iterations, watch)
    plain += _block(training, iterations // 2)
    clock.synchronize()
    recordings = watch.recordings[-hooked_iterations:]

    micro_batches = [micro_batch for marks in plain for micro_batch in marks.micro_batches]
    return Figures(
        gradients=gradients,
        forward_s=median(clock.between(begin, middle) for begin, middle, _ in micro_batches),
        backward_s=median(clock.between(middle, end) for _, middle, end in micro_batches),
        update_s=median(clock.between(marks.micro_batches[-1][2], marks.end) for marks in plain),
        iteration_s=[clock.between(marks.begin, marks.end) for marks in plain],
        hooked_s=median(clock.between(marks.begin, marks.end) for marks in hooked),
        ready=ready_shares(recordings, clock),
        forward=forward_shares(recordings, clock),
        activations=activations,
        memory=memory,
        lead=_lead(training) if training.device.type == "cuda" else None,
        compiled=compiled,
    )


def _block(training: Training, count: int, watch: Watch | None = None) -> list[Marks]:
    """Iterations one after the other, never waiting in between, as training runs them; the first only leads in."""
    return [training.iterate(watch) for _ in range(count + 1)][1:] if count else []


def _first_iteration(training: Training) -> Gradients:
    """Check on the way that everything the user gave does what it should."""
    model = training.model
    training.optimizer.zero_grad(set_to_none=True)
    loss = _user_code("loss(model, batch)", training.plain_loss)
    check_loss(loss)
    _user_code("backward", training.scaled(loss).backward)
    del loss
    names, parameters, sizes, frozen, unused = [], [], [], [], []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if not parameter.requires_grad:
            frozen.append(name)
        elif gradient is None:
            unused.append(name)
        elif gradient.layout != torch.strided:
            raise InputError(
                f"the gradient of {name} is sparse: all-reduce carries dense gradients; "
                "build its embedding with sparse=False, or exclude it from data-parallel synchronisation"
            )
        else:
            names.append(name)
            parameters.append(parameter)
            sizes.append(gradient.numel() * gradient.element_size())
    if not names:
        raise InputError("backward gave no parameter a gradient: the loss does not depend on the model's parameters")
    _user_code("the optimizer", training.update)
    return Gradients(names, parameters, sizes, frozen, unused)


def _user_code(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, (InputError, MeasurementError)):
            raise
        raise InputError(f"{what} raised {where_raised(error)}") from error


def _weigh(training: Training, gradients: Gradients, owners: list[Owner]) -> tuple[Memory, dict[int, int]]:
    """Memory by kind. One iteration under saved-tensor hooks for the activations, a plain one for the peak."""
    model, device = training.model, training.device
    parameters, buffers = list(model.parameters()), list(model.buffers())
    held = [*parameters, *buffers, *tensors_in(training.batch)]
    with SavedTensors(owners, held) as saved:
        loss = training.forward()
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    training.optimizer.zero_grad(set_to_none=True)
    state = device_bytes(optimizer_tensors(training.optimizer), device)
    gradient_bytes = sum(gradients.sizes)
    if device.type == "cuda":
        training.clock.synchronize()
        steady = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        training.iterate()
        training.clock.synchronize()
        peak = torch.cuda.max_memory_allocated(device)
    else:
        steady = storage_bytes(held) + state
        peak = steady + gradient_bytes + saved.total
    memory = Memory(
        parameter_bytes=storage_bytes(parameters),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=state,
        buffer_bytes=storage_bytes(buffers),
        activation_bytes=saved.total,
        steady_bytes=steady,
        peak_bytes=peak,
    )
    return memory, saved.by_gradient


def _lead(training: Training) -> tuple[float, float]:
    """Host and device seconds of forward and backward, each begun with the device idle.

    Where the device lags behind the host it is the device that bounds the iteration; the driver's launch queue keeps
    the host at most about a thousand kernels ahead, which is still milliseconds.
    """
    host, device = [], []
    for _ in range(_LEAD_PROBES):
        training.clock.synchronize()
        started = time.perf_counter()
        training.forward().backward()  # type: ignore[no-untyped-call]
        host.append(time.perf_counter() - started)
        training.clock.synchronize()
        device.append(time.perf_counter() - started)
        training.update()
    return median(host), median(device)
