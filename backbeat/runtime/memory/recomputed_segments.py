"""Recomputed segments, without running autograd inside autograd.

Forward runs the blocks one by one under saved-tensor hooks that keep nothing: autograd's graph stays flat and holds
empty holders. The first holder that backward opens runs the whole segment again from its input and fills them all, in
the order in which forward packed them. Backward goes on over the original graph, so parameters' hooks fire once, in the
graph task that the user started. A holder dies when autograd lets go of its node, and the recomputed tensor with it.
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
from backbeat.runtime.memory.offload import Away, Tape, movable
from backbeat.runtime.memory.rerun import Surroundings, as_before, uncached

if TYPE_CHECKING:
    from backbeat.runtime.memory.activations import BlockForward


class Holder:
    """What autograd holds in place of a tensor: empty until its frame has been computed again."""

    __slots__ = ("__weakref__", "frame", "tensor")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.tensor: torch.Tensor | None = None


class Slot(NamedTuple):
    """An argument that is an output of an earlier block of the frame."""

    call: int
    output: int


@dataclass(slots=True, weakref_slot=True, eq=False)
class Here:
    """An argument from outside the frame, held where it is."""

    value: torch.Tensor
    version: int
    requires_grad: bool

    def tensor(self, by: str) -> torch.Tensor:
        if version_of(self.value) != self.version:
            raise InputError(
                f"the input of block {by!r} was changed in place after the block had read it, and backward needs it "
                "to recompute: do not write into it, or keep the block"
            )
        return self.value.detach().requires_grad_(self.requires_grad)

    @property
    def changed(self) -> bool:
        return version_of(self.value) != self.version


@dataclass(slots=True)
class Elsewhere:
    """An argument from outside the frame that waits on the host."""

    away: Away
    requires_grad: bool

    def tensor(self, by: str) -> torch.Tensor:
        return self.away.tensor().requires_grad_(self.requires_grad)

    @property
    def changed(self) -> bool:
        return self.away.parcel.changed


class Packed(NamedTuple):
    """A tensor that autograd saved: who holds its place, and what it must look like when it comes again."""

    holder: weakref.ref[Holder]
    shape: torch.Size
    dtype: torch.dtype


@dataclass(slots=True)
class Call:
    """One block's call in a frame."""

    block: BlockForward
    leaves: list[Any]
    spec: TreeSpec
    surroundings: Surroundings
    packed: list[Packed] = field(default_factory=list)


