"""Some steps of a model in training, timed now and then on every rank: what a `Watch` samples.

`WrapperSteps` asks backbeat's reducer. `HookedSteps` times what torch runs by itself, units and stock DDP, from
outside: hooks on modules and tensors around those of FSDP2, and callbacks at the end of backward. They are there only
while a step is timed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from backbeat.comm.clock import Mark, clock_for
from backbeat.comm.communicators import Communicators
from backbeat.engine.explain import busy_periods
from backbeat.errors import InputError
from backbeat.runtime.ddp.wrapper import DistributedDataParallel
from backbeat.runtime.reduce.timing import Recorder, median
from backbeat.runtime.running_plans import plan_of
from backbeat.runtime.torch_internals import TorchDDP, find_tensors, queue_callback
from backbeat.runtime.weak_call import WeakCall

if TYPE_CHECKING:
    from backbeat.model import Plan
    from backbeat.runtime.reduce.timing import TimedStep

logger = logging.getLogger("backbeat.runtime")

STEPS_PER_SAMPLE = 3
"""Steps timed for one sample, the last ones before it is taken."""


class RankFigures(NamedTuple):
    """One rank's figures of its timed steps; zeros where it timed none or does not know."""

    own_s: float = 0.0
    """An iteration without the time that the rank waits."""
    iteration_s: float = 0.0
    exposed_s: float = 0.0
    span_s: float = 0.0
    """From the first launch of a bucket to the end of the step."""
    transfer_s: float = 0.0


Sample = Callable[[int, RankFigures], None]


def watched_steps(model: Any, every: int, sample: Sample) -> WrapperSteps | HookedSteps:
    """The steps of the model; `sample`, a method, is called at every `every`th, with this rank's figures."""
    part = _parallel_part(model)
    if isinstance(part, DistributedDataParallel):
        return WrapperSteps(part.reducer, every, sample)
    return HookedSteps(part, every, sample)


class WrapperSteps:
    """Steps of backbeat's wrapper."""

    def __init__(self, reducer: Any, every: int, sample: Sample) -> None:
        self._reducer: Any = weakref.proxy(reducer)
        self._every, self._sample = every, WeakCall(sample)
        self._recorder = Recorder(reducer.device, keep=STEPS_PER_SAMPLE)
        if reducer.watch is not None and reducer.watch.alive:
            logger.warning("the model is watched already: the earlier Watch gets no more samples; to= takes several")
        reducer.watch = WeakCall(self._after_step)

    @property
    def communicators(self) -> Communicators:
        found: Communicators = self._reducer.communicators
        return found

    def _after_step(self) -> None:
        """At the end of each synchronised backward, on every rank alike."""
        reducer = self._reducer
        if reducer.steps % self._every == 0:
            # Some of these steps the reducer may have timed for itself.
            timed = self._recorder.steps()
            timed += [one for one in reducer.recorder.history() if one.number > reducer.steps - STEPS_PER_SAMPLE]
            self._recorder.clear()
            self._sample(reducer.steps, _figures([one for one in timed if one.iteration_s is not None]))
        # Where nobody else times it.
        if _next_is_timed(reducer.steps, self._every) and reducer.runner.context.recorder is None:
            self._recorder.mark_step_end()
            reducer.runner.time_steps(self._recorder)

    def predicted(self) -> dict[str, float | None]:
        """What the plan promised for this number of ranks."""
        reducer = self._reducer
        plan: Plan | None = reducer.running_plan
        found = _promised(plan, reducer.communicators.size)
        if plan is None or plan.predicted is None or not found:
            return {}
        spans = [done - launch for launch, done in zip(plan.predicted.launch_s, plan.predicted.done_s, strict=False)]
        if len(spans) != len(reducer.buckets):
            return found
        return {**found, "predicted_transfer_s": sum(spans) if reducer.device.type == "cpu" else spans[-1]}


