"""A model's profile without the GPU: the very iteration that is measured, on tensors that have shapes but no data.

A dispatch mode sees every operator of forward, backward and update, and advances two virtual clocks. The host's
advances by the time to submit the operator. The device's advances by what the operator model says of its kernels, which
never start before the host has submitted them. The hooks and marks are the measured profile's own, reading the device's
clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from backbeat.comm.machine import today, versions
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Traffic
from backbeat.errors import BackbeatError, InputError, where_raised
from backbeat.measure.model.estimator import Estimator, VirtualClock, gpu_operators, unpacked_sequences
from backbeat.measure.model.factory import Factory, Workload
from backbeat.measure.model.inputs import MeasureOptions, map_batch, trainable_of
from backbeat.measure.model.observation import Figures, measure_training
from backbeat.measure.model.training_step import (
    PRECISIONS,
    Allocator,
    Marks,
    PhaseMarks,
    Training,
    describe_optimizer,
    make_optimizer,
    rounded,
)
from backbeat.model import ComputeShares, Profile, Source
from backbeat.model.accelerator import operator_model
from backbeat.model.checks import at_least

ANALYTIC_PRECISIONS = (*PRECISIONS, "fp8")
_CPU = torch.device("cpu")
_GPU_CHOICES = ("foreach", "fused", "capturable")
"""Of torch's optimizers: how the update is split into kernels, never what it computes."""


def analytic_profile(
    factory: Factory,
    *,
    gpu: str | None = None,
    tflops: float | None = None,
    gbps: float | None = None,
    batch_size: int | None = None,
    precision: str = "bf16",
    accumulation: int = 1,
    optimizer: str | None = None,
    compiled: bool = False,
    launch_overhead: bool = True,
    name: str | None = None,
    command: str | None = None,
) -> Profile:
    """Build the factory's model without data and compute its profile on a GPU given by name or by peak rates.

    `optimizer` (sgd, adam or adamw) stands in where the factory returns none; SGD with momentum unless said otherwise.
    `compiled` takes the model as torch.compile would run it: memory-bound operators fused, less work for the host.
    Without `launch_overhead` the host is taken to be always ahead.
    """
    if precision not in ANALYTIC_PRECISIONS:
        raise InputError(f"precision is {precision!r}: it must be one of {', '.join(ANALYTIC_PRECISIONS)}")
    at_least("accumulation", accumulation, 1)
    model = operator_model(gpu, precision, tflops=tflops, gbps=gbps, launch_overhead=launch_overhead)
    workload = build_without_data(factory, factory.batch_size(batch_size))
    if workload.optimizer is not None and not isinstance(workload.optimizer, torch.optim.Optimizer):
        raise InputError(
            f"the optimizer of {factory.spec} is a {type(workload.optimizer).__name__}, no torch.optim.Optimizer: its "
            "work cannot be computed from shapes; measure the model, or return no optimizer"
        )
    samples = factory.samples(workload, batch_size, optimizer)
    if samples is None:
        raise InputError(f"the batch of {factory.spec} holds no tensor to count samples in")
    trained_by = workload.optimizer or make_optimizer(optimizer or "sgd", trainable_of(workload.model))
    update = update_of(trained_by)
    workload = replace(workload, optimizer=trained_by)
    figures, estimated = analytic_figures(workload, model, precision, accumulation, compiled)
    title = name or f"{factory.title}-b{samples}-{precision}-{model.accelerator.short_name}"
    if compiled and name is None:
        title += "-compiled"
    notes = [
        *factory.notes,
        "analytic: computed from shapes and peak rates, not measured",
        f"operators: {model.origin}",
        f"update: {update}; memory is counted as its tensors are made and freed",
        "the host is as quick as the one that operators were measured with" if launch_overhead else "the host is ahead",
    ]
    if compiled:
        notes.append("compiled: chains of memory-bound operators are one kernel each, as torch.compile makes them")
    return figures.profile(
        name=title if title.endswith("-analytic") else f"{title}-analytic",
        model=factory.title,
        batch_size=samples,
        precision=precision,
        device=f"{model.accelerator.name} (analytic)",
        accumulation=accumulation,
        source=Source(
            method="analytic",
            command=command,
            date=today(),
            versions=versions(_CPU),
            reference="the vendor's dense peak rates",
        ),
        notes=[*notes, *figures.gradients.left_out],
        optimizer=describe_optimizer(trained_by),
        compiled=compiled,
        blocks=figures.chain.blocks_within(figures.forward_s, figures.backward_s),
        **estimated,
    )


def build_without_data(factory: Factory, size: int | None) -> Workload:
    """On the meta device, where that works; a factory whose code looks at values is built on the CPU."""
    with contextlib.suppress(InputError), torch.device("meta"), _staying_put():
        return factory.build(size, "meta")
    return factory.build(size, "cpu")


