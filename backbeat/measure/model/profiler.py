"""A model's profile, measured: train it for some iterations and write down when each gradient is ready.

Plain iterations give the times; separate, hooked ones give each gradient's share of backward and each module's share
of forward. So the hooks' own cost is measured rather than contained in the figures, and it is said in a note.

For the model of a factory, where memory runs out, the error names the batch size that fits.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from backbeat.comm.clock import clock_for
from backbeat.comm.machine import device_name, short_name, source
from backbeat.errors import InputError, MeasurementError, where_raised
from backbeat.measure.model.batches import samples_in, to_device
from backbeat.measure.model.compiled import NOTE as COMPILED
from backbeat.measure.model.compose import compose
from backbeat.measure.model.factory import Factory
from backbeat.measure.model.inputs import check_model, device_of, parse_device, trainable_of
from backbeat.measure.model.launch_bound import ApplyMemory, LaunchBound
from backbeat.measure.model.noise import noise
from backbeat.measure.model.observation import Figures, OtherRanks, measure_training
from backbeat.measure.model.training_step import (
    Loss,
    OutOfMemoryError,
    Training,
    check_precision,
    describe_optimizer,
    is_out_of_memory,
    make_optimizer,
    release,
    rounded,
    scaler_for,
    tensor_cores,
)
from backbeat.model import Profile
from backbeat.model.checks import at_least

TopkSpeed = Callable[[Training, int], tuple[float, float] | None]
"""Seconds of top-k per byte and per bucket, given the bytes of all gradients; None where memory is too short.
`backbeat.runtime.compressed.topk_speed.measure_topk`: measuring knows no runtime, so callers that have one hand it
in."""


@dataclass(frozen=True)
class MeasuredModel:
    """A profile, and what measuring it showed about the measurement."""

    profile: Profile
    overhead: float
    """Forward and backward with hooks, over the same without."""
    launch_bound: LaunchBound | None
    """Whether the device or the host bounds an iteration; None on a CPU."""


def profile(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer | str | None = None,
    **options: Any,
) -> Profile:
    """Train `model` for some iterations on `batch` and return its profile; weights are put back afterwards.

    `loss(model, batch)` returns the scalar that backward starts from. The optimizer may be one of `sgd`, `adam` and
    `adamw` by name; without one, SGD with momentum. Options are those of `measure`: `precision`, `device`,
    `iterations`, `warmup`, `accumulation`, `batch_size`, `name`, `model_name`, `time_limit_s`, `accept_noise`,
    `compile_blocks`, `keep`, `command`, `notes`, `topk_speed`, `apply_memory`, `ranks`, `brief`.
    """
    return measure(model, batch, loss, optimizer, **options).profile


def measure(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer | str | None = None,
    *,
    precision: str = "fp32",
    device: str | torch.device | None = None,
    iterations: int = 30,
    warmup: int = 10,
    accumulation: int = 1,
    batch_size: int | None = None,
    name: str | None = None,
    model_name: str | None = None,
    time_limit_s: float | None = None,
    accept_noise: bool = False,
    compile_blocks: bool = False,
    keep: bool = True,
    command: str | None = None,
    notes: Iterable[str] = (),
    topk_speed: TopkSpeed | None = None,
    apply_memory: ApplyMemory | None = None,
    ranks: OtherRanks | None = None,
    brief: bool = False,
) -> MeasuredModel:
    """As `profile`, with the measurement's own cost.

    `time_limit_s` lowers the number of iterations (to 8 at least) where they would take longer. A measurement on a busy
    machine is refused (`noise` says when); `accept_noise` makes it a note instead. `compile_blocks` runs every block
    under `torch.compile`, as `backbeat profile --compile` does. `keep=False` spares the copies that
    put the model back as it was. `topk_speed` and `apply_memory` come from `backbeat.runtime`, as
    `backbeat profile` gives them: without them the profile does not say what top-k costs, nor, on a GPU, what
    recomputation costs the host. Where several measure at once, `ranks` begin each series of iterations together, as
    the steps of training do: what they share, like a device or a host, is then shared alike.
    `brief` is for a job that waits: the limit may lower the number of all iterations to 9, and FLOPs are left out.
    """
    for field, value in (("iterations", iterations), ("warmup", warmup), ("accumulation", accumulation)):
        at_least(field, value, 1)
    check_model(model)
    where = device_of(model, device)
    check_precision(precision, where)
    model.to(where)
    batch = to_device(batch, where)
    samples = batch_size or samples_in(batch)
    if samples is None:
        raise InputError("the batch holds no tensor to count samples in: give batch_size")
    given_optimizer = None if isinstance(optimizer, str) else optimizer
    if optimizer is None or isinstance(optimizer, str):
        optimizer = make_optimizer(optimizer or "sgd", trainable_of(model))
    training = Training(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        device=where,
        precision=precision,
        accumulation=accumulation,
        scaler=scaler_for(precision, where),
        clock=clock_for(where),
    )
    try:
        current = torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()
        with current, tensor_cores(precision, where):
            with put_back(model, given_optimizer, where) if keep else contextlib.nullcontext():
                figures = measure_training(
                    training, iterations, warmup, time_limit_s, apply_memory, compile_blocks, ranks, brief
                )
            found = noise(figures.iteration_s, figures.forward_s + figures.backward_s, figures.overhead)
            if found is not None and not accept_noise:
                raise MeasurementError(
                    f"the machine was busy: {found}; stop what else runs on it and profile again, or go on with such a "
                    "profile by --accept-noise (accept_noise=True)"
                )
            topk = None if topk_speed is None else topk_speed(training, sum(figures.gradients.sizes))
    except (InputError, MeasurementError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                f"out of memory with {samples} samples on {device_name(where)}: take a smaller batch, "
                "checkpoint activations, or accumulate gradients over smaller micro-batches"
            ) from None
        raise InputError(f"training the model raised {where_raised(error)}") from error
    title = model_name or type(model).__name__
    s_per_byte, s_per_bucket = (None, None) if topk is None else topk
    document = figures.profile(
        name=name or f"{title.lower()}-b{samples}-{precision}-{short_name(where)}",
        model=title,
        batch_size=samples,
        precision=precision,
        device=device_name(where),
        accumulation=accumulation,
        source=source(command or "backbeat.measure.profile(model, batch, loss)", where),
        notes=(
            *notes,
            *(() if found is None else (f"noise accepted: {found}; predictions are as uncertain",)),
            *((COMPILED,) if compile_blocks else ()),
            *_notes(training, figures),
        ),
        iteration_s=tuple(rounded(seconds) for seconds in figures.iteration_s),
        optimizer=describe_optimizer(training.optimizer),
        compiled=compile_blocks,
        blocks=figures.chain.blocks_within(figures.forward_s, figures.backward_s),
        host_link=figures.chain.host_link,
        compression_s_per_byte=s_per_byte,
        compression_s_per_bucket=s_per_bucket,
        **{} if figures.launch_bound is None else host_fields(figures.launch_bound),
    )
    return MeasuredModel(document, figures.overhead, figures.launch_bound)


def host_fields(bound: LaunchBound) -> dict[str, float]:
    """What a profile says of the host, and of the device without waiting for it, as far as they are known."""
    found = {
        "device_s": bound.device_s if bound.kind == "launch-bound" else None,
        "host_s": bound.host_s,
        "host_recompute_s": bound.recompute_s,
        "host_fetch_s": bound.fetch_s,
    }
    return {field: rounded(seconds) for field, seconds in found.items() if seconds is not None}


def _notes(training: Training, figures: Figures) -> list[str]:
    plain_s = figures.forward_s + figures.backward_s
    notes = [
        f"with hooks, forward and backward took {figures.overhead:.4f} times the plain {plain_s * 1e3:.4g} ms; "
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
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(tensors, saved, strict=True):
                tensor.copy_(before)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)


def measure_factory(
    factory: Factory,
    *,
    batch_size: int | None = None,
    device: str | None = None,
    **options: Any,
) -> MeasuredModel:
    """Build and measure, with the options of `measure`. Where memory runs out, the error names a batch that fits.

    The option `optimizer` names one for a factory that returns none.
    """
    if batch_size is not None:
        at_least("batch size", batch_size, 1)
    where = _device(device)
    size = factory.batch_size(batch_size)
    try:
        return _build_and_measure(factory, batch_size, where, **options)
    except OutOfMemoryError as error:
        message = str(error)
    # Outside the handler, so that the traceback no longer holds the tensors that did not fit.
    release(where)
    if size is None:
        raise OutOfMemoryError(f"{message}. {factory.spec} takes no batch_size, so no smaller one was tried")
    fitting = _largest_fitting(factory, size, where, {**options, "iterations": 1, "warmup": 1})
    advice = f"batch size {fitting} fits: use --batch-size {fitting}" if fitting else "not even batch size 1 fits"
    raise OutOfMemoryError(f"out of memory at batch size {size}; {advice}")


def _build_and_measure(
    factory: Factory,
    batch_size: int | None,
    device: torch.device,
    *,
    name: str | None = None,
    optimizer: str | None = None,
    **options: Any,
) -> MeasuredModel:
    workload = factory.build(factory.batch_size(batch_size), device)
    samples = factory.samples(workload, batch_size, optimizer)
    return measure(
        workload.model,
        workload.batch,
        workload.loss,
        workload.optimizer or optimizer,
        device=device,
        batch_size=samples,
        name=name or profile_name(factory, samples, {"optimizer": optimizer, **options}, device),
        model_name=factory.title,
        keep=False,
        notes=factory.notes,
        **options,
    )


def compose_factory(factory: Factory, from_layers: tuple[int, int], **options: Any) -> Profile:
    """Measure the factory's model with each of two small numbers of layers; compose the profile of the whole from them.

    The options are those of `measure_factory`.
    """
    layers, name = factory.layers, options.pop("name", None)
    measured = []
    for count in sorted(from_layers):
        measured.append(measure_factory(factory.with_layers(count), **options).profile)
        release(_device(options.get("device")))
    return compose(measured[0], measured[1], layers, name=name)


def profile_name(factory: Factory, samples: int | None, options: Mapping[str, Any], device: torch.device) -> str:
    """`gpt2-b8-bf16-adamw-compile-h200`: what was measured, with what, on what."""
    words = [factory.title, f"b{samples}", options.get("precision", "fp32")]
    if options.get("optimizer") not in (None, "sgd"):
        words.append(options["optimizer"])
    if options.get("compile_blocks"):
        words.append("compile")
    return "-".join([*words, short_name(device)])


def _largest_fitting(factory: Factory, size: int, device: torch.device, options: dict[str, Any]) -> int | None:
    """Half the size, a quarter and so on, until one is measured."""
    while size := size // 2:
        try:
            _build_and_measure(factory, size, device, **options)
            return size
        except OutOfMemoryError:
            pass
        release(device)
    return None


def _device(given: str | None) -> torch.device:
    return parse_device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
