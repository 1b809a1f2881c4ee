"""A model's profile, measured: train it for some iterations and write down when each gradient is ready.

Plain iterations give the times; separate, hooked ones give each gradient's share of backward and each module's share
of forward. So the hooks' own cost is measured rather than contained in the figures, and it is said in a note.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from backbeat.comm.clock import clock_for
from backbeat.comm.machine import device_name, short_name, source
from backbeat.errors import InputError, MeasurementError, where_raised
from backbeat.measure.model.chain import COMPILED_NOTE
from backbeat.measure.model.inputs import (
    MeasureOptions,
    check_model,
    device_of,
    kept_random,
    samples_in,
    to_device,
    trainable_of,
)
from backbeat.measure.model.launch_bound import LaunchBound
from backbeat.measure.model.noise import MEASURED_TURNS, steady
from backbeat.measure.model.observation import Figures, measure_training
from backbeat.measure.model.training_step import (
    Loss,
    OutOfMemoryError,
    Training,
    check_precision,
    describe_optimizer,
    is_out_of_memory,
    make_optimizer,
    rounded,
    scaler_for,
    tensor_cores,
)
from backbeat.model import Profile
from backbeat.model.profile import LAUNCH_BOUND


@dataclass(frozen=True)
class MeasuredModel:
    """A profile, and what measuring it showed about the measurement."""

    profile: Profile
    overhead: float
    """Forward and backward with hooks, over the same without."""
    launch_bound: LaunchBound | None
    """Whether the device or the host bounds an iteration; None on a CPU."""


def profile(
    model: torch.nn.Module, batch: Any, loss: Loss, optimizer: torch.optim.Optimizer | str | None = None, **options: Any
) -> Profile:
    """Train `model` for some iterations on `batch` and return its profile; weights are put back afterwards.

    `loss(model, batch)` returns the scalar that backward starts from. The optimizer may be one of `sgd`, `adam` and
    `adamw` by name; without one, SGD with momentum. Options are the fields of
    `backbeat.measure.model.inputs.MeasureOptions`.
    """
    return measure(model, batch, loss, MeasureOptions(optimizer=optimizer, **options)).profile


def measure(model: torch.nn.Module, batch: Any, loss: Loss, options: MeasureOptions) -> MeasuredModel:
    """As `profile`, with the measurement's own cost."""
    check_model(model)
    where = device_of(model, options.device)
    check_precision(options.precision, where)
    model.to(where)
    batch = to_device(batch, where)
    samples = options.batch_size or samples_in(batch)
    if samples is None:
        raise InputError("the batch holds no tensor to count samples in: give batch_size")
    given = None if isinstance(options.optimizer, str) else options.optimizer
    training = Training(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=given if given is not None else make_optimizer(str(options.optimizer or "sgd"), trainable_of(model)),
        device=where,
        precision=options.precision,
        accumulation=options.accumulation,
        scaler=scaler_for(options.precision, where),
        clock=clock_for(where),
    )
    current = torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()
    with _failures_explained(samples, where), current, tensor_cores(options.precision, where):
        with put_back(model, given, where) if options.keep else contextlib.nullcontext():
            # Ranks that measure together cannot each decide to do it again.
            turns = MEASURED_TURNS if options.ranks is None else 1
            figures, noise = steady(
                lambda: measure_training(training, options), accept=options.accept_noise, turns=turns
            )
        topk = options.topk_speed and options.topk_speed(training, sum(figures.gradients.sizes))
    title = options.model_name or type(model).__name__
    s_per_byte, s_per_bucket = topk or (None, None)
    document = figures.profile(
        name=options.name or f"{title.lower()}-b{samples}-{options.precision}-{short_name(where)}",
        model=title,
        batch_size=samples,
        precision=options.precision,
        device=device_name(where),
        accumulation=options.accumulation,
        source=source(options.command or "backbeat.measure.profile(model, batch, loss)", where),
        notes=(
            *options.notes,
            *(() if noise is None else (noise,)),
            *((COMPILED_NOTE,) if options.compile_blocks else ()),
            *_notes(training, figures),
        ),
        iteration_s=tuple(rounded(seconds) for seconds in figures.iteration_s),
        optimizer=describe_optimizer(training.optimizer),
        compiled=options.compile_blocks,
        blocks=figures.chain.blocks_within(figures.forward_s, figures.backward_s),
        host_link=figures.chain.host_link,
        compression_s_per_byte=s_per_byte,
        compression_s_per_bucket=s_per_bucket,
        **{} if figures.launch_bound is None else host_fields(figures.launch_bound),
    )
    return MeasuredModel(document, figures.overhead, figures.launch_bound)