class HookedSteps:
    """Steps of units or of stock DDP. A step ends with `step()` of the first optimizer that has the model's parameters.

    A rank waits where torch's hooks do: for a unit's parameters before its forward and its backward, after its
    backward, and for the last gradients at the end. What travels meanwhile is not seen, so that overlap is not known.
    """

    def __init__(self, model: Any, every: int, sample: Sample) -> None:
        self._model = weakref.ref(model)
        self._every, self._sample = every, WeakCall(sample)
        # After a forward without gradients, units may hold whole parameters, which are not those of the optimizer.
        for unit in _units(model):
            unit.reshard()
        parameters = list(model.parameters())
        self._parameters = {id(one) for one in parameters}
        self.communicators = Communicators(_group_of(model), parameters[0].device, 1)
        self._clock = clock_for(parameters[0].device)
        self._counted: int | None = None
        """The parameter whose optimizer's steps are counted."""
        self.steps = 0
        self._timed: list[tuple[Mark, Mark, list[tuple[Mark, Mark]]]] = []
        self._before: Mark = None
        self._waits: list[tuple[Mark, Mark]] = []
        self._opened: dict[tuple[str, int], Mark] = {}
        """When waits began, by their kind and module."""
        self._hooks: list[Any] = []
        weakref.finalize(self, register_optimizer_step_post_hook(WeakCall(self._stepped)).remove)
        weakref.finalize(self, _unhook, self._hooks)

    def predicted(self) -> dict[str, float | None]:
        model = self._model()
        return _promised(plan_of(model.module if isinstance(model, TorchDDP) else model), self.communicators.size)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """At the end of each optimizer step, on every rank alike."""
        held = [id(one) for group in optimizer.param_groups for one in group["params"]]
        if self._counted is None:
            self._counted = next((one for one in held if one in self._parameters), None)
        if self._counted is None or self._counted not in held:
            return
        self.steps += 1
        if self._hooks:
            self._timed.append((self._before, self._clock.mark(), self._waits))
        if self.steps % self._every == 0:
            _unhook(self._hooks)
            self._clock.synchronize()
            figures = self._figures()
            self._timed.clear()
            self._clock.reserve(0)
            self._sample(self.steps, figures)
        if _next_is_timed(self.steps, self._every):
            if not self._hooks:
                self._hook(self._model())
            self._before, self._waits = self._clock.mark(), []

    def _figures(self) -> RankFigures:
        if not self._timed:
            return RankFigures()
        since = self._clock.between
        iteration = [since(before, end) for before, end, _ in self._timed]
        # A wait may hold another one, of a unit inside.
        waited = [
            sum(
                end - start
                for start, end in busy_periods(
                    [since(before, opened) for opened, _ in waits], [since(before, closed) for _, closed in waits]
                )
            )
            for before, _, waits in self._timed
        ]
        own = [whole - wait for whole, wait in zip(iteration, waited, strict=True)]
        return RankFigures(*((median(values) or 0.0) for values in (own, iteration, waited)))

    def _hook(self, model: Any) -> None:
        """FSDP2 puts its own hook before all others in front of a forward, and after those there are behind it."""
        add = self._hooks.append
        add(model.register_forward_hook(WeakCall(self._forward_done), prepend=True))
        for module in _units(model):
            # What is compiled would be compiled anew for a hook: its waits count as its own time.
            if module._compiled_call_impl is None:
                add(module.register_forward_pre_hook(WeakCall(self._before_unit), prepend=True, with_kwargs=True))
                add(module.register_forward_pre_hook(WeakCall(self._in_unit), with_kwargs=True))
                add(module.register_forward_hook(WeakCall(self._after_unit), prepend=True))
                add(module.register_forward_hook(WeakCall(self._after_fsdp)))

    def _before_unit(self, module: Any, args: Any, kwargs: Any) -> None:
        for kind in ("unit's backward", "backward's end"):
            self._opened.pop((kind, id(module)), None)
        self._open("forward", module)
        self._on(_inputs(args, kwargs), self._close, "backward's end", module)

    def _in_unit(self, module: Any, args: Any, kwargs: Any) -> None:
        self._close("forward", module)
        self._on(_inputs(args, kwargs), self._open, "backward's end", module)

    def _after_unit(self, module: Any, args: Any, output: Any) -> None:
        self._on(find_tensors(output), self._open, "unit's backward", module)

    def _after_fsdp(self, module: Any, args: Any, output: Any) -> None:
        self._on(find_tensors(output), self._close, "unit's backward", module)

    def _forward_done(self, module: Any, args: Any, output: Any) -> None:
        self._opened.pop(("graph", id(module)), None)
        self._on(find_tensors(output), self._backward_begins, "graph", module)

    def _backward_begins(self, kind: str, module: Any) -> None:
        if (kind, id(module)) not in self._opened:
            self._open(kind, module)
            done = WeakCall(self._graph_done)
            # Before torch's own, which waits for the last gradients.
            queue_callback(lambda: done(kind, module))

    def _graph_done(self, kind: str, module: Any) -> None:
        self._open(kind, module)
        close = WeakCall(self._close)
        queue_callback(lambda: close(kind, module))

    def _on(self, tensors: Any, call: Callable[[str, Any], None], kind: str, module: Any) -> None:
        """Call when the gradient of any of these is known."""
        weak = WeakCall(call)
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: weak(kind, module))

    def _open(self, kind: str, module: Any) -> None:
        if self._hooks:
            self._opened[kind, id(module)] = self._clock.mark()

    def _close(self, kind: str, module: Any) -> None:
        opened = self._opened.pop((kind, id(module)), None)
        if opened is not None and self._hooks:
            self._waits.append((opened, self._clock.mark()))


