"""A memory plan, applied to a model: each block keeps, recomputes or offloads what autograd saves in it.

    handle = backbeat.runtime.memory.apply(model, plan.memory)
    …train as before…
    handle.remove()

Every block that the plan names gets a `forward` of its own that stands before the class's. Names, `state_dict`, hooks
and gradients stay as they are; gradients are the same bit for bit where the model's own kernels repeat theirs.
A deep copy or a pickle of the model runs the same plan with buffers of its own; `remove` puts only this model back.

What composes, and what does not:

- Arguments and outputs may be nested containers and registered classes (model outputs). What is not a tensor is held by
  reference: an object that a block changes (a key-value cache) makes recomputing it differ, and that is refused in
  backward by the block's name. Turn such caches off (`use_cache=False`).
- Autocast and GradScaler work as usual. Blocks that are not kept run with autocast's weight cache off, or the bf16
  copies of all weights would stay until the end of forward; a weight that several blocks share is then cast in each,
  and its gradients are added in fp32 rather than bf16.
- Running statistics of norms count each batch once. A block that writes other buffers in forward cannot be recomputed.
- Blocks compiled one by one (`block.compile()`, before `apply`) run compiled. A compiled model is refused: its
  blocks are no longer called one by one. Do not compile what already runs a memory plan.
- `torch.utils.checkpoint` inside a block hides from the plan what it saves itself: right, but nothing gained.
- `torch.func.functional_call` with other parameters is refused in backward; `nn.DataParallel` at once, because its
  replicas would share one model's blocks.
- Random numbers of a second run are those of the first as far as they come from torch's own generators. A block that
  draws from Python's `random`, NumPy or a generator of its own, or counts its calls in an attribute, must be kept: its
  gradients would be wrong without a word.
- Under `torch.func.vmap` and its kin everything is kept. A block that uses `torch.func.grad` inside must be kept: torch
  refuses that under the hooks by which a plan learns what is saved.
- `torch.no_grad` and evaluation run as if nothing were applied. `retain_graph=True` keeps recomputed tensors too.
"""

from __future__ import annotations

import functools
import weakref
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from backbeat.errors import InputError
from backbeat.measure.model.chain import find_blocks, tensors_of, version_of
from backbeat.model import MemoryPlan
from backbeat.runtime.memory.offload import AHEAD, LAG, Away, Tape, movable
from backbeat.runtime.memory.recomputed_segments import Frame
from backbeat.runtime.memory.rerun import uncached

if TYPE_CHECKING:
    from backbeat.model import Segment


_transformed: Any = torch._C._functorch.peek_interpreter_stack


class BlockPolicy(Protocol):
    """What is done with the blocks of one segment."""

    def run(self, block: BlockForward, args: Any, kwargs: Any) -> Any: ...


