"""What torch's `fully_shard` calls, in order, and what its all-gathers wait for, as predicted: a check a rule.

The order is that of `unit_graph.calls`, the waits are those of `run_step`. A torch that changes its
schedule fails the check of the rule that it changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from scenario_rig import Context, Scenario, SkipScenarioError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.utils.checkpoint import checkpoint

from backbeat.model import Block, Gradient, Mesh, Network, Plan, Profile, Sharding, ShardUnit
from backbeat.steps.model_chain import ROOT, chain_of
from backbeat.steps.unit_graph import ShardedCost, calls, run_step
from tests.call_order import call_order

CHECKS: dict[str, Scenario] = {}
WIDTH = 8
"""A multiple of every number of shards, so that nothing is padded."""

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
Events = list[tuple[str, int]]
_BEFORE_2_13 = {"all_gather": "_into_tensor", "reduce_scatter": "_tensor"}


def check(run: Callable[[Context], str | None]) -> Callable[[Context], str | None]:
    CHECKS[f"sharded order: {run.__name__}"] = Scenario(run, run.__name__)
    return run


class Wait(NamedTuple):
    """What an all-gather waits for: this, and all computation before it."""

    in_forward: bool
    unit: int
    after: tuple[str, int]


@dataclass
class Log:
    """Events of torch's own, with the unit they belong to."""

    units: dict[str, int]
    """Unit of each module that computes."""
    events: Events = field(default_factory=list)
    gathered: dict[int, int] = field(default_factory=dict)
    """Bytes of each unit's all-gather."""
    scattered: dict[int, int] = field(default_factory=dict)
    process_groups: dict[str, Any] = field(default_factory=dict)
    in_forward: bool = True
    computed: Events = field(default_factory=list)
    """What was put on the compute stream."""
    waits: list[Wait] = field(default_factory=list)
    predicted_waits: list[Wait] = field(default_factory=list)

    def unit(self, fsdp_params: Sequence[Any]) -> int:
        return self.units[fsdp_params[0]._param_fqn.rpartition(".")[0]]

    def add(self, event: str, unit: int) -> None:
        self.events.append((event, unit))
        if event in ("copy_out", "forward", "backward"):
            self.computed.append((event, unit))

    def gather(self, unit: int, streams: Sequence[Any]) -> None:
        self.add("all_gather", unit)
        # A stream that is not the all-gathers' own is the compute stream itself.
        done = max(stream.done if isinstance(stream, _Stream) else len(self.computed) for stream in streams)
        self.waits.append(Wait(self.in_forward, unit, self.computed[done - 1] if done else ("nothing", ROOT)))


class _Mark(torch.autograd.Function):
    """Notes when backward passes the output of a module."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:  # type: ignore[override]
        ctx.note = note
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.note()
        return gradient, None


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.name = name
        self.recomputed = False
        self.log: Log | None = None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.recomputed:
            return checkpoint(self._compute, value, use_reentrant=False)  # type: ignore[no-any-return]
        return self._compute(value)

    def _compute(self, value: torch.Tensor) -> torch.Tensor:
        log = self.log
        if log is None:
            return value @ self.weight
        unit = log.units[self.name]
        log.add("forward", unit)
        return _Mark.apply(value @ self.weight, lambda: log.add("backward", unit))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of four blocks and how it is sharded; torch's defaults."""

    units: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (3,))
    head: bool = False
    middle: bool = False
    tail: bool = False
    recomputed: bool = False
    reshard: tuple[bool, ...] = (True, True, True, True)
    prefetch: int = 0
    buffers: int = 1
    separate: bool = False
    replicate: int = 1
    param_dtype: str = "fp32"
    micro_batches: int = 1
    gradient_sync: str = "every"
    reshard_after_backward: bool = True


class Model(nn.Module):
    """Layers in a row, of which the first, one in the middle and the last may stand outside the blocks."""

    def __init__(self, count: int, case: Case) -> None:
        super().__init__()
        self.embed = Layer("embed") if case.head else nn.Identity()
        self.blocks = nn.ModuleList(Layer(f"blocks.{index}") for index in range(count))
        self.middle = Layer("middle") if case.middle else nn.Identity()
        self.head = Layer("head") if case.tail else nn.Identity()

    def row(self) -> list[nn.Module]:
        """In the order of forward."""
        return [self.embed, *self.blocks[:2], self.middle, *self.blocks[2:], self.head]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.row():
            value = layer(value)
        return value