@contextlib.contextmanager
def _failures_explained(samples: int, device: torch.device) -> Iterator[None]:
    """What the user's model raises becomes an error that says what to do."""
    try:
        yield
    except (InputError, MeasurementError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                f"out of memory with {samples} samples on {device_name(device)}: take a smaller batch, "
                "checkpoint activations, or accumulate gradients over smaller micro-batches"
            ) from None
        raise InputError(f"training the model raised {where_raised(error)}") from error


def host_fields(bound: LaunchBound) -> dict[str, float]:
    """What a profile says of the host, and of the device without waiting for it, as far as they are known."""
    found = {
        "device_s": bound.device_s if bound.kind == LAUNCH_BOUND else None,
        "host_s": bound.host_s,
        "host_recompute_s": bound.recompute_s,
        "host_fetch_s": bound.fetch_s,
    }
    return {field: rounded(seconds) for field, seconds in found.items() if seconds is not None}


def _notes(training: Training, figures: Figures) -> list[str]:
    notes = [
        f"with hooks, forward and backward took {figures.overhead:.4f} times the plain {figures.plain_s * 1e3:.4g} ms; "
        "ready and forward times are shares of the plain backward and forward"
    ]
    if figures.launch_bound is not None:
        notes.append(_launch_bound_note(figures.launch_bound))
    else:
        notes.append(f"CPU with {torch.get_num_threads()} threads; peak memory is the sum of its kinds, not measured")
    if figures.compiled:
        notes.append("compiled model: forward time and activations per module are not visible")
    if not training.model.training:
        notes.append("the model was in eval mode")
    notes += figures.gradients.left_out
    missed = [name for index, name in enumerate(figures.gradients.names) if index not in figures.hooked.ready]
    if missed:
        notes.append(f"ready time unknown, taken as the end of backward: {', '.join(missed)}")
    return [*notes, *figures.chain.notes]


def _launch_bound_note(bound: LaunchBound) -> str:
    host = (
        f"{bound.kind}: the host usually submits an iteration in {bound.host_s * 1e3:.4g} ms, "
        f"{bound.host_s / bound.iteration_s:.0%} of the {bound.iteration_s * 1e3:.4g} ms it takes"
    )
    if bound.kind == "device-bound" or bound.device_s is None:
        return host
    if bound.kind == "close to launch-bound":
        return f"{host}; hooked iterations gave the host a head start, so that the shares are the device's own"
    return (
        f"{host}; given a head start, the device does forward and backward in {bound.device_s * 1e3:.4g} ms; the "
        "shares are at the host's pace; a faster host, a larger batch or CUDA graphs would shorten the iteration"
    )


@contextlib.contextmanager
def put_back(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> Iterator[None]:
    """Weights, buffers, gradients, the optimizer's state and the random generators leave as they came.

    Copies go to the host, so that they take nothing from the memory being measured.
    """

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True)

    tensors = [*model.parameters(), *model.buffers()]
    saved = [to_host(tensor) for tensor in tensors]
    gradients = [parameter.grad for parameter in model.parameters()]
    state = None if optimizer is None else copy.deepcopy(tree_map_only(torch.Tensor, to_host, optimizer.state_dict()))
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with kept_random(device):
            yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(tensors, saved, strict=True):
                tensor.copy_(before)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)
