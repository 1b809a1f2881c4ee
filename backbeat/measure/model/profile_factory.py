"""A factory's model, built and measured; where memory runs out, the batch size that fits."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from backbeat.comm.machine import short_name
from backbeat.errors import InputError
from backbeat.measure.model.batches import samples_in
from backbeat.measure.model.inputs import parse_device
from backbeat.measure.model.profiler import MeasuredModel, measure
from backbeat.measure.model.training_step import OutOfMemoryError

if TYPE_CHECKING:
    from backbeat.measure.model.factory import Factory


def measure_factory(
    factory: Factory,
    *,
    batch_size: int | None = None,
    device: str | None = None,
    name: str | None = None,
    **options: Any,
) -> MeasuredModel:
    """Build and measure, with the options of `measure`. Where memory runs out, the error names a batch that fits."""
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch size is {batch_size}: it must be 1 or more")
    where = parse_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = factory.batch_size(batch_size)
    try:
        return _build_and_measure(factory, size, batch_size, where, name, options)
    except OutOfMemoryError as error:
        message = str(error)
    # Outside the handler, so that the traceback no longer holds the tensors that did not fit.
    _release(where)
    if size is None:
        raise OutOfMemoryError(f"{message}. {factory.spec} takes no batch_size, so no smaller one was tried")
    fitting = _largest_fitting(factory, size // 2, where, options)
    advice = f"batch size {fitting} fits: use --batch-size {fitting}" if fitting else "not even batch size 1 fits"
    raise OutOfMemoryError(f"out of memory at batch size {size}; {advice}")


def _build_and_measure(
    factory: Factory,
    size: int | None,
    wanted: int | None,
    device: torch.device,
    name: str | None,
    options: dict[str, Any],
) -> MeasuredModel:
    workload = factory.build(size, device)
    found = samples_in(workload.batch)
    if size is None and wanted is not None and wanted != found:
        raise InputError(
            f"{factory.spec} takes no batch_size and its batch holds {found} samples, not {wanted}: "
            "drop --batch-size, or let the factory take batch_size"
        )
    samples = size or found
    precision = options.get("precision", "fp32")
    notes = (f"{factory.spec}: {factory.description}",) if factory.description else ()
    return measure(
        workload.model,
        workload.batch,
        workload.loss,
        workload.optimizer,
        device=device,
        batch_size=samples,
        name=name or f"{factory.title}-b{samples}-{precision}-{short_name(device)}",
        model_name=factory.title,
        keep=False,
        notes=notes,
        **options,
    )


def _largest_fitting(factory: Factory, size: int, device: torch.device, options: dict[str, Any]) -> int | None:
    quick = {**options, "iterations": 1, "warmup": 1}
    while size >= 1:
        try:
            _build_and_measure(factory, size, None, device, None, quick)
            return size
        except OutOfMemoryError:
            pass
        _release(device)
        size //= 2
    return None


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
