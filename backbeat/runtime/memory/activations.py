"""Apply a memory plan to a model: each block keeps, recomputes or offloads what autograd saves in it.

    handle = backbeat.runtime.memory.apply(model, plan.memory)
    …train as before…
    handle.remove()

Every block that is recomputed or offloaded gets a `forward` of its own in front of the class's; if any is offloaded,
so do blocks that are kept. Names, `state_dict` and hooks stay as they are. Gradients are the same bit for bit, as far
as the model's own kernels are deterministic. A deep copy or a pickle of the model runs the same plan with its own
buffers; `remove` restores only this model.

`docs/how-to/fit-a-memory-budget.md` says what composes with a memory plan, and what does not.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from backbeat.errors import InputError
from backbeat.measure.model.chain import find_blocks, planned_module, tensors_of
from backbeat.measure.model.memory_by_kind import storage_key
from backbeat.model import MemoryPlan
from backbeat.runtime.memory.forward_context import without_autocast_cache
from backbeat.runtime.memory.offload import KeptTensor, OffloadedTensor, OffloadSchedule, movable
from backbeat.runtime.memory.recompute import SegmentRun

_functorch_level: Any = torch._C._functorch.peek_interpreter_stack


class BlockForward:
    """Replaces one block's `forward`. `index` is the block's in its segment, and `policy` runs its blocks."""

    def __init__(self, name: str, module: nn.Module, index: int, policy: BlockPolicy) -> None:
        self.name = name
        self.module = module
        self.index = index
        self.policy = policy
        # The compiled call skips `forward`. In front of it, saved-tensor hooks stay out of the compiled graph.
        compiled = getattr(module, "_compiled_call_impl", None)
        self.place = "forward" if compiled is None else "_compiled_call_impl"
        self.original: Any = getattr(module, self.place)
        # Frameworks read the signature of a forward to know what to pass.
        functools.update_wrapper(self, self.original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _functorch_level() is not None:
            return self.original(*args, **kwargs)
        return self.policy.run(self, args, kwargs)

    def install(self) -> None:
        setattr(self.module, self.place, self)

    def remove(self) -> None:
        if vars(self.module).get(self.place) is self:
            delattr(self.module, self.place)
            if getattr(self.module, self.place) != self.original:
                setattr(self.module, self.place, self.original)


class KeepPolicy:
    """Autograd keeps what it saves; other blocks' tensors leave and come back while this block runs."""

    def __init__(self, schedule: OffloadSchedule) -> None:
        self._schedule = schedule

    def run(self, block: BlockForward, args: Any, kwargs: Any) -> Any:
        self._schedule.begin_block()
        range_number = self._schedule.begin_range()

        def pack(tensor: torch.Tensor) -> KeptTensor:
            kept = KeptTensor(tensor, block.name)
            # A neighbour may want to offload the same storage, which would free nothing.
            self._schedule.keep(tensor, kept)
            return kept

        with saved_tensors_hooks(pack, KeptTensor.tensor):
            output = block.original(*args, **kwargs)
        self._schedule.hook_outputs(tensors_of(output), range_number)
        return output


class RecomputePolicy:
    """Saved tensors are dropped. Blocks that pass their outputs on to each other are recomputed together."""

    def __init__(self, schedule: OffloadSchedule | None, offload_input: bool) -> None:
        self._schedule = schedule
        self._offload_input = offload_input
        # Weak: autograd's placeholders keep a run alive, and a forward that failed keeps none.
        self._latest: weakref.ref[SegmentRun] | None = None

    def __reduce__(self) -> Any:
        return RecomputePolicy, (self._schedule, self._offload_input)

    def run(self, block: BlockForward, args: Any, kwargs: Any) -> Any:
        if self._schedule is not None:
            self._schedule.begin_block()
        current = self._latest() if self._latest is not None and block.index else None
        if current is None or current.next_index != block.index or not current.continues(tensors_of((args, kwargs))):
            current = SegmentRun(self._schedule, block.index)
            self._latest = weakref.ref(current)
        return current.run(block, args, kwargs, self._offload_input)


