"""`DistributedDataParallel`: torch's wrapper with a reducer that runs a plan."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.utils import _sync_module_states, _to_kwargs, _verify_param_shape_across_processes
from torch.nn import Module
from torch.nn.parallel.distributed import _find_tensors

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Profile
from backbeat.runtime.compressed import checkpoint
from backbeat.runtime.compressed.compression_options import CompressionOptions, options_of
from backbeat.runtime.compressed.updates import check as check_optimizer
from backbeat.runtime.memory.budget import apply_memory, check_memory, ends_with, within_budget
from backbeat.runtime.reduce import partition as partitions
from backbeat.runtime.reduce import stock
from backbeat.runtime.reduce.arguments import UNSUPPORTED, WIRE, TorchDDP, bind, process_group_of, resolve_plan
from backbeat.runtime.reduce.attributes import cap_bytes_of, set_torch_attributes
from backbeat.runtime.reduce.bucket_report import Report, make_report
from backbeat.runtime.reduce.comm_hooks import builtin
from backbeat.runtime.reduce.first_partition import WrapperSettings
from backbeat.runtime.reduce.joining import ShadowHook
from backbeat.runtime.reduce.refusals import check_model
from backbeat.runtime.reduce.roster import Roster
from backbeat.runtime.reduce.runner import Runner

logger = logging.getLogger("backbeat.runtime")

_disable_dynamo: Any = torch._disable_dynamo  # type: ignore[attr-defined]
profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


class DistributedDataParallel(TorchDDP):  # type: ignore[misc]
    """Torch's `DistributedDataParallel` that runs backbeat's plan.

    Takes everything that the installed torch's wrapper takes, and:

    plan: a `Plan`, the path of one, a strategy's name or "auto". Without it the groups are stock DDP's. A name or
        "auto" starts with DDP's groups, measures, plans and switches; "auto" goes on watching.
    network: a `Network`, a name or a path to plan with; measured on the job's own ranks where it is not given.
    communicators: how many groups may travel at once; the plan's own number where it is not given.
    backend: "backbeat", or "ddp" to run the plan through torch's own reducer.
    wire: "bf16" or "fp16" to send wider gradients in that format.
    strict: on a GPU, learn at the end of every backward, not at the next one, that another rank broke off its backward
        or is in another step; costs a wait for the device in each step.
    sparse: for plans with compressed groups: `backbeat.runtime.compressed.Options`, or a dict of them.
    memory_budget: bytes, or text like "6GB", that an iteration may take at most on the device. Activations are kept,
        recomputed or offloaded as the plan's own memory part says, or as planned here from `profile`.
    profile: a `Profile`, a name or a path, for `memory_budget` where the plan has no memory part.
    """

    def __init__(
        self,
        module: Module,
        *args: Any,
        plan: Plan | str | os.PathLike[str] | None = None,
        network: Network | str | os.PathLike[str] | None = None,
        communicators: int | None = None,
        backend: str = "backbeat",
        wire: str | torch.dtype | None = None,
        strict: bool = False,
        sparse: CompressionOptions | Mapping[str, Any] | None = None,
        memory_budget: int | str | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = bind(module, args, kwargs)
        if backend not in ("backbeat", "ddp"):
            raise InputError(f"backend is {backend!r}: it must be 'backbeat' or 'ddp'")
        if wire is not None and wire not in WIRE:
            raise InputError(
                f"wire is {wire!r}: it must be 'bf16' or 'fp16', or left out to send gradients as they are"
            )
        if communicators is not None and communicators < 1:
            raise InputError(f"communicators is {communicators}: it must be 1 or more")
        check_model(module)
        self._backbeat_backend = backend
        loaded, strategy = resolve_plan(plan)
        workers = dist.get_world_size(process_group_of(arguments))
        loaded, memory = within_budget(loaded, strategy, memory_budget, profile, network, workers)
        strategy = strategy if loaded is None else None
        check_memory(module, memory)
        if backend == "ddp":
            stock.construct(self, arguments, loaded, strategy, communicators, WIRE[wire] if wire else None)
            self._memory = apply_memory(self, module, memory)
            return
        for name, advice in UNSUPPORTED.items():
            if arguments.get(name) is not None:
                raise InputError(f"{name}= is not supported by backbeat's reducer: {advice}")
        super(TorchDDP, self).__init__()
        Joinable.__init__(self)
        set_torch_attributes(self, arguments)
        self._settings = WrapperSettings(
            plan=loaded,
            strategy=strategy,
            network=network,
            communicators=communicators,
            wire=WIRE[wire] if wire else None,
            strict=strict,
            cap_bytes=cap_bytes_of(arguments),
            find_unused=self.find_unused_parameters,
            sparse=options_of(sparse),
        )
        self._warns_of_scaling = self.compressed
        self._assign_modules_buffers()
        self._roster = Roster(module, self.parameters_to_ignore)
        if arguments.get("init_sync", True):
            _verify_param_shape_across_processes(self.process_group, list(self._roster.parameters))
            _sync_module_states(
                module=self.module,
                process_group=self.process_group,
                broadcast_bucket_size=self.broadcast_bucket_size,
                src=0,
                params_and_buffers_to_ignore=self.parameters_to_ignore,
                broadcast_buffers=self._init_sync_buffers,
            )
        self._build()
        if arguments.get("static_graph"):
            self._set_static_graph()
        # Last: a wrapper that was refused must leave the model as it was.
        self._memory = apply_memory(self, module, memory)

    def _build(self) -> None:
        """Communicators, agreement on the partition, and the reducer. Every rank must come here together."""
        self.runner = Runner(
            self._settings,
            self._roster,
            self.process_group,
            self.device,
            model=type(self.module).__name__,
        )
        self.links = self.runner.links
        self.reducer: Any = self.runner.reducer
        if self._settings.plan is not None:
            buckets = self.reducer.buckets
            self.bucket_bytes_cap = max(
                partitions.FIRST_BUCKET_BYTES, sum(bucket.bytes for bucket in buckets) // len(buckets)
            )
        if self._comm_hooks:
            hook, state = self._comm_hooks[-1]
            self.reducer.set_comm_hook(state, hook)

    @property
    def compressed(self) -> bool:
        """Some groups of the plan travel compressed."""
        if self._backbeat_backend == "ddp":
            return False
        return self._settings.plan is not None and self._settings.plan.compressed

    def attach(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None,
        grad_scaler: torch.amp.GradScaler | None = None,
        per_parameter: bool = False,
    ) -> None:
        """Hand an optimizer over to a plan with compressed buckets, which then updates during backward.

        Each bucket is updated as soon as it has arrived, and its gradients are gone. `step()` then changes nothing, but
        schedulers count it. Where no bucket of the plan is compressed, updates stay in `step()` and this does nothing.

        max_grad_norm: clip to this norm over all gradients, as `torch.nn.utils.clip_grad_norm_` does; all updates then
            wait for the last bucket, all gradients with them, and on a GPU the host as with `strict`. None: no
            clipping. `clip_grad_norm_` after backward finds no gradients and does nothing, without saying so.
        grad_scaler: the one in use, if any. It is refused where it is enabled: what a rank has not sent yet outlives
            the step and its scale. Train in bf16. Without `attach` nothing tells the wrapper of a scaler, and none must
            be used with compressed buckets either; forward in fp16 autocast warns of it.
        per_parameter: vouches for an optimizer that is not torch's own: the update of a parameter depends on nothing
            but its own gradient, state and hyperparameters.
        """
        if not self.compressed:
            if max_grad_norm is not None:
                raise InputError(
                    f"max_grad_norm is {max_grad_norm}, but no bucket of the plan is compressed and updates stay in "
                    "step(): leave attach() out and call torch.nn.utils.clip_grad_norm_ after backward"
                )
            return
        check_optimizer(
            optimizer,
            list(self.module.parameters()),
            max_grad_norm=max_grad_norm,
            grad_scaler=grad_scaler,
            per_parameter=per_parameter,
        )
        if self.reducer is None:
            self._build()
        self.reducer.delivery.attach(optimizer, max_grad_norm=max_grad_norm)
        # Updates that follow the last bucket wait to learn whether some rank has called the step off.
        self.reducer.word.strict = self._settings.strict or max_grad_norm is not None
        # Where each bucket is updated at once, decoded means need no buffers of their own.
        with torch.no_grad():
            self.reducer.install(self.reducer.partition)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().forward(*inputs, **kwargs)
        if self._backbeat_backend == "ddp" or profiling():
            return super().forward(*inputs, **kwargs)
        # What torch's own does, without its span for a profiler: that alone costs more than the rest.
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        outer, TorchDDP._active_ddp_module = TorchDDP._active_ddp_module, self
        try:
            output = self.module(*inputs, **kwargs)
        finally:
            TorchDDP._active_ddp_module = outer
        return self._post_forward(output)

    def residual_state_dict(self) -> dict[str, Any]:
        """What this rank has not sent yet, by parameter name; save it with
        `backbeat.runtime.compressed.checkpoint.save`."""
        found: dict[str, Any] = self._encoded_delivery().state()
        return found

    def load_residual_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with residuals that were saved, under this plan or another;
        `backbeat.runtime.compressed.checkpoint.load` gives a rank its share. Every rank calls it."""
        self._encoded_delivery().load(state)

    def save_residuals(self, folder: str | os.PathLike[str]) -> None:
        """Write this rank's residuals into a folder that all ranks share."""
        checkpoint.save(self.residual_state_dict(), folder)

    def load_residuals(self, folder: str | os.PathLike[str]) -> None:
        """Read this rank's share of the residuals that any number of ranks wrote."""
        self.load_residual_state_dict(checkpoint.load(folder, rank=self.links.rank, ranks=self.links.size))

    def _encoded_delivery(self) -> Any:
        if not self.compressed:
            raise InputError("there are no residuals: no group of the plan is compressed")
        if self.reducer is None:
            self._build()
        return self.reducer.delivery

    def report(self) -> Report:
        """Predicted and measured times of every group; printed, a table."""
        if self._backbeat_backend == "ddp" or self.reducer is None:
            raise InputError("report() needs backbeat's reducer: use backend='backbeat' and run a step")
        return make_report(self.reducer, self.runner.recorder, self.runner.tuner, self._settings.plan)

    def counters(self) -> dict[str, float]:
        """A few numbers for a dashboard: `for k, v in model.counters().items(): writer.add_scalar(k, v, step)`."""
        rounds = self.runner.recorder.rounds()
        found = {
            "backbeat/steps": float(self.reducer.step),
            "backbeat/groups": float(len(self.reducer.buckets)),
            "backbeat/communicators": float(self.reducer.partition.communicators),
            "backbeat/late_buckets": float(self.reducer.job.repeats),
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
        training = torch.is_grad_enabled()
        if self.reducer is None and training:
            self._build()
        if training:
            if self._warns_of_scaling:
                self._warn_of_scaling()
            self.reducer.forward_begins(self.require_backward_grad_sync)
            runner = self.runner
            if self._roster.frozen:
                runner.wake_frozen()
            if runner.tuner is not None:
                runner.tuner.forward_begins(self.require_backward_grad_sync)
        work = Join.notify_join_context(self)
        if work is not None and not self._divide_by_initial_world_size:
            work.wait()
            self.reducer.job.scale = 1.0 / float(work.get_future().value()[0].item())
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

    def _warn_of_scaling(self) -> None:
        """Once: forward in fp16 mostly means that a `GradScaler` follows."""
        kind = self.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            self._warns_of_scaling = False
            logger.warning(
                "forward runs in fp16 autocast, and some buckets of the plan are compressed: use no GradScaler, since "
                "what a rank has not sent yet outlives the step and its scale; train in bf16, which needs none"
            )

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
        if self.require_forward_param_sync != sync:
            # A module looks long at whatever it is assigned.
            self.require_forward_param_sync = sync
        alive = self.reducer.weak

        def reached(_: torch.Tensor) -> None:
            reducer = alive()
            if reducer is not None:
                reducer.arm(sync)

        for tensor in _find_tensors(output):
            # A leaf (a parameter handed out as it is) outlives the graph: every forward would add a hook to it.
            if tensor.grad_fn is not None:
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
        if self.reducer is None:
            self._build()
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
            "has_rebuilt_buckets": self.runner.settled and self._settings.plan is None,
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
        """Go on with another set of ranks: new communicators, and stock groups until a plan fits again."""
        if self._backbeat_backend == "ddp":
            super()._update_process_group(new_process_group)
            return
        self.reducer.remove_hooks()
        self.process_group = new_process_group
        self._build()

    def __getstate__(self) -> dict[str, Any]:
        if self._backbeat_backend == "ddp":
            return dict(super().__getstate__())
        self._check_default_group()
        state = dict(self.__dict__)
        # The copy makes its own of these; it must not share the roster's lists with the original.
        for name in ("process_group", "links", "runner", "_roster"):
            state.pop(name, None)
        state["reducer"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.get("_backbeat_backend") == "ddp":
            super().__setstate__(state)
            ends_with(self, self._memory)
            return
        self.process_group = dist.distributed_c10d._get_default_group()
        Module.__setstate__(self, state)
        ends_with(self, self._memory)
        self._module_parameters = [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        # The reducer is built by the first forward that trains: a copy kept for evaluation never needs one.
        self._assign_modules_buffers()
        self._roster = Roster(self.module, self.parameters_to_ignore)
