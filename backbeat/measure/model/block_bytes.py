"""What goes in and out of every block of a model, and what autograd saves in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from backbeat.measure.model.chain import ChainRecorder, Hooks, untraced
from backbeat.measure.model.memory_by_kind import storage_bytes, storage_key, storage_size


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
        self.head_saved = 0
        self.outside_saved = 0
        self._alive = {storage_key(tensor) for tensor in alive}
        # A storage's address is its identity while it lives: whatever was looked at is held until the end.
        self._held: list[torch.Tensor] = []
        self._entered: set[int | None] = set()
        self._counted: set[int | None] = set()
        self._running: str | None = None
        self._saved: dict[int | None, int] = {}
        self._between: dict[int | None, int] = {}
        self._ends: set[int | None] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(untraced(self._pack), untraced(lambda saved: saved))

    def __enter__(self) -> Any:
        super().__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        super().__exit__(*exception)
        self._held.clear()

    def finish(self) -> None:
        """Forward is over: what was saved since the last block is the head's."""
        self.head_saved = sum(size for key, size in self._between.items() if key not in self._ends)

    def begin(self, name: str, inputs: list[torch.Tensor]) -> None:
        super().begin(name, inputs)
        self.outside_saved += sum(size for key, size in self._between.items() if key not in self._ends)
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
        if key is not None and key not in self._alive:
            self._held.append(kept)
            if self._running is not None:
                self._saved[key] = storage_size(tensor)
            elif key not in self._counted:
                self._between[key] = storage_size(tensor)
        return kept


class CastInputs(Hooks):
    """A context in which every block gets its floating-point inputs in one dtype, as FSDP2 casts those of a unit."""

    def __init__(self, blocks: dict[str, torch.nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self._blocks, self._dtype = blocks, dtype

    def __enter__(self) -> CastInputs:
        for module in self._blocks.values():
            self._handles.append(module.register_forward_pre_hook(untraced(self._cast_all), with_kwargs=True))
        return self

    def _cast_all(self, _module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(self._cast, (args, kwargs))

    def _cast(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@dataclass(frozen=True)
class BlockParameters:
    """What the parameters of one block take."""

    bytes: int
    dtype: str | None


def block_parameters(blocks: dict[str, torch.nn.Module]) -> dict[str, BlockParameters]:
    """Of every block, in the order of forward: a tied weight counts in the first block that holds it.

    >>> tied = torch.nn.Linear(2, 3, bias=False)
    >>> block_parameters({"first": tied, "last": torch.nn.Sequential(tied, torch.nn.Linear(3, 1))})["last"]
    BlockParameters(bytes=16, dtype='float32')
    """
    seen: set[int] = set()
    found = {}
    for name, block in blocks.items():
        mine = [parameter for parameter in block.parameters() if id(parameter) not in seen]
        seen.update(id(parameter) for parameter in mine)
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in mine})
        size = sum(parameter.numel() * parameter.element_size() for parameter in mine)
        found[name] = BlockParameters(size, ", ".join(dtypes) or None)
    return found