class OffloadPolicy:
    """Saved tensors wait on the host."""

    def __init__(self, schedule: OffloadSchedule) -> None:
        self._schedule = schedule
        self._range_number = 0
        self._next_index = 0

    def __reduce__(self) -> Any:
        return OffloadPolicy, (self._schedule,)

    def run(self, block: BlockForward, args: Any, kwargs: Any) -> Any:
        schedule = self._schedule
        schedule.begin_block()
        if block.index == 0 or block.index != self._next_index:
            self._range_number = schedule.begin_range()
        range_number = self._range_number
        self._next_index = block.index + 1
        stays = {storage_key(tensor) for tensor in (*block.module.parameters(), *block.module.buffers())}
        # A tensor without history came with the batch or is shared by all blocks: it stays alive anyway.
        stays |= {storage_key(tensor) for tensor in tensors_of((args, kwargs)) if tensor.grad_fn is None}

        def pack(tensor: torch.Tensor) -> OffloadedTensor | KeptTensor:
            if movable(tensor) and storage_key(tensor) not in stays:
                return schedule.offload(tensor, range_number, block.name)
            return KeptTensor(tensor, block.name)

        with without_autocast_cache(), saved_tensors_hooks(pack, lambda saved: saved.tensor()):
            output = block.original(*args, **kwargs)
        schedule.hook_outputs(tensors_of(output), range_number)
        return output


BlockPolicy = KeepPolicy | RecomputePolicy | OffloadPolicy


class Handle(AbstractContextManager["Handle"]):
    """A plan in force on a model, until `remove()` or the end of a `with` block."""

    def __init__(self, plan: MemoryPlan, forwards: list[BlockForward], schedule: OffloadSchedule | None) -> None:
        self.plan = plan
        self._forwards = forwards
        self._schedule = schedule

    @property
    def host_bytes(self) -> int:
        """Host memory allocated for offloading so far; it stops growing when iterations repeat."""
        return self._schedule.host_bytes if self._schedule is not None else 0

    def remove(self) -> None:
        """Restore the blocks' own forwards. A backward of a forward before still recomputes and fetches."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []
        if self._schedule is not None:
            self._schedule.release_all()

    def __exit__(self, *exception: object) -> None:
        self.remove()


def apply(model: nn.Module, memory_plan: MemoryPlan) -> Handle:
    """Run `memory_plan` on `model` from the next forward on."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    named = check(model, memory_plan)
    active = [segment for segment in memory_plan.segments if segment.action != "keep"]
    offloads = any(segment.action == "offload" or segment.input == "offload" for segment in active)
    schedule = OffloadSchedule() if offloads else None
    forwards = []
    for segment in active:
        policy: BlockPolicy
        if schedule is not None and segment.action == "offload":
            policy = OffloadPolicy(schedule)
        else:
            policy = RecomputePolicy(schedule, segment.input == "offload")
        forwards += [BlockForward(name, named[name], index, policy) for index, name in enumerate(segment.blocks)]
    if schedule is not None:
        kept = KeepPolicy(schedule)
        planned = {id(inner) for forward in forwards for inner in forward.module.modules()}
        for name, module in find_blocks(model).items():
            if not any(id(inner) in planned for inner in module.modules()):
                forwards.append(BlockForward(name, module, 0, kept))
    for forward in forwards:
        forward.install()
    return Handle(memory_plan, forwards, schedule)


def check(model: nn.Module, memory_plan: MemoryPlan) -> dict[str, nn.Module]:
    """The blocks that the plan names. Raises where the model cannot run it; never changes the model."""
    if not isinstance(memory_plan, MemoryPlan):
        raise InputError(
            f"the memory plan is {type(memory_plan).__name__}: give a MemoryPlan, such as `.memory` of a plan that was "
            "made with a memory budget"
        )
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
        if any(isinstance(vars(module).get(key), BlockForward) for key in ("forward", "_compiled_call_impl")):
            raise InputError(f"{name!r} already runs a memory plan: call remove() on the handle of the first one")
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    named: dict[str, nn.Module] = {}
    owner: dict[int, str] = {}
    for index, segment in enumerate(memory_plan.segments):
        for name in segment.blocks:
            where = f"memory.segments[{index}]"
            module = planned_module(modules, where, name)
            for inner in module.modules():
                if id(inner) in owner:
                    raise InputError(
                        f"{where} names {name!r}, which shares modules with {owner[id(inner)]!r}: "
                        "blocks neither hold nor are each other; remove one of the two"
                    )
            if segment.action == "offload" and any(isinstance(inner, nn.RReLU) for inner in module.modules()):
                raise InputError(
                    f"{where} offloads {name!r}, which holds an RReLU: torch saves its noise before it has drawn it; "
                    "recompute or keep the block"
                )
            owner.update((id(inner), name) for inner in module.modules())
            named[name] = module
    return named
