"""`DistributedDataParallel`: torch's wrapper with a reducer that runs a plan, ours or torch's own."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn import Module

from backbeat.comm.communicators import profiling
from backbeat.errors import InputError
from backbeat.model import Network, Plan, Profile
from backbeat.runtime.compressed import checkpoint
from backbeat.runtime.compressed.attached_optimizers import check_optimizer, check_uncompressed
from backbeat.runtime.compressed.compression_options import CompressionOptions
from backbeat.runtime.ddp.bucket_report import make_report
from backbeat.runtime.ddp.comm_hooks import builtin_hook
from backbeat.runtime.ddp.logging_data import WrapperLogger
from backbeat.runtime.ddp.reducer import Reducer
from backbeat.runtime.ddp.settings import (
    bind,
    check_supported,
    process_group_of,
    refuse_inside,
    settings_of,
)
from backbeat.runtime.ddp.stock_wrapper import StockDistributedDataParallel
from backbeat.runtime.memory.budget import apply_memory, budget_check_of, ends_with
from backbeat.runtime.torch_internals import (
    FIRST_BUCKET_BYTES,
    TORCH_SIGNATURE,
    TorchDDP,
    disable_dynamo,
    find_tensors,
    to_kwargs,
)
from backbeat.show.tables.bucket_table import Report


class DistributedDataParallel(TorchDDP):  # type: ignore[misc]
    """Torch's `DistributedDataParallel` that runs backbeat's plan.

    Takes everything that the installed torch's wrapper takes, and:

    - `plan`: a `Plan`, the path of one, a strategy's name or "auto". Without it the buckets are stock DDP's. A name or
      "auto" starts with DDP's buckets, measures, plans and switches; "auto" goes back where that is slower.
    - `network`: a `Network`, a name or a path to plan with; measured on the job's own ranks where it is not given.
    - `communicators`: how many buckets may travel at once; the plan's own number where it is not given.
    - `reducer`: "backbeat", or "ddp" to run the plan through torch's own reducer.
    - `reduce_dtype`: "bf16" or "fp16" to send wider gradients in that format.
    - `strict`: on a GPU, raise at the end of a backward, not in the next one, where another rank broke off its
      backward or is in another step. Each step then waits for the device.
    - `compression`: for plans with compressed buckets: `backbeat.runtime.compressed.CompressionOptions`, or a dict of
      them.
    - `memory_budget`: bytes, or text like "6GB", that an iteration may take at most on the device. Activations are
      kept, recomputed or offloaded as the plan's own memory part says, or as planned here from `profile`.
    - `profile`: a `Profile`, a name or a path, for `memory_budget` where the plan has no memory part.

    Several models may be wrapped, each parameter by one wrapper. Their backwards must come in the same order on every
    rank, and so must their forwards where one backward goes through several. Where one rank runs model A's before B's
    and another B's before A's, each waits for the other until the process group's timeout, and the error says so.

    `isinstance(model, torch.nn.parallel.DistributedDataParallel)` holds for either reducer; with "ddp" the model is a
    `StockDistributedDataParallel`.
    """

    reducer: Reducer
    bucket_bytes_cap: int
    _divide_by_initial_world_size = True
    """torch's own; `join` sets it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Torch's own reducer needs nothing of this class. A copy or an unpickled wrapper comes here without arguments.
        if cls is DistributedDataParallel and kwargs.get("reducer") == "ddp":
            return StockDistributedDataParallel(*args, **{k: v for k, v in kwargs.items() if k != "reducer"})
        return super().__new__(cls)

    def __init__(
        self,
        module: Module,
        *args: Any,
        plan: Plan | str | os.PathLike[str] | None = None,
        network: Network | str | os.PathLike[str] | None = None,
        communicators: int | None = None,
        reducer: str = "backbeat",
        reduce_dtype: str | torch.dtype | None = None,
        strict: bool = False,
        compression: CompressionOptions | Mapping[str, Any] | None = None,
        memory_budget: int | str | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = bind(module, args, kwargs)
        if reducer == "ddp":
            raise InputError("reducer='ddp' is a class of its own: derive from StockDistributedDataParallel")
        if reducer != "backbeat":
            raise InputError(f"reducer is {reducer!r}: it must be 'backbeat' or 'ddp'")
        settings, memory = settings_of(
            module,
            arguments,
            plan=plan,
            network=network,
            communicators=communicators,
            reduce_dtype=reduce_dtype,
            strict=strict,
            compression=compression,
            memory_budget=memory_budget,
            profile=profile,
        )
        check_supported(arguments)
        # A mesh stands for its process group: torch would prepare the model for DTensors, which are refused.
        changed = {"process_group": process_group_of(arguments), "device_mesh": None, "gradient_as_bucket_view": True}
        super().__init__(**{**arguments, **changed})
        if arguments.get("device_mesh") is not None:
            self.device_mesh = arguments["device_mesh"]
        self._use_python_reducer = False
        self.reducer = Reducer(settings)
        self.reducer.bind_model(module, self.parameters_to_ignore, self.process_group, self.device)
        self.reducer.build()
        sizes = [bucket.bytes for bucket in self.reducer.buckets]
        # torch.compile splits the graph where a bucket of this size would end, and refuses less than the first bucket.
        cap = self.bucket_bytes_cap if settings.buckets.plan is None else sum(sizes) // len(sizes)
        self.bucket_bytes_cap = max(FIRST_BUCKET_BYTES, cap)
        views = arguments.get("gradient_as_bucket_view", False)
        self.logger = WrapperLogger(self, bucket_cap_bytes=cap, gradient_as_bucket_view=views)
        # Last: a wrapper that was refused must leave the model as it was.
        self.reducer.memory = apply_memory(self, module, memory)
        self.reducer.budget_check = budget_check_of(settings.budget_bytes, memory, self.process_group, self.device)

    def _ddp_init_helper(self, *_: Any) -> None:
        """Torch's constructor builds its reducer here; ours is built when that is done."""
        self._passing_sync_batchnorm_handle(self.module)

    def _register_accum_grad_hook(self) -> None:
        """torch.compile may ask for torch's reducer in Python: ours takes its place."""

    @property
    def compressed(self) -> bool:
        """Some buckets of the plan travel compressed."""
        return self.reducer.compressed

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
        schedulers count it. Where no bucket of the plan is compressed, updates stay in `step()`: this does nothing, and
        refuses a `max_grad_norm`.

        max_grad_norm: clip to this norm over all gradients, as `torch.nn.utils.clip_grad_norm_` does. All gradients are
            then held until the last bucket has arrived, and all updates follow; on a GPU the host waits as with
            `strict`. None: no clipping. `clip_grad_norm_` after backward finds no gradients and silently does nothing.
        grad_scaler: the one in use, if any. An enabled one is refused: what a rank has not sent yet outlives the step
            and its scale. Train in bf16. Without `attach` the wrapper cannot see a scaler. Use none with compressed
            buckets there either; forward in fp16 autocast warns of it.
        per_parameter: True vouches for an optimizer that is not torch's own: it updates each parameter from nothing but
            that parameter's gradient, state and hyperparameters.
        """
        if not self.compressed:
            check_uncompressed(max_grad_norm)
            return
        check_optimizer(
            optimizer,
            list(self.module.parameters()),
            max_grad_norm=max_grad_norm,
            grad_scaler=grad_scaler,
            per_parameter=per_parameter,
        )
        sparse = self.reducer.managed.sparse_names()
        if max_grad_norm is not None and sparse:
            raise InputError(
                f"parameter {sparse[0]!r} has sparse gradients, which torch cannot clip: attach(max_grad_norm=None), "
                "or nn.Embedding(sparse=False)"
            )
        self.reducer.attach(optimizer, max_grad_norm=max_grad_norm)

    def residual_state_dict(self) -> dict[str, Any]:
        """What this rank has not sent yet, by parameter name; save it with
        `backbeat.runtime.compressed.checkpoint.save`."""
        return self.reducer.residuals.state()

    def load_residual_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with residuals that were saved, under this plan or another;
        `backbeat.runtime.compressed.checkpoint.load` gives a rank its share. Every rank calls it."""
        self.reducer.load_residuals(lambda: state)

    def save_residuals(self, folder: str | os.PathLike[str]) -> None:
        """Write this rank's residuals into a folder that all ranks share."""
        checkpoint.save(self.residual_state_dict(), folder)

    def load_residuals(self, folder: str | os.PathLike[str]) -> None:
        """Read this rank's share of the residuals that any number of ranks wrote. Every rank calls it."""
        communicators = self.reducer.runner.context.communicators
        self.reducer.load_residuals(lambda: checkpoint.load(folder, rank=communicators.rank, ranks=communicators.size))

    def report(self) -> Report:
        """Predicted and measured times of every bucket; printed, a table."""
        if not self.reducer.built:
            raise InputError("report() has nothing to report yet: run a training step first")
        return make_report(self.reducer)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or profiling():
            return super().forward(*inputs, **kwargs)
        # What torch's own does, without its span for a profiler: that alone costs more than the rest.
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        outer, TorchDDP._active_ddp_module = TorchDDP._active_ddp_module, self
        try:
            output = self.module(*inputs, **kwargs)
        finally:
            TorchDDP._active_ddp_module = outer
        return self._post_forward(output)

    @disable_dynamo  # type: ignore[untyped-decorator]
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if TorchDDP._active_ddp_module is not None:
            refuse_inside(TorchDDP._active_ddp_module, self)
        if torch.is_grad_enabled():
            self.reducer.forward_begins(self.require_backward_grad_sync)
        work = Join.notify_join_context(self)
        if work is not None and not self._divide_by_initial_world_size:
            work.wait()
            self.reducer.runner.context.average_over(float(work.get_future().value()[0].item()))
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            moved, moved_kwargs = to_kwargs(
                inputs,
                kwargs,
                torch.device(self.device_type, self.device_ids[0]),
                self.use_side_stream_for_tensor_copies,
            )
            return moved[0], moved_kwargs[0]
        return inputs, kwargs

    @disable_dynamo  # type: ignore[untyped-decorator]
    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if not torch.is_grad_enabled():
            self.require_forward_param_sync = False
            return output
        sync = self.require_backward_grad_sync
        if self.require_forward_param_sync != sync:
            # nn.Module.__setattr__ is slow.
            self.require_forward_param_sync = sync
        reached = self.reducer.runner.output_hook(sync)
        for tensor in find_tensors(output):
            # A leaf (a parameter handed out as it is) outlives the graph: every forward would add a hook to it.
            if tensor.grad_fn is not None:
                tensor.register_hook(reached)
        return output

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a hook written for stock DDP reduce the buckets; the plan still says which and when."""
        self._check_comm_hook(hook)
        if self._comm_hooks:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.reducer.set_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))
        self.logger._set_comm_hook_name(hook.__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(self.process_group, builtin_hook(comm_hook_type))
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        raise InputError("an optimizer fused into DDP's buckets is not supported: use reducer='ddp'")

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        raise InputError("sparse gradients travel with their own indices: use reducer='ddp' to give their rows")

    def join_hook(self, **kwargs: Any) -> Any:
        if not self.reducer.built:
            self.reducer.build()
        self.logger._set_uneven_input_join()
        return _AbsentRank(self, kwargs.get("divide_by_initial_world_size", True))

    def _set_static_graph(self) -> None:
        """Accepted, and not needed: the reducer learns the graph and follows it when it changes."""
        self.static_graph = True
        if self.logger is not None:
            self.logger._set_static_graph()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with another set of ranks: new communicators, and buckets as in the first step."""
        if self.compressed:
            raise InputError(
                "another process group cannot take over what compressed buckets have not sent: save_residuals(folder), "
                "wrap the model again, attach the optimizer and load_residuals(folder)"
            )
        self.process_group = new_process_group
        self.reducer.move_to(new_process_group)

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = dict(self.__dict__)
        state.pop("process_group")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = dist.distributed_c10d._get_default_group()
        Module.__setstate__(self, state)
        ends_with(self, self.reducer.memory)
        self._module_parameters = [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        # The reducer is built by the first forward that trains: a copy kept for evaluation never needs one.
        self._assign_modules_buffers()
        self.reducer.bind_model(self.module, self.parameters_to_ignore, self.process_group, self.device)


def _signature(first: str) -> inspect.Signature:
    """Torch's arguments as the installed version has them, and ours: what `inspect` and editors show."""
    torchs = [one for one in TORCH_SIGNATURE.parameters.values() if one.name != "self"]
    own = inspect.signature(DistributedDataParallel.__init__).parameters.values()
    ours = [one for one in own if one.kind is one.KEYWORD_ONLY]
    return inspect.Signature([inspect.Parameter(first, inspect.Parameter.POSITIONAL_OR_KEYWORD), *torchs, *ours])


DistributedDataParallel.__new__.__signature__ = _signature("cls")  # type: ignore[attr-defined]
DistributedDataParallel.__init__.__signature__ = _signature("self")  # type: ignore[attr-defined]


class _AbsentRank(JoinHook):
    """Uneven inputs: what a rank that has run out of data does while the others go on."""

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self._ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        super().__init__()

    def main_hook(self) -> None:
        ddp = self._ddp
        ddp._check_and_sync_module_buffers()
        sync = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        ddp.require_forward_param_sync = sync
        if sync:
            ddp.reducer.runner.run_absent()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._ddp._sync_final_model(is_last_joiner)
        reducer = self._ddp.reducer
        reducer.runner.context.average_over(reducer.communicators.size)
