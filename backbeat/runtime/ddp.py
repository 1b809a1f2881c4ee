"""`DistributedDataParallel`: torch's wrapper with a reducer that runs a plan."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.utils import _sync_module_states, _to_kwargs, _verify_param_shape_across_processes
from torch.nn import Module
from torch.nn.parallel.distributed import _find_tensors

from backbeat.errors import InputError
from backbeat.model import Network, Plan
from backbeat.runtime import partition as partitions
from backbeat.runtime import stock
from backbeat.runtime.agreement import agree, share
from backbeat.runtime.arguments import (
    UNSUPPORTED,
    WIRE,
    TorchDDP,
    bind,
    device_ids_of,
    process_group_of,
    resolve_plan,
    respread,
)
from backbeat.runtime.channels import Channels
from backbeat.runtime.decoupled import DecoupledReducer
from backbeat.runtime.handover import attach
from backbeat.runtime.handover import check as check_optimizer
from backbeat.runtime.hooks import builtin
from backbeat.runtime.joining import ShadowHook
from backbeat.runtime.pending import forget_gradient
from backbeat.runtime.reducer import Reducer
from backbeat.runtime.refusals import check_model
from backbeat.runtime.report import Report, make_report
from backbeat.runtime.timing import Recorder

if TYPE_CHECKING:
    from backbeat.runtime.auto import Tuner
    from backbeat.runtime.partition import Partition

_disable_dynamo: Any = torch._disable_dynamo  # type: ignore[attr-defined]

# Rounds that are timed for `report()`: the first few, then a few in a thousand.
SAMPLED_FIRST = 8
SAMPLED_EVERY = 200


class DistributedDataParallel(TorchDDP):  # type: ignore[misc]
    """Torch's `DistributedDataParallel` that runs backbeat's plan.

    Takes everything that the installed torch's wrapper takes, and:

    plan: a `Plan`, the path of one, a strategy's name or "auto". Without it the groups are stock DDP's. A name or
        "auto" starts with DDP's groups, measures, plans and switches; "auto" goes on watching.
    network: a `Network`, a name or a path to plan with; measured on the job's own ranks where it is not given.
    channels: how many groups may travel at once; the plan's own number where it is not given.
    backend: "backbeat", or "ddp" to run the plan through torch's own reducer.
    wire: "bf16" or "fp16" to send wider gradients in that format.
    strict: on a GPU, learn at the end of every backward, not at the next one, that another rank broke off its backward
        or is in another step; costs a wait for the device in each step.
    """

    def __init__(
        self,
        module: Module,
        *args: Any,
        plan: Plan | str | os.PathLike[str] | None = None,
        network: Network | str | os.PathLike[str] | None = None,
        channels: int | None = None,
        backend: str = "backbeat",
        wire: str | torch.dtype | None = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        arguments = bind(module, args, kwargs)
        if backend not in ("backbeat", "ddp"):
            raise InputError(f"backend is {backend!r}: it must be 'backbeat' or 'ddp'")
        if wire is not None and wire not in WIRE:
            raise InputError(
                f"wire is {wire!r}: it must be 'bf16' or 'fp16', or left out to send gradients as they are"
            )
        if channels is not None and channels < 1:
            raise InputError(f"channels is {channels}: it must be 1 or more")
        check_model(module)
        self._backbeat_backend = backend
        loaded, strategy = resolve_plan(plan)
        if backend == "ddp":
            stock.construct(self, arguments, loaded, strategy, channels, WIRE[wire] if wire else None)
            return
        for name, advice in UNSUPPORTED.items():
            if arguments.get(name) is not None:
                raise InputError(f"{name}= is not supported by backbeat's reducer: {advice}")
        super(TorchDDP, self).__init__()
        Joinable.__init__(self)
        self._set_torch_attributes(arguments)
        self._wire = WIRE[wire] if wire else None
        self._strict = strict
        self._plan = loaded
        self._channels_asked = channels
        self._planned = False
        self._inside: list[Module] = []
        self._tuner: Tuner | None = None
        self._tuner_settings = (strategy, network)
        self._collect_parameters()
        if arguments.get("init_sync", True):
            _verify_param_shape_across_processes(self.process_group, self._all_parameters())
            _sync_module_states(
                module=self.module,
                process_group=self.process_group,
                broadcast_bucket_size=self.broadcast_bucket_size,
                src=0,
                params_and_buffers_to_ignore=self.parameters_to_ignore,
                broadcast_buffers=self._init_sync_buffers,
            )
        self._build_reducer()
        if arguments.get("static_graph"):
            self._set_static_graph()

    def _set_torch_attributes(self, arguments: dict[str, Any]) -> None:
        """What torch's constructor leaves on the object, and frameworks and inherited methods read."""
        module = arguments["module"]
        self.logger = None
        self._use_python_reducer = False
        self.process_group = process_group_of(arguments)
        if arguments.get("device_mesh") is not None:
            self.device_mesh = arguments["device_mesh"]
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        if not any(p.requires_grad for p in self._module_parameters):
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
                "gradient."
            )
        if any(hasattr(p, "_in_backward_optimizers") for p in self._module_parameters):
            raise InputError("the model updates parameters in backward: backbeat reduces gradients before the update")
        devices = {p.device for p in self._module_parameters}
        types = {device.type for device in devices}
        if len(types) != 1:
            raise ValueError(
                "DistributedDataParallel's input module must be on the same type of devices, but has parameters on "
                f"{types}"
            )
        self.device_type = next(iter(types))
        self.is_multi_device_module = len(devices) > 1
        self.device_ids, self.output_device = device_ids_of(
            arguments, self.device_type, self.is_multi_device_module, devices
        )
        self.dim = arguments.get("dim", 0)
        self.module = module
        self.device = next(iter(self._module_parameters)).device
        broadcast = arguments.get("broadcast_buffers")
        forward_sync = arguments.get("forward_sync_buffers")
        self._init_sync_buffers = True if forward_sync is not None else broadcast is None or bool(broadcast)
        chosen = forward_sync if forward_sync is not None else broadcast
        # A property over `forward_sync_buffers` in newer torch, a plain attribute in older.
        self.broadcast_buffers = True if chosen is None else bool(chosen)
        self.forward_sync_buffers = self.broadcast_buffers
        self.find_unused_parameters = arguments.get("find_unused_parameters", False)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.gradient_as_bucket_view = True
        self.batched_grad_copy = True
        self.mixed_precision = None
        self.skip_all_reduce_unused_params = arguments.get("skip_all_reduce_unused_params", False)
        self.static_graph = False
        self._static_graph_delay_allreduce_enqueued = True
        self.broadcast_bucket_size = 250 * 1024 * 1024
        cap = arguments.get("bucket_cap_mb")
        self._cap_bytes = None if cap is None else int(cap * 2**20)
        # torch.compile splits the graph where a bucket of this size would end, and refuses less than the first bucket.
        self.bucket_bytes_cap = max(partitions.FIRST_BUCKET_BYTES, self._cap_bytes or partitions.BUCKET_BYTES)
        self.bucket_bytes_cap_default = self._cap_bytes is None
        self.bucket_bytes_cap_list: list[int] = []
        self.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        self._delay_grad_buffer = None
        self._delay_grad_views: list[torch.Tensor] = []
        self._delay_all_reduce_params: list[torch.Tensor] = []
        self._delay_all_reduce_all_params = False
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._accum_grad_hooks: list[Any] = []
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = True
        self._ddp_sink_clone = False
        self._divide_by_initial_world_size = True
        self._passing_sync_batchnorm_handle(self.module)

    def _collect_parameters(self) -> None:
        """Trainable parameters in registration order, and the frozen ones that may wake up."""
        sparse = {
            id(parameter)
            for child in self.module.modules()
            if getattr(child, "sparse", False) and isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag))
            for parameter in child.parameters(recurse=False)
        }
        managed = [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        trainable = [(n, p) for n, p in managed if p.requires_grad]
        self._names = [name for name, _ in trainable]
        self._frozen = [(n, p) for n, p in managed if not p.requires_grad]
        self._sparse = [id(p) in sparse for _, p in trainable]
        self._sparse_ids = sparse
        self._trainable = [p for _, p in trainable]
        self._assign_modules_buffers()

    def _all_parameters(self) -> list[torch.Tensor]:
        return list(self._trainable)

    def _build_reducer(self) -> None:
        """Channels, agreement on the partition, and the reducer. Every rank must come here together."""
        links = Channels(self.process_group, self.device, 1)
        if self._sparse.count(True) and links.backend != "gloo":
            name = self._names[self._sparse.index(True)]
            raise InputError(
                f"parameter {name!r} has sparse gradients, which {links.backend} cannot sum: "
                "use sparse=False, or the gloo backend"
            )
        partition = self._first_partition(links)
        agree(links, "partition/0", partition.lines(self._names, self._trainable), "the plan")
        links.grow(partition.channels)
        self.links = links
        self._partition_counter = 0
        kind = Reducer if partition.gathers is None else DecoupledReducer
        self.reducer: Any = kind(
            self._names,
            self._trainable,
            channels=links,
            partition=partition,
            wire=self._wire,
            strict=self._strict,
        )
        self.reducer.after_step = weakref.WeakMethod(self._after_step)
        if self._plan is not None:
            self.bucket_bytes_cap = max(
                partitions.FIRST_BUCKET_BYTES, sum(b.bytes for b in self.reducer.buckets) // len(self.reducer.buckets)
            )
        if self._comm_hooks:
            hook, state = self._comm_hooks[-1]
            self.reducer.set_comm_hook(state, hook)
        self._recorder = Recorder(self.device)
        strategy, network = self._tuner_settings
        if strategy is not None:
            from backbeat.runtime.auto import Tuner

            self._tuner = Tuner(self, strategy=strategy, network=network, channels=self._channels_asked)
        self._record_order()

    def _first_partition(self, links: Channels) -> Partition:
        if self._plan is not None:
            plan = self._plan
            if plan.decoupled:
                plan = self._beside_the_buffers(plan, links)
            elif self._channels_asked is not None:
                plan = respread(plan, self._channels_asked)
            if links.allowed(plan.channels) < plan.channels:
                plan = respread(plan, links.allowed(plan.channels))
            self._planned = True
            return partitions.from_plan(
                plan, self._names, self._trainable, self._sparse, frozen=[name for name, _ in self._frozen]
            )
        if self.find_unused_parameters:
            # Stock DDP keeps these for good: filled in registration order and sent in reverse, the small one last.
            found = self._like_ddp(range(len(self._names)), links)
            return replace(found, groups=tuple(reversed(found.groups)))
        return self._like_ddp(reversed(range(len(self._names))), links)

    def _beside_the_buffers(self, plan: Plan, links: Channels) -> Plan:
        """All of a decoupled plan on one channel; on NCCL not the process group's own, where forward's broadcast of
        buffers would queue behind every gather and hide nothing."""
        if self._channels_asked not in (None, 1):
            raise InputError(f"channels is {self._channels_asked}: decoupled plans use one channel; leave it out")
        if links.backend != "nccl" or not self.modules_buffers or links.allowed(2) < 2:
            return respread(plan, 1)
        groups = tuple(msgspec.structs.replace(group, channel=1) for group in plan.groups)
        return msgspec.structs.replace(plan, channels=2, groups=groups)

    def _like_ddp(self, order: Iterable[int], links: Channels) -> Partition:
        # Stock DDP on gloo is two channels: its process group has two worker threads.
        count = self._channels_asked or (2 if links.backend == "gloo" else 1)
        return partitions.like_ddp(
            list(order), self._trainable, self._sparse, cap_bytes=self._cap_bytes, channels=links.allowed(count)
        )

    def _record_order(self) -> None:
        """The first rounds are timed: for the ready order, for the tuner, for the report."""
        self.reducer.recorder = self._recorder

    def _after_step(self) -> None:
        """At the end of each synchronised backward, on every rank alike: settle the groups, sample the times."""
        if not self._planned and not self.find_unused_parameters:
            self._settle_in_ready_order()
        if self._tuner is not None and self._tuner.state != "settled":
            self._tuner.after_step()
        else:
            following = self.reducer.step + 1
            sampled = following <= SAMPLED_FIRST or following % SAMPLED_EVERY == 0
            self.reducer.recorder = self._recorder if sampled else None

    def _settle_in_ready_order(self) -> None:
        """As stock DDP does once: buckets again, in the order in which rank 0's gradients became ready."""
        self._planned = True
        rounds = self._recorder.rounds()
        arrived = sorted(rounds[-1].ready_s, key=lambda place: rounds[-1].ready_s[place]) if rounds else []
        text = share(self.links, "ready-order", ",".join(str(place) for place in arrived))
        order = [int(place) for place in text.split(",") if place]
        missing = sorted(set(range(len(self._names))) - set(order), reverse=True)
        self._has_rebuilt_buckets = True
        self.switch(self._like_ddp([*order, *missing], self.links))

    def switch(self, partition: Partition) -> None:
        """Run another partition from the next step on; every rank calls it at the same step with the same partition."""
        if partition.groups == self.reducer.partition.groups:
            return
        self._partition_counter += 1
        agree(
            self.links,
            f"partition/{self._partition_counter}",
            partition.lines(self._names, self._trainable),
            "the plan",
        )
        self.links.grow(partition.channels)
        with torch.no_grad():
            self.reducer.install(partition)

    def _wake_frozen(self) -> None:
        """Parameters that became trainable since: into trailing groups, on every rank at this forward."""
        woken = [(name, parameter) for name, parameter in self._frozen if parameter.requires_grad]
        if not woken:
            return
        self._frozen = [(name, parameter) for name, parameter in self._frozen if not parameter.requires_grad]
        first = len(self._names)
        self._names.extend(name for name, _ in woken)
        self._trainable.extend(parameter for _, parameter in woken)
        self._sparse.extend(id(parameter) in self._sparse_ids for _, parameter in woken)
        partition = partitions.with_newcomers(
            self.reducer.partition, range(first, len(self._names)), self._trainable, self._sparse
        )
        self._partition_counter += 1
        agree(
            self.links,
            f"partition/{self._partition_counter}",
            partition.lines(self._names, self._trainable),
            "the set of trainable parameters",
        )
        with torch.no_grad():
            self.reducer.add_parameters([name for name, _ in woken], [parameter for _, parameter in woken], partition)
        if self._tuner is not None:
            self._tuner.restart(f"{len(woken)} parameters became trainable")

    @property
    def decoupled(self) -> bool:
        """The plan gathers behind the next forward."""
        return self._backbeat_backend != "ddp" and self._plan is not None and self._plan.decoupled

    def attach(self, optimizer: torch.optim.Optimizer, *, per_parameter: bool = False) -> None:
        """Hand an optimizer over, as a decoupled plan needs it before the first backward; with other plans a no-op.

        Its `step()` then only notes what to do, and each parameter is updated when its gradient has been gathered,
        before anything reads it. `per_parameter` vouches for an optimizer that is not torch's own: the update of a
        parameter depends on nothing but its own gradient, state and hyperparameters.
        """
        if not self.decoupled:
            return
        if self.reducer is None:
            self._build_reducer()
        mine = {id(parameter) for parameter in self.module.parameters()}
        check_optimizer(optimizer, per_parameter)
        if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            raise InputError("attach() got an optimizer that holds no parameter of this model: make it from them")
        attach(optimizer)
        self._inside = list(self.module.modules())
        self.reducer.attached = True

    def finish(self) -> None:
        """Wait for what a decoupled plan has under way and apply every update that is due.

        Reading a weight, a gradient or either `state_dict` does as much for what is read.
        """
        if self.decoupled and self.reducer is not None:
            self.reducer.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self.decoupled or not set_to_none:
            super().zero_grad(set_to_none)
            return
        for parameter in self.parameters():
            forget_gradient(parameter)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self.decoupled:
            self._finish_eagerly()
        return super().forward(*inputs, **kwargs)

    @_disable_dynamo  # type: ignore[untyped-decorator]
    def _finish_eagerly(self) -> None:
        self.finish()

    def report(self) -> Report:
        """Predicted and measured times of every group; printed, a table."""
        if self._backbeat_backend == "ddp" or self.reducer is None:
            raise InputError("report() needs backbeat's reducer: use backend='backbeat' and run a step")
        return make_report(self.reducer, self._recorder, self._tuner, self._plan)

    def counters(self) -> dict[str, float]:
        """A few numbers for a dashboard: `for k, v in model.counters().items(): writer.add_scalar(k, v, step)`."""
        rounds = self._recorder.rounds() if self.reducer is not None else []
        found = {
            "backbeat/steps": float(self.reducer.step),
            "backbeat/groups": float(len(self.reducer.buckets)),
            "backbeat/channels": float(self.reducer.partition.channels),
            "backbeat/late_groups": float(self.reducer.repeats),
        }
        if rounds:
            found["backbeat/exposed_s"] = rounds[-1].exposed_s
            found["backbeat/backward_s"] = rounds[-1].computed_s
        return found

    @_disable_dynamo  # type: ignore[untyped-decorator]
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._backbeat_backend == "ddp":
            found: tuple[Any, Any] = super()._pre_forward(*inputs, **kwargs)
            return found
        if self.reducer is None:
            self._build_reducer()
        training = torch.is_grad_enabled()
        if self.decoupled and (not training or _reads_unseen(self._inside)):
            self.reducer.finish()
        if training:
            self.reducer.forward_begins(self.require_backward_grad_sync)
            if self._frozen:
                self._wake_frozen()
            if self._tuner is not None:
                self._tuner.forward_begins(self.require_backward_grad_sync)
        work = Join.notify_join_context(self)
        if work is not None and not self._divide_by_initial_world_size:
            work.wait()
            self.reducer.scale = 1.0 / float(work.get_future().value()[0].item())
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            moved, moved_kwargs = _to_kwargs(
                inputs,
                kwargs,
                torch.device(self.device_type, self.device_ids[0]),
                self.use_side_stream_for_tensor_copies,
            )
            return moved[0], moved_kwargs[0]
        return inputs, kwargs

    @_disable_dynamo  # type: ignore[untyped-decorator]
    def _post_forward(self, output: Any) -> Any:
        if self._backbeat_backend == "ddp":
            return super()._post_forward(output)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if not torch.is_grad_enabled():
            self.require_forward_param_sync = False
            return output
        sync = self.require_backward_grad_sync
        self.require_forward_param_sync = sync
        alive = self.reducer._weak

        def reached(_: torch.Tensor) -> None:
            reducer = alive()
            if reducer is not None:
                reducer.arm(sync)

        for tensor in _find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(reached)
        return output

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a hook written for stock DDP reduce the groups; the plan still says which and when."""
        if self._backbeat_backend == "ddp":
            super().register_comm_hook(state, hook)
            return
        self._check_comm_hook(hook)
        if self._comm_hooks:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if self.reducer is not None:
            self.reducer.set_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        if self._backbeat_backend == "ddp":
            super()._register_builtin_comm_hook(comm_hook_type)
            return
        self.register_comm_hook(self.process_group, builtin(comm_hook_type))

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        if self._backbeat_backend == "ddp":
            super()._register_fused_optim(optim, *args, optim_params=optim_params, **kwargs)
            return
        raise InputError("an optimizer fused into DDP's buckets is not supported: use backend='ddp'")

    def join_hook(self, **kwargs: Any) -> Any:
        if self._backbeat_backend == "ddp":
            return super().join_hook(**kwargs)
        return ShadowHook(self, kwargs.get("divide_by_initial_world_size", True))

    def _set_static_graph(self) -> None:
        """Accepted, and not needed: the reducer learns the graph and follows it when it changes."""
        if self._backbeat_backend == "ddp":
            super()._set_static_graph()
            return
        self.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        if self._backbeat_backend == "ddp":
            return dict(super()._get_ddp_logging_data())
        buckets = self.reducer.buckets
        return {
            "world_size": self.links.size,
            "rank": self.links.rank,
            "backend_name": self.links.backend,
            "module_name": type(self.module).__name__,
            "bucket_sizes": ", ".join(str(bucket.bytes) for bucket in buckets),
            "num_buckets_reduced": len(buckets),
            "iteration": self.reducer.step,
            "has_rebuilt_buckets": self._has_rebuilt_buckets,
            "gradient_as_bucket_view": True,
            "find_unused_parameters": self.find_unused_parameters,
            "broadcast_buffers": self.broadcast_buffers,
            # Frameworks advise to set it where this is true; it would change nothing here.
            "can_set_static_graph": False,
            "strategy": self.reducer.partition.strategy,
        }

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if self._backbeat_backend == "ddp":
            super()._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _remove_autograd_hooks(self) -> None:
        if self._backbeat_backend == "ddp":
            super()._remove_autograd_hooks()
        elif self.reducer is not None:
            self.reducer.remove_hooks()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with another set of ranks: new channels, and stock groups until a plan fits again."""
        if self._backbeat_backend == "ddp":
            super()._update_process_group(new_process_group)
            return
        self.reducer.remove_hooks()
        self.process_group = new_process_group
        self._build_reducer()

    def __getstate__(self) -> dict[str, Any]:
        if self._backbeat_backend == "ddp":
            return dict(super().__getstate__())
        self._check_default_group()
        self.finish()
        state = dict(self.__dict__)
        for name in ("process_group", "links", "_recorder", "_tuner"):
            state.pop(name, None)
        # The copy must not share the frozen flags' and names' lists with the original.
        state["_inside"] = []
        for name in ("_names", "_trainable", "_sparse", "_frozen", "_sparse_ids"):
            state.pop(name, None)
        state["reducer"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.get("_backbeat_backend") == "ddp":
            super().__setstate__(state)
            return
        self.process_group = dist.distributed_c10d._get_default_group()
        Module.__setstate__(self, state)
        self._tuner = None
        self._planned = self._plan is not None
        self._module_parameters = [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        # The reducer is built by the first forward that trains: a copy kept for evaluation never needs one.
        self._collect_parameters()


def _reads_unseen(modules: list[Module]) -> bool:
    """Compiled and scripted code reads weights where no torch function tells of it."""
    return any(
        getattr(child, "_compiled_call_impl", None) is not None
        or isinstance(child, torch.jit.ScriptModule)
        or type(child).__name__ == "OptimizedModule"
        for child in modules
    )
