"""Moves two virtual clocks on by what every operator takes: the host's to submit it, the device's to run it.

`Fusion` is what a compiler makes of memory-bound operators. `gpu_operators` replaces what a model runs otherwise on the
CPU while its work is counted.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from backbeat.comm.clock import Clock, Mark
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Product, Traffic, Work, element_bytes, family_of, in_fp8
from backbeat.errors import InputError
from backbeat.measure.model.chain import in_backward, tensors_of
from backbeat.measure.model.operator_work import work_of

_ALIGNED = 16
# Reductions across rows, sorting and scattering are kernels of their own.
_ALONE = ("sum_rows", "sum", "embedding_backward", "max_pool", "max_pool_backward", "avg_pool_backward")
_aten = torch.ops.aten
_WIDE_UNDER_AUTOCAST = (
    _aten.pow.Tensor_Scalar, _aten.pow.Tensor_Tensor, _aten.rsqrt.default, _aten.reciprocal.default, _aten.exp.default,
    _aten.log.default, _aten.softmax.int, _aten.log_softmax.int, _aten.layer_norm.default, _aten.group_norm.default,
    _aten.cumsum.default, _aten.prod.default, _aten.mse_loss.default, _aten.l1_loss.default,
    _aten.smooth_l1_loss.default,
)  # fmt: skip
"""Of those that autocast runs in 32 bits on a GPU."""


class VirtualClock(Clock):
    """Two clocks that stand still until they are told how long something took."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """The device's."""
        self.submitted_s = 0.0
        """The host's."""

    def mark(self) -> Mark:
        return self.now_s

    def host_s(self) -> float:
        return self.now_s

    def submit(self, host_s: float, device_s: float) -> None:
        """The host takes its time; then the device, as soon as it is free, takes its own."""
        self.submitted_s += host_s
        if device_s > 0:
            self.now_s = max(self.now_s, self.submitted_s) + device_s


class CountingAllocator:
    """Bytes of all storages that operators have made and that are still held somewhere."""

    def __init__(self) -> None:
        self._level = self._peak = 0
        self._held: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._held:
                size = storage.nbytes()
                self._held[key] = weakref.ref(storage, partial(self._freed, key, size))
                self._level += size
                self._peak = max(self._peak, self._level)

    def _freed(self, key: int, size: int, _: Any) -> None:
        del self._held[key]
        self._level -= size

    def level(self) -> int:
        return self._level

    def peak(self) -> int:
        return self._peak

    def reset(self) -> None:
        self._peak = self._level


