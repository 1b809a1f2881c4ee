"""Recomputed segments: backward runs their forward again, exactly as the first time, in the midst of the user's own
backward.

Forward runs the blocks under saved-tensor hooks that keep nothing: autograd's graph stays as it is and holds empty
placeholders. The first placeholder that backward unpacks runs the whole segment again from its input and fills them
all, in the order in which forward packed them. Backward goes on over the original graph, so the hooks of parameters
fire once, in the user's own backward. A placeholder dies when autograd frees its node, and its tensor with it.

Torch's own checkpoint recomputes one call, from an input that it keeps. The blocks of a segment are called one by one,
by the model, and only the first one's input is kept.

What a block's forward depends on besides its arguments is as it was (`forward_context.py`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from backbeat.errors import InputError
from backbeat.measure.model.chain import tensors_of, version_of
from backbeat.runtime.memory.forward_context import ForwardContext, restored, without_autocast_cache
from backbeat.runtime.memory.offload import KeptTensor, OffloadedTensor, OffloadSchedule, movable

if TYPE_CHECKING:
    from backbeat.runtime.memory.activations import BlockForward


class Placeholder:
    """What autograd holds in place of a saved tensor: empty until the segment has run again."""

    __slots__ = ("__weakref__", "segment", "tensor")

    def __init__(self, segment: SegmentRun) -> None:
        self.segment = segment
        self.tensor: torch.Tensor | None = None


class SavedTensor(NamedTuple):
    """A tensor that autograd saved in forward, and that the second run must save again."""

    placeholder: weakref.ref[Placeholder]
    shape: torch.Size
    dtype: torch.dtype


class OutputIndex(NamedTuple):
    """An argument that is an output of an earlier call in the segment."""

    call: int
    output: int


@dataclass(slots=True)
class SegmentInput:
    """An argument from outside the segment, on the device or on the host."""

    saved: KeptTensor | OffloadedTensor
    requires_grad: bool

    def tensor(self, block: str) -> torch.Tensor:
        if self.saved.changed:
            raise InputError(
                f"the input of block {block!r} was changed in place after the block had read it, and backward needs it "
                "to recompute: do not write into it, or keep the block"
            )
        return self.saved.tensor().detach().requires_grad_(self.requires_grad)


@dataclass(slots=True)
class RecordedCall:
    """One block's call in a segment: what it takes to call it again."""

    block: BlockForward
    arguments: list[Any]
    """Leaves of the nested arguments; tensors as `OutputIndex` or `SegmentInput`."""
    structure: TreeSpec
    context: ForwardContext
    saved: list[SavedTensor] = field(default_factory=list)


