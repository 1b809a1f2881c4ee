"""A factory's model, built and measured; where memory runs out, the batch size that fits."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from backbeat.comm.machine import short_name
from backbeat.measure.model.compose import compose
from backbeat.measure.model.factory import Factory
from backbeat.measure.model.inputs import parse_device
from backbeat.measure.model.profiler import MeasuredModel, measure
from backbeat.measure.model.training_step import OutOfMemoryError
from backbeat.model import Profile
from backbeat.model.checks import at_least


def measure_factory(
    factory: Factory,
    *,
    batch_size: int | None = None,
    device: str | None = None,
    name: str | None = None,
    optimizer: str | None = None,
    **options: Any,
) -> MeasuredModel:
    """Build and measure, with the options of `measure`. Where memory runs out, the error names a batch that fits.

    `optimizer` names one for a factory that returns none.
    """
    options["optimizer"] = optimizer
    if batch_size is not None:
        at_least("batch size", batch_size, 1)
    where = _device(device)
    size = factory.batch_size(batch_size)
    try:
        return _build_and_measure(factory, batch_size, where, name, options)
    except OutOfMemoryError as error:
        message = str(error)
    # Outside the handler, so that the traceback no longer holds the tensors that did not fit.
    release(where)
    if size is None:
        raise OutOfMemoryError(f"{message}. {factory.spec} takes no batch_size, so no smaller one was tried")
    fitting = _largest_fitting(factory, size // 2, where, options)
    advice = f"batch size {fitting} fits: use --batch-size {fitting}" if fitting else "not even batch size 1 fits"
    raise OutOfMemoryError(f"out of memory at batch size {size}; {advice}")


def _build_and_measure(
    factory: Factory, batch_size: int | None, device: torch.device, name: str | None, options: dict[str, Any]
) -> MeasuredModel:
    workload = factory.build(factory.batch_size(batch_size), device)
    optimizer = options.get("optimizer")
    samples = factory.samples(workload, batch_size, optimizer)
    notes = (f"{factory.spec}: {factory.description}",) if factory.description else ()
    return measure(
        workload.model,
        workload.batch,
        workload.loss,
        workload.optimizer or optimizer,
        device=device,
        batch_size=samples,
        name=name or profile_name(factory, samples, options, device),
        model_name=factory.title,
        keep=False,
        notes=notes,
        **{option: value for option, value in options.items() if option != "optimizer"},
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
    quick = {**options, "iterations": 1, "warmup": 1}
    while size >= 1:
        try:
            _build_and_measure(factory, size, device, None, quick)
            return size
        except OutOfMemoryError:
            pass
        release(device)
        size //= 2
    return None


def _device(given: str | None) -> torch.device:
    return parse_device(given or ("cuda" if torch.cuda.is_available() else "cpu"))


def release(device: torch.device) -> None:
    """Models may hold themselves: what is gone should not count to what comes next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