class Known(NamedTuple):
    """A tensor that a frame's blocks have made, as it was when the last of them returned."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    slot: Slot


class Frame:
    """One use of a segment: what it takes to run it again."""

    __slots__ = ("__weakref__", "_known", "_tape", "_used", "calls", "next_place", "running", "unit")

    def __init__(self, tape: Tape | None) -> None:
        self.calls: list[Call] = []
        self.next_place = 0
        self.unit = tape.begin_unit() if tape is not None else 0
        self.running = ""
        """The block that is in its forward."""
        self._tape = tape
        self._known: list[Known] = []
        self._used: set[Slot] = set()

    def continues(self, tensors: list[torch.Tensor]) -> bool:
        """One of these is what a block of this frame made, and nobody has written into it since."""
        return any(self._slot(tensor) is not None for tensor in tensors)

    def run(self, block: BlockForward, args: Any, kwargs: Any, offload_input: bool) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        first = not self.calls
        held = [self._hold(leaf, block.name, offload_input and first) for leaf in leaves]
        call = Call(block, held, spec, Surroundings.of(block.module, tensors))
        del leaves, tensors
        place = len(self.calls)
        self.calls.append(call)

        def pack(tensor: torch.Tensor) -> Holder:
            holder = Holder(self)
            call.packed.append(Packed(weakref.ref(holder), tensor.shape, tensor.dtype))
            return holder

        self.running = block.name
        try:
            with uncached(), saved_tensors_hooks(pack, _unpack):
                output = block.original(*args, **kwargs)
        finally:
            self.running = ""
        if any(isinstance(leaf, (Here, Elsewhere)) and leaf.changed for leaf in held):
            raise InputError(
                f"block {block.name!r} writes into its input: a recomputed segment cannot begin with it; "
                "begin the segment with the block before, or keep this one"
            )
        made = tensors_of(output)
        # Blocks that write into an earlier output do so again when recomputed: only what happens between blocks counts.
        self._known = [
            Known(known.tensor, version_of(tensor), known.slot)
            for known in self._known
            if (tensor := known.tensor()) is not None
        ]
        self._known += [
            Known(weakref.ref(tensor), version_of(tensor), Slot(place, index)) for index, tensor in enumerate(made)
        ]
        self.next_place += 1
        if self._tape is not None:
            self._tape.call_when_reached(made, self.unit)
        return output

    def _slot(self, tensor: torch.Tensor) -> Slot | None:
        for known in reversed(self._known):
            if known.tensor() is tensor:
                return known.slot if version_of(tensor) == known.version else None
        return None

    def _hold(self, leaf: Any, by: str, offload: bool) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        slot = self._slot(leaf)
        if slot is not None:
            self._used.add(slot)
            return slot
        # What needs no gradient (the batch, masks) is alive anyway, or small.
        if offload and self._tape is not None and leaf.grad_fn is not None and movable(leaf):
            return Elsewhere(self._tape.send(leaf, self.unit, by), leaf.requires_grad)
        here = Here(leaf.detach(), version_of(leaf), leaf.requires_grad)
        if self._tape is not None and leaf.grad_fn is not None:
            self._tape.keeps(leaf, here)
        return here

    def recompute(self) -> None:
        """Run the blocks again and fill the holders that are still wanted."""
        calls, self.calls = self.calls, []
        # A block that follows, after gradients were taken in the middle of forward, begins a frame of its own.
        self.next_place = -1
        if self._tape is not None:
            self._tape.reached(self.unit)
        last_use = {leaf: index for index, call in enumerate(calls) for leaf in call.leaves if isinstance(leaf, Slot)}
        made: dict[Slot, torch.Tensor] = {}
        for index, call in enumerate(calls):
            leaves = [_given(leaf, made, call.block.name) for leaf in call.leaves]
            call.leaves.clear()
            for slot in [slot for slot in made if last_use[slot] <= index]:
                del made[slot]
            args, kwargs = tree_unflatten(leaves, call.spec)
            del leaves
            output = _again(call, args, kwargs)
            del args, kwargs
            for place, tensor in enumerate(tensors_of(output)):
                slot = Slot(index, place)
                if last_use.get(slot, -1) > index:
                    made[slot] = tensor
            del output


def _given(leaf: Any, made: dict[Slot, torch.Tensor], by: str) -> Any:
    if isinstance(leaf, Slot):
        return made[leaf]
    return leaf.tensor(by) if isinstance(leaf, (Here, Elsewhere)) else leaf


def _again(call: Call, args: Any, kwargs: Any) -> Any:
    name = call.block.name
    seen = 0

    def capture(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        place, seen = seen, seen + 1
        if place >= len(call.packed):
            raise InputError(_differs(name, f"it saves more than the {len(call.packed)} tensors it saved in forward"))
        packed = call.packed[place]
        if tensor.shape != packed.shape or tensor.dtype != packed.dtype:
            raise InputError(
                _differs(
                    name,
                    f"saved tensor {place} is {tuple(tensor.shape)} {tensor.dtype}, in forward it was "
                    f"{tuple(packed.shape)} {packed.dtype}",
                )
            )
        kept = tensor.detach()
        holder = packed.holder()
        if holder is not None:
            holder.tensor = kept
        return kept

    with as_before(name, call.block.module, call.surroundings), saved_tensors_hooks(capture, _same):
        output = call.block.original(*args, **kwargs)
    if seen != len(call.packed):
        raise InputError(_differs(name, f"it saves {seen} tensors, in forward it saved {len(call.packed)}"))
    return output


def _differs(name: str, how: str) -> str:
    return (
        f"block {name!r} does not compute the same a second time: {how}; keep it, or remove what differs "
        "(a cache passed as an argument, a branch on outside state)"
    )


def _unpack(holder: Holder) -> torch.Tensor:
    if holder.tensor is None:
        if holder.frame.running:
            raise InputError(
                f"block {holder.frame.running!r} takes gradients inside its own forward, where it cannot be recomputed "
                "yet: keep it"
            )
        holder.frame.recompute()
        if holder.tensor is None:
            raise InputError(
                "a recomputed segment was asked again for tensors that backward had already used: "
                "run backward once per forward"
            )
    return holder.tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