class KnownOutput(NamedTuple):
    """An output of one of the segment's blocks, and its version when the last of them returned."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    output: OutputIndex


class SegmentRun:
    """One forward through a recomputed segment: what it takes to run it again."""

    def __init__(self, schedule: OffloadSchedule | None, index: int) -> None:
        self.calls: list[RecordedCall] = []
        self.next_index = index
        """The index in the segment of the block that may come next."""
        self.range_number = schedule.begin_range() if schedule is not None else 0
        self.running = ""
        """The block that is in its forward."""
        self._schedule = schedule
        self._outputs: list[KnownOutput] = []

    def continues(self, tensors: list[torch.Tensor]) -> bool:
        """One of these is an output of this run's blocks, unchanged since."""
        return any(self._output_index(tensor) is not None for tensor in tensors)

    def run(self, block: BlockForward, args: Any, kwargs: Any, offload_input: bool) -> Any:
        """Call a block for the first time."""
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        first = not self.calls
        arguments = [self._recorded(leaf, block.name, offload_input and first) for leaf in leaves]
        call = RecordedCall(block, arguments, structure, ForwardContext.of(block.module, tensors))
        del leaves, tensors
        number = len(self.calls)
        self.calls.append(call)

        def pack(tensor: torch.Tensor) -> Placeholder:
            placeholder = Placeholder(self)
            call.saved.append(SavedTensor(weakref.ref(placeholder), tensor.shape, tensor.dtype))
            return placeholder

        self.running = block.name
        try:
            with without_autocast_cache(), saved_tensors_hooks(pack, _unpack):
                output = block.original(*args, **kwargs)
        finally:
            self.running = ""
        call.context.forget_replaced(block.module)
        if any(isinstance(argument, SegmentInput) and argument.saved.changed for argument in arguments):
            raise InputError(
                f"block {block.name!r} writes into its input: a recomputed segment cannot begin with it; "
                "begin the segment with the block before, or keep this one"
            )
        made = tensors_of(output)
        # A block that writes into an earlier output does so again when it is recomputed, so versions start anew here.
        self._outputs = [
            KnownOutput(known.tensor, version_of(tensor), known.output)
            for known in self._outputs
            if (tensor := known.tensor()) is not None
        ]
        self._outputs += [
            KnownOutput(weakref.ref(tensor), version_of(tensor), OutputIndex(number, index))
            for index, tensor in enumerate(made)
        ]
        self.next_index += 1
        if self._schedule is not None:
            self._schedule.hook_outputs(made, self.range_number)
        return output

    def recompute(self) -> None:
        """Call the blocks again, and fill the placeholders that are still alive."""
        calls, self.calls = self.calls, []
        # A block that follows, where gradients are taken in the middle of forward, begins a run of its own.
        self.next_index = -1
        if self._schedule is not None:
            self._schedule.reached(self.range_number)
        last_use = {
            argument: number
            for number, call in enumerate(calls)
            for argument in call.arguments
            if isinstance(argument, OutputIndex)
        }
        outputs: dict[OutputIndex, torch.Tensor] = {}
        for number, call in enumerate(calls):
            leaves = [_restored_argument(argument, outputs, call.block.name) for argument in call.arguments]
            # References go as soon as they are used, so that memory is free before the block runs.
            call.arguments.clear()
            for index in [index for index in outputs if last_use[index] <= number]:
                del outputs[index]
            args, kwargs = tree_unflatten(leaves, call.structure)
            del leaves
            output = _call_again(call, args, kwargs)
            del args, kwargs
            for position, tensor in enumerate(tensors_of(output)):
                index = OutputIndex(number, position)
                if last_use.get(index, -1) > number:
                    outputs[index] = tensor
            del output

    def _output_index(self, tensor: torch.Tensor) -> OutputIndex | None:
        for known in reversed(self._outputs):
            if known.tensor() is tensor:
                return known.output if version_of(tensor) == known.version else None
        return None

    def _recorded(self, leaf: Any, block: str, offload: bool) -> Any:
        """What stands for an argument until the second run."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        index = self._output_index(leaf)
        if index is not None:
            return index
        # A tensor without history (the batch, a mask) is alive anyway, or small.
        if self._schedule is None or leaf.grad_fn is None:
            return SegmentInput(KeptTensor(leaf, block), leaf.requires_grad)
        if offload and movable(leaf):
            return SegmentInput(self._schedule.offload(leaf, self.range_number, block), leaf.requires_grad)
        kept = KeptTensor(leaf, block)
        self._schedule.keep(leaf, kept)
        return SegmentInput(kept, leaf.requires_grad)


def _restored_argument(argument: Any, outputs: dict[OutputIndex, torch.Tensor], block: str) -> Any:
    if isinstance(argument, OutputIndex):
        return outputs[argument]
    return argument.tensor(block) if isinstance(argument, SegmentInput) else argument


def _call_again(call: RecordedCall, args: Any, kwargs: Any) -> Any:
    name = call.block.name
    count = 0

    def capture(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        number, count = count, count + 1
        if number >= len(call.saved):
            raise InputError(_differs(name, f"it saves more than the {len(call.saved)} tensors it saved in forward"))
        saved = call.saved[number]
        if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
            raise InputError(
                _differs(
                    name,
                    f"saved tensor {number} is {tuple(tensor.shape)} {tensor.dtype}, in forward it was "
                    f"{tuple(saved.shape)} {saved.dtype}",
                )
            )
        kept = tensor.detach()
        placeholder = saved.placeholder()
        if placeholder is not None:
            placeholder.tensor = kept
        return kept

    with restored(name, call.block.module, call.context), saved_tensors_hooks(capture, lambda tensor: tensor):
        output = call.block.original(*args, **kwargs)
    if count != len(call.saved):
        raise InputError(_differs(name, f"it saves {count} tensors, in forward it saved {len(call.saved)}"))
    return output


def _differs(name: str, how: str) -> str:
    return (
        f"block {name!r} does not compute the same a second time: {how}; keep it, or remove what differs "
        "(a cache passed as an argument, a branch on outside state)"
    )


def _unpack(placeholder: Placeholder) -> torch.Tensor:
    if placeholder.tensor is None:
        if placeholder.segment.running:
            raise InputError(
                f"block {placeholder.segment.running!r} takes gradients inside its own forward, where it cannot be "
                "recomputed yet: keep it"
            )
        placeholder.segment.recompute()
        if placeholder.tensor is None:
            raise InputError(
                "a recomputed segment was asked again for tensors that backward had already used: "
                "run backward once per forward"
            )
    return placeholder.tensor
