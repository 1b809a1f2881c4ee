"""Where a rank's memory goes: parameters, gradients, optimizer, buffers, and what forward saves for backward, by
gradient and by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from backbeat.measure.model.chain import ChainRecorder, untraced
from backbeat.measure.model.inputs import Gradients, tensors_in
from backbeat.measure.model.training_step import Owner, Training
from backbeat.model import Memory


def measure_memory(training: Training, gradients: Gradients, owners: list[Owner]) -> tuple[Memory, dict[int, int]]:
    """Memory by kind. One iteration under saved-tensor hooks for the activations, a plain one for the peak."""
    model, device = training.model, training.device
    held = held_tensors(training)
    with saved_bytes(owners, held) as saved:
        loss = training.forward()
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    training.optimizer.zero_grad(set_to_none=True)
    # Without scalars: step counters often live on the host.
    states = (tensor for tensor in tensors_in(training.optimizer.state) if tensor.dim() > 0)
    state = storage_bytes(tensor for tensor in states if tensor.device.type == device.type)
    convolves = any(isinstance(child, torch.nn.modules.conv._ConvNd) for child in model.modules())
    gradient_bytes = sum(gradients.sizes)
    steady = storage_bytes(held) + state
    peak = steady + gradient_bytes + saved.total()
    if training.allocator is not None:
        training.clock.synchronize()
        level = training.allocator.level()
        training.allocator.reset()
        training.iterate()
        training.clock.synchronize()
        # Without a device nothing counts what was there before; with one, workspaces stay as well.
        steady = level if device.type == "cuda" else steady
        peak = steady + training.allocator.peak() - level
    memory = Memory(
        parameter_bytes=storage_bytes(model.parameters()),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=state,
        buffer_bytes=storage_bytes(model.buffers()),
        activation_bytes=saved.total(),
        steady_bytes=steady,
        peak_bytes=peak,
        batch_bytes=storage_bytes(tensors_in(training.batch)),
        cudnn_benchmark=device.type == "cuda" and torch.backends.cudnn.benchmark and convolves,
    )
    return memory, {gradient: size for gradient, size in saved.items() if gradient is not None}


def held_tensors(training: Training) -> list[torch.Tensor]:
    """What is there whatever autograd saves."""
    return [*training.model.parameters(), *training.model.buffers(), *tensors_in(training.batch)]


@contextmanager
def saved_bytes(owners: list[Owner], alive: Iterable[torch.Tensor]) -> Iterator[Counter[int | None]]:
    """A context around one forward that weighs what autograd saves, by the owning module that was running.

    What is alive anyway (parameters, buffers, the batch) is not counted. Under checkpointing only what the checkpoints
    keep reaches these hooks, so recomputed activations are not counted either.
    """
    sizes: Counter[int | None] = Counter()
    seen = {storage_key(tensor) for tensor in alive}
    running = owners[0][1] if owners else None

    def begin(gradient: int, _module: torch.nn.Module, _arguments: Any) -> None:
        nonlocal running
        running = gradient

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor)
        if key and key not in seen:
            seen.add(key)
            sizes[running] += storage_size(tensor)
        # A node that saved its own output through a hook would keep itself alive for ever; the detached one does not.
        return tensor.detach()

    with ExitStack() as hooks:
        for module, gradient in owners:
            hooks.enter_context(module.register_forward_pre_hook(untraced(partial(begin, gradient))))
        hooks.enter_context(saved_tensors_hooks(untraced(pack), untraced(lambda saved: saved)))
        yield sizes


def storage_key(tensor: torch.Tensor) -> int:
    """The same for all views of one storage, while it lives; 0 for tensors without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def storage_size(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's whole storage."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the tensors occupy, each storage counted once however many views it has."""
    return sum({storage_key(tensor): storage_size(tensor) for tensor in tensors}.values())


@dataclass
class BlockSizes:
    """Bytes of one block."""

    input: int = 0
    output: int = 0
    saved: int = 0
    kept: int = 0
    """All that autograd keeps and no block before it does, input and output included."""
    saves_input: bool = False
    saves_output: bool = False


class BlockBytes(ChainRecorder):
    """A context around one forward that weighs its blocks, each storage once."""

    def __init__(self, blocks: dict[str, torch.nn.Module], alive: Iterable[torch.Tensor]) -> None:
        super().__init__(blocks)
        self.sizes: dict[str, BlockSizes] = {}
        self.outside_saved = 0
        self._alive = {storage_key(tensor) for tensor in alive}
        # A storage's address is its identity while it lives: whatever was looked at is held until the end.
        self._held: list[torch.Tensor] = []
        self._entered: set[int] = set()
        self._counted: set[int] = set()
        self._running: str | None = None
        self._saved: dict[int, int] = {}
        self._between: dict[int, int] = {}
        self._ends: set[int] = set()

    def __enter__(self) -> BlockBytes:
        super().__enter__()
        self.enter_context(saved_tensors_hooks(untraced(self._pack), untraced(lambda saved: saved)))
        self.callback(self._held.clear)
        return self

    @property
    def saved_since_block(self) -> int:
        """What was saved since the last block: once forward is over, the head's."""
        return sum(size for key, size in self._between.items() if key not in self._ends)

    def begin(self, name: str, inputs: list[torch.Tensor]) -> None:
        super().begin(name, inputs)
        self.outside_saved += self.saved_since_block
        self._counted.update(self._between)
        self._between = {}
        self._running, self._saved = name, {}
        size = self.sizes.setdefault(name, BlockSizes())
        for index, tensor in enumerate(inputs):
            key = storage_key(tensor)
            # Beside the first, a tensor is held once however many blocks it enters (masks, an encoder's result).
            if key not in self._alive and (index == 0 or key not in self._entered):
                self._entered.add(key)
                size.input += storage_size(tensor)
            self._held.append(tensor.detach())

    def end(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        super().end(name, inputs, outputs)
        size = self.sizes[name]
        into = {storage_key(tensor) for tensor in inputs} - self._alive
        out = {storage_key(tensor) for tensor in outputs} - self._alive
        self._held += [tensor.detach() for tensor in outputs]
        size.output += storage_bytes(tensor for tensor in outputs if storage_key(tensor) in out)
        # An input that became the output in place is not there twice.
        size.saves_input |= bool(inputs) and storage_key(inputs[0]) in (into - out) & self._saved.keys()
        size.saves_output |= any(key in out for key in self._saved)
        for key, saved in self._saved.items():
            if key not in self._counted:
                size.kept += saved
                size.saved += saved if key not in into and key not in out else 0
        self._counted.update(self._saved)
        self._ends = out
        self._running, self._saved = None, {}

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()
        key = storage_key(tensor)
        if key and key not in self._alive:
            self._held.append(kept)
            if self._running is not None:
                self._saved[key] = storage_size(tensor)
            elif key not in self._counted:
                self._between[key] = storage_size(tensor)
        return kept


def cast_inputs(blocks: dict[str, torch.nn.Module], dtype: torch.dtype) -> ExitStack:
    """A context in which every block gets its floating-point inputs in one dtype, as FSDP2 casts those of a unit."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def cast_all(_module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, (args, kwargs))

    stack = ExitStack()
    for module in blocks.values():
        stack.enter_context(module.register_forward_pre_hook(untraced(cast_all), with_kwargs=True))
    return stack


def block_parameters(blocks: dict[str, torch.nn.Module]) -> dict[str, tuple[int, str | None]]:
    """Bytes and dtype of each block's parameters, in the order of forward: a tied weight counts in the first block that
    holds it.

    >>> tied = torch.nn.Linear(2, 3, bias=False)
    >>> block_parameters({"first": tied, "last": torch.nn.Sequential(tied, torch.nn.Linear(3, 1))})["last"]
    (16, 'float32')
    """
    seen: set[int] = set()
    found: dict[str, tuple[int, str | None]] = {}
    for name, block in blocks.items():
        mine = [parameter for parameter in block.parameters() if id(parameter) not in seen]
        seen.update(id(parameter) for parameter in mine)
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in mine})
        found[name] = sum(parameter.nbytes for parameter in mine), ", ".join(dtypes) or None
    return found