def _staying_put() -> contextlib.AbstractContextManager[Any]:
    """`model.to(device)` without the move: everything is on the meta device, and moving there would untie weights."""
    move = torch.nn.Module.to

    def stay(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self if dtype is None else move(self, dtype=dtype)

    return mock.patch.object(torch.nn.Module, "to", stay)


def analytic_figures(
    workload: Workload, model: OperatorModel, precision: str, accumulation: int, compiled: bool = False
) -> tuple[Figures, dict[str, Any]]:
    """One iteration's figures, with the operator model's seconds for every operator; and what else the estimator says,
    as fields of a profile."""
    clock = VirtualClock()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    estimator = Estimator(model, clock, precision, compiled)
    update = update_of(workload.optimizer)
    module, batch, optimizer = _without_data(workload, mode)
    trainable = trainable_of(module)
    training = _AnalyticTraining(
        model=module,
        batch=batch,
        loss=workload.loss,
        optimizer=optimizer or torch.optim.SGD(trainable, lr=1e-4, momentum=0.9, foreach=False),
        device=_CPU,
        # Autocast on the CPU casts the same products as on a GPU; what counts is the width, so fp16 passes for bf16.
        precision="bf16" if precision in ("bf16", "fp16", "fp8") else "fp32",
        accumulation=accumulation,
        scaler=None,
        clock=clock,
        estimator=estimator,
        kernels=update,
    )
    try:
        with (
            mode,
            estimator,
            gpu_operators(estimator.paused),
            unpacked_sequences(),
            _parameters_on_host(module, estimator),
        ):
            figures = measure_training(training, MeasureOptions(iterations=1, warmup=1))
    except Exception as error:
        cause = error.__cause__ if isinstance(error, BackbeatError) else error
        if isinstance(cause, (DataDependentOutputException, DynamicOutputShapeException)):
            raise InputError(f"the model's work depends on its data ({cause}): measure it instead") from None
        if isinstance(error, BackbeatError):
            raise
        raise InputError(f"running the model without data raised {where_raised(error)}") from error
    total = sum(estimator.by_family.values())
    shares = {family: round(seconds / total, 6) for family, seconds in estimator.by_family.items()} if total else None
    return figures, {
        "compute_shares": None if shares is None else ComputeShares(**shares),
        "host_s": training.submitting_s[-1] if model.host.view_s else None,
    }


def update_of(optimizer: Any) -> str:
    """How a GPU runs the update: fused, foreach (torch's choice unless told otherwise) or loop."""
    if optimizer is None:
        return "foreach"
    groups = optimizer.param_groups
    if any(group.get("fused") for group in groups):
        return "fused"
    return "loop" if any(group.get("foreach", False) is False for group in groups) else "foreach"


@dataclass(frozen=True, kw_only=True)
class _AnalyticTraining(Training):
    """Training that tells the estimator which phase it is in."""

    estimator: Estimator
    kernels: str
    submitting_s: list[float] = field(default_factory=list)
    """The host's time of each iteration."""

    @property
    def allocator(self) -> Allocator:
        return self.estimator.allocator

    def iterate(self, observer: PhaseMarks | None = None) -> Marks:
        begin_s = self.estimator.clock.submitted_s
        marks = super().iterate(observer)
        self.submitting_s.append(rounded(self.estimator.clock.submitted_s - begin_s))
        return marks

    def forward(self) -> torch.Tensor:
        loss = super().forward()
        self.estimator.flush()
        return loss

    def update(self) -> None:
        """An optimizer over all tensors at once is a few large kernels; the loop is estimated like any operator."""
        estimator = self.estimator
        estimator.flush()
        before = dict(estimator.by_family)
        if self.kernels == "loop":
            super().update()
            estimator.flush()
        else:
            estimator.updated_bytes = 0.0
            parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            super().update()
            moved, estimator.updated_bytes = estimator.updated_bytes, None
            kind = f"{self.kernels}/{'adam' if 'Adam' in type(self.optimizer).__name__ else 'sgd'}"
            if self.kernels == "fused":
                moved = self._fused_bytes(parameters)
            host_s = estimator.model.host.step_s(kind, len(parameters))
            estimator.clock.submit(host_s, estimator.model.seconds(Traffic(f"update/{kind}", moved)))
        # The shares are of forward and backward.
        estimator.by_family = before

    def _fused_bytes(self, parameters: list[torch.Tensor]) -> float:
        """One kernel reads parameter, gradient and state, and writes parameter and state."""
        total = 0.0
        for parameter in parameters:
            state = [value for value in self.optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
            total += 3 * parameter.nbytes + 2 * sum(value.nbytes for value in state)
        return total


@contextlib.contextmanager
def _parameters_on_host(model: torch.nn.Module, estimator: Estimator) -> Iterator[None]:
    """What the host spends on modules and parameters beside operators; a compiled forward has no modules left."""
    each_s = estimator.model.host.parameter_s

    def called(module: torch.nn.Module, args: Any) -> None:
        estimator.clock.submit(each_s * len(module._parameters), 0.0)

    def accumulated(parameter: torch.Tensor) -> None:
        estimator.clock.submit(each_s, 0.0)

    with contextlib.ExitStack() as hooks:
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(accumulated))
        if estimator.fusion is None:
            hooks.enter_context(torch.nn.modules.module.register_module_forward_pre_hook(called))
        yield


def _without_data(
    workload: Workload, mode: FakeTensorMode
) -> tuple[torch.nn.Module, Any, torch.optim.Optimizer | None]:
    """Model, batch and optimizer with every tensor replaced by its shape, on a CPU that only pretends."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=False)
            empty.requires_grad_(tensor.requires_grad)
            fakes[id(tensor)] = empty
        return fakes[id(tensor)]

    for module in workload.model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake(tensor)
    batch = map_batch(workload.batch, lambda item: fake(item) if isinstance(item, torch.Tensor) else item)
    optimizer = workload.optimizer
    if optimizer is not None:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = [fake(parameter) for parameter in group["params"]]
            # Kernels over many tensors are for a GPU; the estimator takes what they do from the operations one by one.
            group.update({choice: False for choice in _GPU_CHOICES if choice in group})
    return workload.model, batch, optimizer