class Estimator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator under it moves the clock on."""

    def __init__(self, model: OperatorModel, clock: VirtualClock, precision: str, compiled: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.clock = clock
        self.precision = precision
        self.fusion = Fusion() if compiled else None
        self.allocator = CountingAllocator()
        self.working = True
        self.by_family = dict.fromkeys(("matmul", "attention", "memory"), 0.0)
        """Seconds of the device in forward and backward, of all iterations."""
        self.updated_bytes: float | None = None
        """While an optimizer's operators are part of large kernels: what they move."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and self.updated_bytes is not None:
            # The number of the step, which an optimizer corrects its averages by: any will do.
            return 1.0
        if "grouped_mm" in func._schema.name:
            raise InputError(
                "the model multiplies by experts in groups, whose sizes are data: no rule says what that takes; ask "
                "for the model by its config.json, as a layout, or measure it"
            )
        result = func(*args, **kwargs)
        if func.namespace != "aten" or not self.working:
            return result
        if func.namespace == "aten" and not all(each.alias_info for each in func._schema.returns):
            self.allocator.add(tensors_of(result))
        works = work_of(func, args, kwargs, result, "fp32" if self.precision == "fp32" else "tf32")
        if self.updated_bytes is not None:
            self.updated_bytes += sum(work.bytes for work in works if isinstance(work, Traffic))
            return result
        if self.precision == "fp8":
            works = in_fp8(works)
        if self.fusion is not None:
            works = self.fusion.add(works, tensors_of((args, kwargs)), tensors_of(result)) if works else ()
        self.submit(works)
        return result

    def submit(self, works: tuple[Work, ...]) -> None:
        """Its first kernel tells what submitting an operator takes; a view has none."""
        host = self.model.host
        if self.fusion is not None:
            host_s = host.compiled_s * len(works)
        elif not works:
            host_s = host.view_s
        else:
            host_s = (host.backward_s if in_backward() else host.forward_s).get(family_of(works[0]), 0.0)
        self.clock.submit(host_s, 0.0)
        for work in works:
            seconds = self.model.sustained_s(work)
            family = family_of(work)
            self.by_family["matmul" if family == "convolution" else family] += seconds
            self.clock.submit(0.0, seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is no work of its own on a GPU."""
        self.working = False
        try:
            yield
        finally:
            self.working = True

    def flush(self) -> None:
        """End the chain that is being fused."""
        if self.fusion is not None:
            self.submit(self.fusion.flush())


class Fusion:
    """Memory-bound operators as a compiler runs them: chains, each one kernel.

    A chain is a run of operators over one iteration space with no matrix product, convolution or attention in between.
    It reads each tensor from outside once and writes what its last operator makes. What its other operators make is
    written only where an operator that is no part of any chain reads it later: a later chain computes it again from
    what it came from, which takes as much reading. Operands of a product whose rows begin at odd addresses are padded
    first.

    `add` and `flush` return the work that is now complete.
    """

    def __init__(self) -> None:
        self._elements = 0
        self._read: dict[int, int] = {}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._last: set[int] = set()
        self._unwritten: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, works: tuple[Work, ...], inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> tuple[Work, ...]:
        if len(works) != 1 or not isinstance(works[0], Traffic) or works[0].kind in _ALONE:
            written = sum(
                self._unwritten.pop(storage)[1] for storage in _by_storage(inputs) if storage in self._unwritten
            )
            return (*self.flush(), *([Traffic("pointwise", written)] if written else []), *_padded(works))
        done: tuple[Work, ...] = ()
        elements = max(tensor.numel() for tensor in (*inputs, *outputs))
        if self._made and elements != self._elements and not set(_by_storage(inputs)) <= set(self._made):
            done = self.flush()
        self._elements = max(self._elements, elements)
        for storage, tensor in _by_storage(inputs).items():
            if storage not in self._made:
                self._read[storage] = tensor.nbytes
        self._last = set()
        for storage, tensor in _by_storage(outputs).items():
            self._made[storage] = (StorageWeakRef(tensor.untyped_storage()), tensor.nbytes)
            self._last.add(storage)
        return done

    def flush(self) -> tuple[Work, ...]:
        """The chain so far, as one kernel."""
        if not self._made:
            return ()
        moved = sum(self._read.values()) + sum(self._made[storage][1] for storage in self._last)
        kept = {storage: made for storage, made in (self._unwritten | self._made).items() if not made[0].expired()}
        self._unwritten = {storage: made for storage, made in kept.items() if storage not in self._last}
        self._elements, self._read, self._made, self._last = 0, {}, {}, set()
        return (Traffic("pointwise", moved),)


def _padded(works: tuple[Work, ...]) -> tuple[Work, ...]:
    """Products with aligned rows, and the copies that it takes."""
    found: list[Work] = []
    for work in works:
        if isinstance(work, Product) and work.alignment < _ALIGNED:
            each = element_bytes(work.precision)
            found.append(Traffic("strided", 2 * each * work.batch * (work.m * work.k + work.k * work.n), int(each)))
            work = replace(work, alignment=_ALIGNED)
        found.append(work)
    return tuple(found)


def _by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """By storage: a view is the tensor that it looks at."""
    return {tensor.untyped_storage()._cdata: tensor for tensor in tensors}


def unpacked_sequences() -> AbstractContextManager[Any]:
    """Transformers looks at positions to see whether sequences are packed; without data they are taken not to be."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "find_packed_sequence_indices"):
        return contextlib.nullcontext()
    return mock.patch.object(masking, "find_packed_sequence_indices", return_value=None)


@contextlib.contextmanager
def gpu_operators(paused: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Operators as a GPU has them, where the CPU has others. `paused` is entered around what a GPU does not do.

    One kernel on a GPU and several on the CPU: dropout, and attention with dropout or with shared keys. In 32 bits
    under a GPU's autocast but not under the CPU's: powers, norms and the like.

    Replaced where every call arrives, those of modules and of recomputation in backward included: a checkpointed block
    must save in recomputation what it saved in forward.
    """
    attention = _aten.scaled_dot_product_attention.default

    def without_dropout(
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if enable_gqa and query.shape[1] != key.shape[1]:
            with paused():
                key, value = (_SharedHeads.apply(each, query.shape[1]) for each in (key, value))
        return attention.decompose(query, key, value, mask, 0.0, is_causal, scale=scale)

    def one_kernel(tensor: Any, p: float, train: bool) -> Any:
        return _aten.native_dropout(tensor, p, train)[0] if train and p > 0 else tensor

    def in_32_bits(operator: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return operator(*tree_map(_widened, args), **tree_map(_widened, kwargs))

        return call

    library = torch.library.Library("aten", "IMPL")
    library.impl(attention, without_dropout, "AutogradCPU")
    library.impl("dropout", one_kernel, "AutogradCPU")
    for operator in _WIDE_UNDER_AUTOCAST:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "AutocastCPU"):
            library.impl(operator, in_32_bits(operator), "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


class _SharedHeads(torch.autograd.Function):
    """Keys or values as if each head of queries had its own, in the memory that they are in; gradients are added up."""

    @staticmethod
    def forward(ctx: Any, shared: torch.Tensor, heads: int) -> torch.Tensor:
        ctx.shared = shared.shape[1]
        batch, _, length, width = shared.stride()
        return shared.as_strided((shared.shape[0], heads, *shared.shape[2:]), (batch, 0, length, width))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].unflatten(1, (ctx.shared, -1)).sum(2), None


def _widened(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value