def _plan(case: Case, size: int) -> Plan:
    return Plan(
        strategy="test",
        model="chain",
        sharding=Sharding(
            mesh=Mesh(replicate=case.replicate, shard=size // case.replicate),
            param_dtype=case.param_dtype,  # type: ignore[arg-type]
            reduce_dtype="fp32",
            reduce_scatter_buffers=case.buffers,
            separate_reduce_scatter=case.separate,
            units=tuple(
                ShardUnit(modules=tuple(f"blocks.{k}" for k in members), reshard=reshard, prefetch=case.prefetch)
                for members, reshard in zip(case.units, case.reshard, strict=False)
            ),
            gradient_sync=case.gradient_sync,  # type: ignore[arg-type]
            reshard_after_backward=case.reshard_after_backward,
        ),
    )


def _profile(layers: Sequence[Layer]) -> Profile:
    """A second of forward and of backward for each layer."""
    count = len(layers)
    return Profile(
        name="chain", model="chain", batch_size=1, precision="fp32", device="cpu", forward_s=float(count),
        backward_s=float(count), update_s=0.0,
        gradients=tuple(
            Gradient(name=f"{layer.name}.weight", bytes=4 * WIDTH * WIDTH, ready_s=1.0 + index)
            for index, layer in enumerate(reversed(layers))
        ),
        blocks=tuple(
            Block(name=layer.name, forward_s=1.0, backward_s=1.0, input_bytes=0, output_bytes=0, saved_bytes=0,
                  forward_peak_bytes=0, backward_peak_bytes=0)
            for layer in layers
        ),
    )  # fmt: skip


def _setting(module: nn.Module, name: str) -> Callable[..., Any]:
    if TORCH < (2, 13):
        raise SkipScenarioError(f"torch {torch.__version__} has no {name}: it came with 2.13")
    return getattr(module, name)  # type: ignore[no-any-return]


def _shard(model: Model, case: Case, size: int) -> list[Any]:
    """torch's own calls, as a user writes them; the modules that stand for the units."""
    if case.replicate > 1:
        mesh = init_device_mesh("cpu", (case.replicate, size // case.replicate), mesh_dim_names=("copies", "shards"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy()
    if case.param_dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    firsts = []
    for members, reshard in zip(case.units, case.reshard, strict=False):
        modules = [model.blocks[k] for k in members]
        fully_shard(
            modules[0] if len(modules) == 1 else modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy
        )
        firsts.append(modules[0])
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for index, module in enumerate(firsts):
        if case.prefetch:
            module.set_modules_to_forward_prefetch(firsts[index + 1 : index + 1 + case.prefetch])
    if case.buffers > 1:
        _setting(model, "set_reduce_scatter_max_input_buffers")(case.buffers)
    if case.separate:
        _setting(model, "set_separate_reduce_scatter_group")(True)
    return firsts


class _Stream(torch.cpu.Stream):
    """A stream of all-gathers: knows how much of the compute stream it has waited for."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log, self.done = log, 0

    def wait_stream(self, stream: Any) -> None:
        self.done = max(self.done, stream.done if isinstance(stream, _Stream) else len(self._log.computed))

    def wait_event(self, event: Any) -> None:
        self.done = max(self.done, event.done)


def _event_of(log: Log) -> type[torch.cpu.Event]:
    class Event(torch.cpu.Event):
        """Knows how much was on the compute stream when it was recorded there."""

        def record(self, stream: Any = None) -> None:
            self.done = len(log.computed)

    return Event


class _Held(list[Any]):
    """torch's list of reduce-scatter inputs: notes when one is waited for."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log
        self._units: list[int] = []
        self.in_post_backward = False

    def append(self, state: Any) -> None:
        super().append(state)
        self._units.append(next(unit for event, unit in reversed(self._log.events) if event == "reduce_scatter"))

    def pop(self, index: Any = -1) -> Any:
        self._log.add("wait", self._units.pop(index))
        return super().pop(index)

    def clear(self) -> None:
        if self.in_post_backward:
            for unit in self._units:
                self._log.add("wait", unit)
        self._units.clear()
        super().clear()

    def replace(self, state: Any) -> None:
        """As torch 2.11 does, which holds one."""
        self.clear()
        if state is not None:
            self.append(state)


def watch_held(context: Any, log: Log) -> _Held:
    """Have torch keep its reduce-scatter inputs in a list that notes waits."""
    held = _Held(log)
    if hasattr(context, "reduce_scatter_states"):
        context.reduce_scatter_states = held
    elif hasattr(context, "reduce_scatter_state"):
        one = property(lambda _: held[-1] if held else None, lambda _, state: held.replace(state))
        context.__class__ = type("Watched", (type(context),), {"reduce_scatter_state": one})
    else:
        raise AssertionError(
            f"torch {torch.__version__} holds reduce-scatter inputs in neither reduce_scatter_states nor "
            "reduce_scatter_state, so waits for them cannot be compared: find where it does"
        )
    return held


@contextmanager
def _logging(model: FSDPModule, log: Log) -> Iterator[None]:
    saved = {name: getattr(groups, name) for name in ("foreach_all_gather", "foreach_all_gather_copy_out")}
    saved["foreach_reduce"] = groups.foreach_reduce
    all_reduce, post_backward = dist.all_reduce, groups.FSDPParamGroup.post_backward
    context = model._get_fsdp_state()._comm_ctx
    held = watch_held(context, log)
    streams = context.all_gather_copy_in_stream, context.all_gather_stream
    context.all_gather_copy_in_stream, context.all_gather_stream = _Stream(log), _Stream(log)
    event = torch.cpu.Event

    def gather(fsdp_params: Any, group: Any, async_op: bool, copy_in: Any, stream: Any, *args: Any) -> Any:
        unit = log.unit(fsdp_params)
        log.gather(unit, (copy_in, stream))
        log.process_groups["all_gather"] = group
        result = saved["foreach_all_gather"](fsdp_params, group, async_op, copy_in, stream, *args)
        log.gathered[unit] = result.all_gather_output.numel() * result.all_gather_output.element_size()
        return result

    def copy_out(result: Any, fsdp_params: Any, *args: Any, **kwargs: Any) -> Any:
        log.add("copy_out", log.unit(fsdp_params))
        return saved["foreach_all_gather_copy_out"](result, fsdp_params, *args, **kwargs)

    def reduce(fsdp_params: Any, gradients: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        unit = log.unit(fsdp_params)
        log.add("reduce_scatter", unit)
        log.process_groups["reduce_scatter"] = group
        result = saved["foreach_reduce"](fsdp_params, gradients, group, *args, **kwargs)
        log.scattered[unit] = result[0].numel() * result[0].element_size()
        return result

    def reduce_copies(*args: Any, **kwargs: Any) -> Any:
        log.add("all_reduce", log.events[-1][1])
        return all_reduce(*args, **kwargs)

    def after_backward(self: Any, *args: Any) -> Any:
        held.in_post_backward = True
        try:
            return post_backward(self, *args)
        finally:
            held.in_post_backward = False

    groups.foreach_all_gather, groups.foreach_all_gather_copy_out, groups.foreach_reduce = gather, copy_out, reduce
    dist.all_reduce, groups.FSDPParamGroup.post_backward = reduce_copies, after_backward
    torch.cpu.Event = _event_of(log)  # type: ignore[misc]
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(groups, name, function)
        dist.all_reduce, groups.FSDPParamGroup.post_backward = all_reduce, post_backward
        torch.cpu.Event = event  # type: ignore[misc]
        context.all_gather_copy_in_stream, context.all_gather_stream = streams


def _step(ctx: Context, model: Any, case: Case, log: Log | None = None) -> None:
    for number in range(case.micro_batches):
        last = number == case.micro_batches - 1
        model.set_requires_gradient_sync(last or case.gradient_sync == "every")
        model.set_reshard_after_backward(last or case.reshard_after_backward)
        if log is not None:
            # Stands for all that came before, the optimizer's step included.
            log.computed.append(("begin", ROOT))
            log.in_forward = True
        loss = model(ctx.data(3, WIDTH, step=number, rank=ctx.rank)).float().square().sum()
        if log is not None:
            log.in_forward = False
        loss.backward()


def _compare(ctx: Context, case: Case) -> Log:
    """One step to settle, then one whose calls are compared, in order."""
    model: Any = ctx.build(lambda: Model(sum(map(len, case.units)), case))
    layers = [layer for layer in model.row() if isinstance(layer, Layer)]
    units = {f"blocks.{block}": index for index, members in enumerate(case.units) for block in members}
    log = Log({layer.name: units.get(layer.name, ROOT) for layer in layers})
    plan, profile = _plan(case, ctx.size), _profile(layers)
    predicted = call_order(profile, plan, micro_batches=case.micro_batches)
    _shard(model, case, ctx.size)
    _step(ctx, model, case)
    for layer in layers:
        layer.log, layer.recomputed = log, case.recomputed
    with _logging(model, log):
        _step(ctx, model, case, log)
    # Blocks of one unit compute one after the other: one part.
    seen = [event for event, _ in groupby(log.events)]
    if case.recomputed:
        turn = next(index for index, (event, _) in enumerate(seen) if event == "backward")
        assert ("forward", 0) in seen[turn:], "nothing was computed again"
        seen = seen[:turn] + [event for event in seen[turn:] if event[0] != "forward"]
    assert seen == predicted, f"\ntorch {torch.__version__} calls {_said(seen)}\npredicted:    {_said(predicted)}"
    log.predicted_waits = _predicted_waits(profile, plan, case.micro_batches)
    elements = chain_of(profile, plan).elements
    parameter_bytes = 2 if case.param_dtype == "bf16" else 4
    for unit, size in log.gathered.items():
        assert size == elements[unit] * parameter_bytes, f"unit {unit} gathers {size} bytes"
    for unit, size in log.scattered.items():
        assert size == elements[unit] * 4, f"unit {unit} scatters {size} bytes"
    return log


def _predicted_waits(profile: Profile, plan: Plan, micro_batches: int) -> list[Wait]:
    chain, sharding = chain_of(profile, plan), plan.sharding
    assert sharding is not None
    network = Network.load("25gbe").at(workers=sharding.mesh.shard * sharding.mesh.replicate)
    made, _ = run_step(chain, ShardedCost.of(profile, network, sharding), 0.0, micro_batches=micro_batches)
    graph = made.graph
    # The copy into the buffer comes first, and waits.
    copies = [op for op, call in enumerate(made.calls) if call.event == "all_gather" and op not in graph.sent]
    found, in_forward = [], True
    for call in calls(chain, micro_batches):
        if call.event in ("begin", "to_backward"):
            in_forward = call.event == "begin"
        elif call.event == "all_gather":
            waits = [before for before in graph.before[copies[len(found)]] if before not in copies]
            after = made.calls[max(waits)]
            found.append(Wait(in_forward, call.unit, (after.event, after.unit)))
    return found


WAITING = (
    Case(head=True, tail=True),
    Case(),
    Case(head=True, prefetch=1),
    Case(head=True, prefetch=2),
    Case(head=True, reshard=(True, False, True, False)),
    Case(head=True, units=((0, 1), (2, 3))),
    Case(head=True, micro_batches=2),
    Case(head=True, buffers=2, separate=True),
)
"""Cases whose all-gathers wait for different things."""


def _compare_waits(ctx: Context, *, in_forward: bool, which: slice) -> None:
    """Of every forward, or backward: what `which` of its all-gathers wait for."""
    for case in WAITING:
        if (case.separate or case.buffers > 1) and TORCH < (2, 13):
            continue
        log = _compare(ctx, case)
        seen, predicted = (
            [wait for forward, waits in groupby(all_waits, lambda wait: wait.in_forward) if forward == in_forward
             for wait in list(waits)[which]]
            for all_waits in (log.waits, log.predicted_waits)
        )  # fmt: skip
        assert predicted, f"{case} gathers nothing"
        for torch_waits, expected in zip(seen, predicted, strict=True):
            assert torch_waits == expected, (
                f"{case}\ntorch {torch.__version__}: the gather of unit {expected.unit} waits for {torch_waits.after}, "
                f"predicted: {expected.after}"
            )


def _said(events: Events) -> str:
    short = {"all_gather": "AG", "copy_out": "out", "forward": "F", "backward": "B", "reduce_scatter": "RS",
             "all_reduce": "AR", "wait": "wait"}  # fmt: skip
    return " ".join(f"{short[event]}{'r' if unit == ROOT else unit}" for event, unit in events)


@check
def by_default_backward_gathers_one_unit_ahead_and_waits_for_the_last_reduce_scatter(ctx: Context) -> None:
    _compare(ctx, Case())


@check
def the_root_is_gathered_first_stays_and_is_reduced_last(ctx: Context) -> None:
    _compare(ctx, Case(head=True, tail=True))


@check
def a_layer_of_the_root_between_units_changes_nothing(ctx: Context) -> None:
    _compare(ctx, Case(head=True, middle=True, tail=True))


@check
def recomputing_blocks_gathers_nothing_more(ctx: Context) -> None:
    _compare(ctx, Case(head=True, tail=True, recomputed=True))


@check
def a_root_that_only_follows_the_blocks_is_reduced_before_the_first_of_them(ctx: Context) -> None:
    _compare(ctx, Case(tail=True))


@check
def units_that_do_not_reshard_are_gathered_once(ctx: Context) -> None:
    _compare(ctx, Case(head=True, reshard=(False, False, False, False)))


@check
def resharding_is_chosen_unit_by_unit(ctx: Context) -> None:
    _compare(ctx, Case(head=True, reshard=(True, False, True, False)))


@check
def prefetching_one_unit_issues_its_gather_before_forward(ctx: Context) -> None:
    _compare(ctx, Case(head=True, prefetch=1))


@check
def prefetching_two_units_keeps_two_gathers_ahead(ctx: Context) -> None:
    _compare(ctx, Case(head=True, prefetch=2))


@check
def two_blocks_in_a_unit_are_gathered_and_reduced_together(ctx: Context) -> None:
    _compare(ctx, Case(head=True, units=((0, 1), (2, 3))))


@check
def micro_batches_without_gradient_sync_reduce_nothing(ctx: Context) -> None:
    _compare(ctx, Case(head=True, micro_batches=3, gradient_sync="last"))


@check
def micro_batches_with_gradient_sync_reduce_every_time(ctx: Context) -> None:
    _compare(ctx, Case(head=True, micro_batches=2))


@check
def parameters_kept_after_backward_are_not_gathered_again(ctx: Context) -> None:
    case = Case(head=True, micro_batches=2, gradient_sync="last", reshard_after_backward=False)
    _compare(ctx, case)
    # ZeRO-1: gathered once a step.
    _compare(ctx, replace(case, reshard=(False, False, False, False)))


@check
def more_reduce_scatter_buffers_wait_later(ctx: Context) -> None:
    _compare(ctx, Case(head=True, buffers=2))
    _compare(ctx, Case(head=True, buffers=3))


@check
def a_separate_group_carries_reduce_scatters_in_the_same_order(ctx: Context) -> None:
    log = _compare(ctx, Case(head=True, separate=True))
    assert log.process_groups["reduce_scatter"] is not log.process_groups["all_gather"]
    shared = _compare(ctx, Case(head=True))
    assert shared.process_groups["reduce_scatter"] is shared.process_groups["all_gather"]


@check
def copies_are_reduced_behind_every_reduce_scatter(ctx: Context) -> None:
    if ctx.size < 4:
        raise SkipScenarioError("two copies of two shards need four ranks")
    _compare(ctx, Case(head=True, replicate=2))


@check
def parameters_travel_in_their_dtype_and_gradients_in_the_reduce_dtype(ctx: Context) -> None:
    _compare(ctx, Case(head=True, param_dtype="bf16"))


@check
def the_first_gather_of_a_step_waits_for_the_optimizer(ctx: Context) -> None:
    """And that of a micro-batch for the reductions before it."""
    _compare_waits(ctx, in_forward=True, which=slice(1))


@check
def in_forward_a_gather_waits_for_the_copy_out_before_the_last(ctx: Context) -> None:
    """The rate limit."""
    _compare_waits(ctx, in_forward=True, which=slice(1, None))


@check
def the_first_gather_of_backward_waits_for_no_computation(ctx: Context) -> None:
    _compare_waits(ctx, in_forward=False, which=slice(1))


@check
def in_backward_a_gather_waits_for_the_last_copy_out(ctx: Context) -> None:
    _compare_waits(ctx, in_forward=False, which=slice(1, None))


@check
def on_gloo_every_collective_is_waited_for(ctx: Context) -> None:
    """torch returns no work to wait for where it has waited itself, and predictions count with that."""
    if ctx.device.type != "cpu":
        raise SkipScenarioError("on gloo")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    returned: dict[str, list[Any]] = {"all_gather": [], "reduce_scatter": []}

    def recording(works: list[Any], send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(*arguments: Any, **options: Any) -> Any:
            works.append(send(*arguments, **options))
            return works[-1]

        return sent

    with ExitStack() as patched:
        for kind, works in returned.items():
            # As torch calls it since 2.13, and before.
            name = f"{kind}_single" if hasattr(dist, f"{kind}_single") else f"{kind}{_BEFORE_2_13[kind]}"
            patched.enter_context(mock.patch.object(dist, name, recording(works, getattr(dist, name))))
        model(torch.randn(4, WIDTH)).sum().backward()
    # Each unit but the last is gathered for forward and for backward, and reduced once.
    assert len(returned["all_gather"]) >= 3
    assert len(returned["reduce_scatter"]) == 3
    assert all(work is None for works in returned.values() for work in works)