def _parallel_part(model: Any) -> Any:
    """The wrapped model or the outermost sharded one, which may be a part of the model given."""
    # torch takes a second to import it.
    from torch.distributed.fsdp import FSDPModule

    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    found: Any = next((module for module in modules if isinstance(module, (TorchDDP, FSDPModule))), None)
    if found is None or (isinstance(found, DistributedDataParallel) and not found.reducer.built):
        raise InputError(
            f"a {type(model).__name__} cannot be watched: give what parallelize or fully_shard returned, or a "
            "DistributedDataParallel, backbeat's or torch's; a copy of backbeat's after its first forward"
        )
    if found is getattr(model, "_orig_mod", None) and not isinstance(found, DistributedDataParallel):
        raise InputError(
            "a model that is compiled as one cannot be watched, since hooks would have it compiled anew: compile its "
            "blocks (block.compile())"
        )
    return found


def _units(model: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _group_of(model: Any) -> Any:
    if isinstance(model, TorchDDP):
        return model.process_group
    mesh = next((one.device_mesh for one in model.parameters() if hasattr(one, "device_mesh")), None)
    if mesh is None:
        raise InputError(f"no parameter of this {type(model).__name__} is sharded: there is nothing to watch")
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() != dist.get_world_size():
        raise InputError(f"the model is sharded over {mesh.size()} of {dist.get_world_size()} ranks: watch a whole job")
    return dist.group.WORLD


def _inputs(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [*find_tensors(args), *find_tensors(kwargs)]


def _next_is_timed(steps: int, every: int) -> bool:
    """The next step is one of the last before a sample."""
    return -(steps + 1) % every < STEPS_PER_SAMPLE


def _figures(timed: Sequence[TimedStep]) -> RankFigures:
    found = (
        median((one.iteration_s or 0.0) - one.exposed_s for one in timed),
        median(one.iteration_s for one in timed),
        median(one.exposed_s for one in timed),
        median(one.ended_s - min(one.launched_s.values(), default=one.ended_s) for one in timed),
        median(_transfer_s(one) for one in timed),
    )
    return RankFigures(*(value or 0.0 for value in found))


def _transfer_s(step: TimedStep) -> float:
    """All transfers where the end of each is known, otherwise, on a GPU, the last one."""
    if len(step.done_s) == len(step.launched_s):
        return sum(step.done_s[index] - launched for index, launched in step.launched_s.items())
    return step.ended_s - max(step.launched_s.values(), default=step.ended_s)


def _promised(plan: Plan | None, ranks: int) -> dict[str, float | None]:
    """What a plan for this number of ranks says of a step."""
    if plan is None or plan.predicted is None or plan.workers not in (None, ranks):
        return {}
    return {"predicted_iteration_s": plan.predicted.iteration_s, "predicted_exposed_s": plan.predicted.exposed_s}


def _unhook(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()
