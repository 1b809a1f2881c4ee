"""A factory's model, built and measured, at one batch size or several. Where memory runs out, the error names the batch
size that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from backbeat.comm.machine import short_name
from backbeat.measure.model.compose import compose_profile
from backbeat.measure.model.factory import Factory
from backbeat.measure.model.inputs import MeasureOptions, parse_device
from backbeat.measure.model.profiler import MeasuredModel, measure
from backbeat.measure.model.training_step import OutOfMemoryError, release
from backbeat.measure.model.turns import in_turns
from backbeat.model import Profile
from backbeat.model.batches import join
from backbeat.model.checks import at_least


def measure_factory(factory: Factory, options: MeasureOptions) -> MeasuredModel:
    """Build and measure. Where memory runs out, the error names a batch that fits."""
    if options.batch_size is not None:
        at_least("batch size", options.batch_size, 1)
    device = _device(options)
    size = factory.batch_size(options.batch_size)
    try:
        return _build_and_measure(factory, device, options)
    except OutOfMemoryError as error:
        message = str(error)
    # Outside the handler, so that the traceback no longer holds the tensors that did not fit.
    release(device)
    if size is None:
        raise OutOfMemoryError(f"{message}. {factory.spec} takes no batch_size, so no smaller one was tried")
    fitting = _largest_fitting(factory, size, device, replace(options, iterations=1, warmup=1))
    advice = f"batch size {fitting} fits: use --batch {fitting}" if fitting else "not even batch size 1 fits"
    raise OutOfMemoryError(f"out of memory at batch size {size}; {advice}")


def _build_and_measure(factory: Factory, device: torch.device, options: MeasureOptions) -> MeasuredModel:
    workload = factory.build(factory.batch_size(options.batch_size), device)
    samples = factory.samples(workload, options.batch_size, options.optimizer)
    named = replace(
        options,
        optimizer=workload.optimizer or options.optimizer,
        device=device,
        batch_size=samples,
        name=options.name or profile_name(factory, samples, options, device),
        model_name=factory.title,
        keep=False,
        notes=factory.notes,
    )
    return measure(workload.model, workload.batch, workload.loss, named)


def profile_factory(
    factory: Factory,
    options: MeasureOptions,
    batches: Sequence[int | None] = (None,),
    from_layers: tuple[int, int] | None = None,
) -> Profile:
    """One profile of the factory's model at all of these batch sizes, the first of them its own (None: what the
    factory chooses). Given two small numbers of layers, it is composed from the model with as many."""
    layers = None if from_layers is None else factory.layers
    counts: Sequence[int | None] = (None,) if from_layers is None else sorted(from_layers)
    sides: dict[str, Callable[[], Profile]] = {}
    for size in batches:
        for count in counts:
            words = [f"batch {size}"] * (size is not None) + [f"{count} layers"] * (count is not None)
            part = factory if count is None else factory.with_layers(count)
            named = replace(options, batch_size=size, name=options.name if count is None else None)
            sides[" and ".join(words)] = partial(_measure_and_release, part, named)

    def whole(found: Sequence[Profile]) -> Profile:
        if layers is not None:
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [compose_profile(few, more, layers, name=options.name) for few, more in pairs]
        return join(*found)

    return in_turns(sides, whole, accept=options.accept_noise)


def _measure_and_release(factory: Factory, options: MeasureOptions) -> Profile:
    made = measure_factory(factory, options).profile
    release(_device(options))
    return made


def profile_name(factory: Factory, samples: int | None, options: MeasureOptions, device: torch.device) -> str:
    """`gpt2-b8-bf16-adamw-compile-h200`: what was measured, with what, on what."""
    optimizer = [] if options.optimizer in (None, "sgd") else [str(options.optimizer)]
    compiled = ["compile"] if options.compile_blocks else []
    return "-".join([factory.title, f"b{samples}", options.precision, *optimizer, *compiled, short_name(device)])


def _largest_fitting(factory: Factory, size: int, device: torch.device, options: MeasureOptions) -> int | None:
    """Half the size, a quarter and so on, until one is measured."""
    while size := size // 2:
        try:
            _build_and_measure(factory, device, replace(options, batch_size=size))
            return size
        except OutOfMemoryError:
            pass
        release(device)
    return None


def _device(options: MeasureOptions) -> torch.device:
    return parse_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