class BlockForward:
    """Stands in for one block's `forward`."""

    def __init__(self, name: str, module: nn.Module, place: int, policy: BlockPolicy) -> None:
        self.name = name
        self.module = module
        self.place = place
        self.policy = policy
        compiled: Any = getattr(module, "_compiled_call_impl", None)
        self.compiled = compiled is not None
        self.original: Any = compiled if self.compiled else module.forward
        # Frameworks read the signature of a forward to know what to pass.
        functools.update_wrapper(self, self.original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _transformed() is not None:
            return self.original(*args, **kwargs)
        return self.policy.run(self, args, kwargs)

    def install(self) -> None:
        if self.compiled:
            # A compiled module's call skips `forward`: standing before the compiled call keeps hooks out of its graph.
            self.module._compiled_call_impl = self
        else:
            self.module.forward = self

    def remove(self) -> None:
        if self.compiled:
            if self.module._compiled_call_impl is self:
                self.module._compiled_call_impl = self.original
        elif self.module.__dict__.get("forward") is self:
            del self.module.forward
            if self.module.forward != self.original:
                self.module.forward = self.original


class Kept:
    """Autograd keeps what it saves; tensors of other blocks leave and come back while this one runs."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def run(self, block: BlockForward, args: Any, kwargs: Any) -> Any:
        self._tape.begin_block()
        unit = self._tape.begin_unit()

        def pack(tensor: torch.Tensor) -> Stayed:
            stayed = Stayed(tensor, block.name)
            # A neighbour may want to send the same storage, which would free nothing.
            self._tape.keeps(tensor, stayed)
            return stayed

        with saved_tensors_hooks(pack, _unpack):
            output = block.original(*args, **kwargs)
        self._tape.call_when_reached(tensors_of(output), unit)
        return output


class Recomputed:
    """A segment whose saved tensors are dropped; consecutive blocks go on in one frame as long as they are chained."""

    def __init__(self, tape: Tape | None, offload_input: bool) -> None:
        self._tape = tape
        self._offload_input = offload_input
        # Weak: a frame lives as long as autograd holds one of its holders, and no forward that failed keeps one.
        self._open: weakref.ref[Frame] | None = None

    def __reduce__(self) -> Any:
        return Recomputed, (self._tape, self._offload_input)

    def run(self, block: BlockForward, args: Any, kwargs: Any) -> Any:
        if self._tape is not None:
            self._tape.begin_block()
        frame = self._open() if self._open is not None and block.place else None
        if frame is None or frame.next_place != block.place or not frame.continues(tensors_of((args, kwargs))):
            frame = Frame(self._tape)
            frame.next_place = block.place
            self._open = weakref.ref(frame)
        return frame.run(block, args, kwargs, self._offload_input)


class Offloaded:
    """A segment whose saved tensors wait on the host."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._unit = 0
        self._next_place = 0

    def __reduce__(self) -> Any:
        return Offloaded, (self._tape,)

    def run(self, block: BlockForward, args: Any, kwargs: Any) -> Any:
        tape = self._tape
        tape.begin_block()
        if block.place == 0 or block.place != self._next_place:
            self._unit = tape.begin_unit()
        unit = self._unit
        self._next_place = block.place + 1
        here = {_storage(tensor) for tensor in (*block.module.parameters(), *block.module.buffers())}
        # What has no history came in with the batch or is shared by all blocks: it stays alive anyway.
        here |= {
            _storage(leaf)
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None
        }

        def pack(tensor: torch.Tensor) -> Away | Stayed:
            if movable(tensor) and _storage(tensor) not in here:
                return tape.send(tensor, unit, block.name)
            return Stayed(tensor, block.name)

        with uncached(), saved_tensors_hooks(pack, _unpack):
            output = block.original(*args, **kwargs)
        tape.call_when_reached(tensors_of(output), unit)
        return output


class Stayed:
    """A saved tensor that is not worth moving, with the check autograd leaves to whoever packs."""

    __slots__ = ("__weakref__", "_by", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, by: str) -> None:
        # Detached: a node that held its own output would keep itself alive for ever.
        self._tensor = tensor.detach()
        self._version = version_of(tensor)
        self._by = by

    def tensor(self) -> torch.Tensor:
        if version_of(self._tensor) != self._version:
            raise InputError(
                f"a tensor that block {self._by!r} saved for backward was changed in place since: "
                "step the optimizer after backward, and do not write into activations"
            )
        return self._tensor


def _unpack(packed: Away | Stayed) -> torch.Tensor:
    return packed.tensor()


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


class Handle:
    """A plan in force on a model, until `remove()` or the end of a `with` block."""

    def __init__(self, plan: MemoryPlan, forwards: list[BlockForward], tape: Tape | None) -> None:
        self.plan = plan
        self._forwards = forwards
        self._tape = tape

    @property
    def host_bytes(self) -> int:
        """Host memory taken for offloading so far; it stops growing when iterations repeat."""
        return self._tape.host_bytes if self._tape is not None else 0

    def remove(self) -> None:
        """Put the blocks' own forwards back. Graphs made before still run backward as they were recorded."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []
        if self._tape is not None:
            self._tape.settle()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def apply(model: nn.Module, memory_plan: MemoryPlan, *, lag: int = LAG, ahead: int = AHEAD) -> Handle:
    """Run `memory_plan` on `model` from the next forward on.

    What a block sends to the host leaves the device at the beginning of the `lag`-th block after it, and comes back
    when backward is `ahead` segments (or kept blocks) away from it.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    for name, least, value in (("lag", 1, lag), ("ahead", 0, ahead)):
        if value < least:
            raise InputError(f"{name} is {value}: it must be {least} or more")
    named = check(model, memory_plan)
    active = [segment for segment in memory_plan.segments if segment.action != "keep"]
    offloads = any(segment.action == "offload" or segment.input == "offload" for segment in active)
    tape = Tape(lag, ahead) if offloads else None
    forwards = []
    for segment in active:
        policy = _policy(segment, tape)
        forwards += [BlockForward(name, named[name], place, policy) for place, name in enumerate(segment.blocks)]
    if tape is not None:
        kept = Kept(tape)
        planned = [forward.module for forward in forwards]
        inside = {id(inner) for module in planned for inner in module.modules()}
        for name, module in find_blocks(model).items():
            if not any(id(inner) in inside for inner in module.modules()):
                forwards.append(BlockForward(name, module, 0, kept))
    for forward in forwards:
        forward.install()
    return Handle(memory_plan, forwards, tape)


def check(model: nn.Module, memory_plan: MemoryPlan) -> dict[str, nn.Module]:
    """The blocks that the plan names; refused where `model` cannot run it, and left as it was in any case."""
    if not isinstance(memory_plan, MemoryPlan):
        raise InputError(
            f"the memory plan is {type(memory_plan).__name__}: give a MemoryPlan, such as `.memory` of a plan that was "
            "made with a memory budget"
        )
    _check_model(model)
    return _resolve(model, memory_plan)


def _policy(segment: Segment, tape: Tape | None) -> BlockPolicy:
    if segment.action == "recompute":
        return Recomputed(tape, segment.input == "offload")
    assert tape is not None
    return Offloaded(tape)


def _check_model(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel):
        raise InputError(
            "the model is wrapped in DataParallel, whose replicas would share one model's blocks: use "
            "DistributedDataParallel, or apply the plan to a model on one device"
        )
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise InputError(
            "the model is compiled: its blocks are no longer called one by one; apply the memory plan to the plain "
            "model, and compile single blocks with block.compile() before"
        )
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get("forward"), BlockForward) or isinstance(
            module.__dict__.get("_compiled_call_impl"), BlockForward
        ):
            raise InputError(f"{name!r} already runs a memory plan: call remove() on the handle of the first one")


def _resolve(model: nn.Module, memory_plan: MemoryPlan) -> dict[str, nn.Module]:
    modules = dict(model.named_modules(remove_duplicate=False))
    named: dict[str, nn.Module] = {}
    owner: dict[int, str] = {}
    for index, segment in enumerate(memory_plan.segments):
        for name in segment.blocks:
            where = f"memory.segments[{index}]"
            module = modules.get(name)
            if module is None or not name:
                near = get_close_matches(name, filter(None, modules), n=1)
                hint = f"did you mean {near[0]!r}?" if near else "make the plan from a profile of this model"
                raise InputError(f"{where} names the block {name!r}, which the model does not have: {hint}")
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
                raise InputError(
                    f"{where} names {name!r}, a {type(module).__name__} that is never called: name its parts"
                )
            for inner in module.modules():
                if id(inner) in owner:
                    raise InputError(
                        f"{where} names {name!r}, which shares modules with {owner[id(inner)]!r}: "
                        "blocks neither hold nor are each other; remove one of the two"
                    )
            owner.update((id(inner), name) for inner in module.modules())
            named[name] = module
    return named
