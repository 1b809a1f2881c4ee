"""A model's profile without the GPU: the very iteration that is measured, on tensors that have shapes but no data.

A dispatch mode sees every operation of forward, backward and update, and moves a virtual clock on by what the roofline
says it takes. The hooks and marks are the measured profile's own, reading that clock instead.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from backbeat.comm.clock import HostClock
from backbeat.comm.machine import today, versions
from backbeat.cost.roofline import Roofline, roofline
from backbeat.errors import BackbeatError, InputError
from backbeat.measure.model.batches import map_batch, samples_in
from backbeat.measure.model.factory import Factory, Workload
from backbeat.measure.model.observation import Figures, take
from backbeat.measure.model.operator_work import work_of
from backbeat.measure.model.precision import PRECISIONS
from backbeat.measure.model.training_step import Training, where_raised
from backbeat.model import Profile, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backbeat.comm.clock import Mark

_CPU = torch.device("cpu")
_GPU_CHOICES = ("foreach", "fused", "capturable")
"""Of torch's optimizers: how the update is split into kernels, never what it computes."""


class VirtualClock(HostClock):
    """A clock that stands still until it is told how long something took."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> Mark:
        return self.now_s

    def host_s(self) -> float:
        return self.now_s


class Estimator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation under it moves the clock on."""

    def __init__(self, roof: Roofline, clock: VirtualClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.roof = roof
        self.clock = clock
        self.fused = False
        """Whether operations are part of one large kernel, as the optimizer's are on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.fused and func is torch.ops.aten._local_scalar_dense.default:
            # The number of the step, which an optimizer corrects its averages by: any will do.
            return 1.0
        result = func(*args, **kwargs)
        work = work_of(func, args, kwargs, result)
        self.clock.now_s += self.roof.seconds(replace(work, optimizer=True) if self.fused else work)
        return result


def analytic_profile(
    factory: Factory,
    *,
    gpu: str | None = None,
    tflops: float | None = None,
    gbps: float | None = None,
    batch_size: int | None = None,
    precision: str = "bf16",
    accumulation: int = 1,
    name: str | None = None,
    command: str | None = None,
) -> Profile:
    """Build the factory's model without data and compute its profile on a GPU given by name or by peak rates."""
    if precision not in PRECISIONS:
        raise InputError(f"precision is {precision!r}: it must be one of {', '.join(PRECISIONS)}")
    if accumulation < 1:
        raise InputError(f"accumulation is {accumulation}: it must be 1 or more")
    roof = roofline(gpu, precision, tflops=tflops, gbps=gbps)
    size = factory.batch_size(batch_size)
    workload = build_without_data(factory, size)
    if workload.optimizer is not None and not isinstance(workload.optimizer, torch.optim.Optimizer):
        raise InputError(
            f"the optimizer of {factory.spec} is a {type(workload.optimizer).__name__}, no torch.optim.Optimizer: its "
            "work cannot be computed from shapes; measure the model, or return no optimizer"
        )
    samples = size or samples_in(workload.batch)
    if samples is None:
        raise InputError(f"the batch of {factory.spec} holds no tensor to count samples in")
    if batch_size is not None and samples != batch_size:
        raise InputError(f"{factory.spec} takes no batch_size and its batch holds {samples} samples, not {batch_size}")
    figures = analytic_figures(workload, roof, precision, accumulation)
    return _document(
        factory,
        figures,
        roof,
        samples,
        precision,
        accumulation,
        name,
        command,
        "SGD with momentum (none given)" if workload.optimizer is None else type(workload.optimizer).__name__,
    )


def build_without_data(factory: Factory, size: int | None) -> Workload:
    """On the meta device, where that works; a factory whose code looks at values is built on the CPU."""
    with contextlib.suppress(InputError), torch.device("meta"), _staying_put():
        return factory.build(size, "meta")
    return factory.build(size, "cpu")


@contextlib.contextmanager
def _staying_put() -> Iterator[None]:
    """`model.to(device)` without the move: everything is on the meta device, and moving there would untie weights."""
    move = torch.nn.Module.to

    def stay(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self if dtype is None else move(self, dtype=dtype)

    torch.nn.Module.to = stay  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.to = move  # type: ignore[method-assign]


def analytic_figures(workload: Workload, roof: Roofline, precision: str, accumulation: int) -> Figures:
    """One iteration's figures, with the roofline's seconds for every operation."""
    clock = VirtualClock()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    estimator = Estimator(roof, clock)
    model, batch, optimizer = _without_data(workload, mode)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise InputError("no parameter of the model has requires_grad: there are no gradients to time; unfreeze some")
    if optimizer is None:
        optimizer = torch.optim.SGD(trainable, lr=1e-4, momentum=0.9, foreach=False)
    training = _AnalyticTraining(
        model=model,
        batch=batch,
        loss=workload.loss,
        optimizer=optimizer,
        device=_CPU,
        # Autocast on the CPU casts the same products as on a GPU; what counts is the width, so fp16 passes for bf16.
        precision="bf16" if precision in ("bf16", "fp16") else "fp32",
        accumulation=accumulation,
        scaler=None,
        clock=clock,
        estimator=estimator,
    )
    try:
        with mode, estimator, _fused_attention():
            return take(training, 1, 1, None)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, BackbeatError) else error
        if isinstance(cause, (DataDependentOutputException, DynamicOutputShapeException)):
            raise InputError(f"the model's work depends on its data ({cause}): measure it instead") from None
        if isinstance(error, BackbeatError):
            raise
        raise InputError(f"running the model without data raised {where_raised(error)}") from error


@dataclass(frozen=True, kw_only=True)
class _AnalyticTraining(Training):
    """Its optimizer is estimated as the few large kernels that a GPU runs."""

    estimator: Estimator

    def update(self) -> None:
        self.estimator.fused = True
        super().update()
        self.estimator.fused = False


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    """Attention with dropout is one fused kernel on a GPU; on the CPU only attention without dropout is.

    Replaced where every call arrives, those of modules and of recomputation in backward included: a checkpointed block
    must save in recomputation what it saved in forward.
    """
    attention = torch.ops.aten.scaled_dot_product_attention.default

    def without_dropout(
        query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **rest: Any
    ) -> Any:
        return attention.decompose(query, key, value, mask, 0.0, is_causal, **rest)

    library = torch.library.Library("aten", "IMPL")
    library.impl(attention, without_dropout, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()


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


def _document(
    factory: Factory,
    figures: Figures,
    roof: Roofline,
    samples: int,
    precision: str,
    accumulation: int,
    name: str | None,
    command: str | None,
    optimizer: str,
) -> Profile:
    title = name or f"{factory.title}-b{samples}-{precision}-{roof.device.name}"
    notes = [
        "analytic: computed from shapes and peak rates, not measured",
        f"roofline of {roof.device.title}: {roof.efficiency}",
        f"optimizer: {optimizer}; peak memory is the sum of its kinds; the host is taken to keep up",
    ]
    if factory.description:
        notes.insert(0, f"{factory.spec}: {factory.description}")
    notes += figures.gradients.left_out
    return figures.profile(
        name=title if title.endswith("-analytic") else f"{title}-analytic",
        model=factory.title,
        batch_size=samples,
        precision=precision,
        device=f"{roof.device.title} (analytic)",
        accumulation=accumulation,
        source=Source(
            method="analytic",
            command=command,
            date=today(),
            versions=versions(_CPU),
            reference=roof.device.reference,
        ),
        notes=notes,
    )
