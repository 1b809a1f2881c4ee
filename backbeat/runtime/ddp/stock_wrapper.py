"""The plan through torch's own reducer, to fall back on and to check ours against."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from backbeat.comm.communicators import Communicators
from backbeat.comm.nccl import set_nccl_launch_order
from backbeat.errors import InputError
from backbeat.model import Plan
from backbeat.runtime.compressed.attached_optimizers import check_uncompressed
from backbeat.runtime.ddp.settings import (
    bind,
    refuse_inside,
    settings_of,
    split_options,
)
from backbeat.runtime.memory.activations import Handle
from backbeat.runtime.memory.budget import BudgetCheck, apply_memory, budget_check_of, ends_with
from backbeat.runtime.reduce.managed_parameters import claim
from backbeat.runtime.reduce.partition import check_fits
from backbeat.runtime.running_plans import runs
from backbeat.runtime.torch_internals import FIRST_BUCKET_BYTES, TORCH_SIGNATURE, TorchDDP, disable_dynamo

logger = logging.getLogger("backbeat.runtime")


@dataclass(slots=True, kw_only=True)
class StockRun:
    """What backbeat keeps of a model that torch's own reducer trains."""

    frozen: list[tuple[str, torch.nn.Parameter]]
    """Parameters that were not trainable when torch's reducer was made."""
    spread: tuple[int, torch.dtype | None] | None
    """Over how many communicators buckets go, and in which dtype; None where torch sends them itself."""
    memory: Handle | None = None
    """The memory plan in force on the model."""
    budget_check: BudgetCheck | None = None


class StockDistributedDataParallel(TorchDDP):  # type: ignore[misc]
    """`DistributedDataParallel(…, reducer="ddp")`: torch's own reducer.

    Torch takes a list of bucket sizes and fills its buckets in ready order, so they come out as planned where the plan
    follows the ready order. A communication hook spreads them over the communicators.
    """

    bucket_bytes_cap: int
    stock: StockRun
    """All that is ours; everything else is torch's."""
    compressed = False
    """As the other wrapper has it: torch's reducer compresses no bucket."""

    def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        own, kwargs = split_options(kwargs)
        arguments = bind(module, args, kwargs)
        settings, memory = settings_of(module, arguments, **own)
        plan = settings.buckets.plan
        if settings.strategy is not None:
            raise InputError(
                f"plan={settings.strategy!r} needs backbeat's reducer to measure and switch: give a Plan, or "
                "reducer='backbeat'"
            )
        if plan is not None and plan.compressed:
            raise InputError(
                "torch's reducer cannot run a plan with compressed buckets: use reducer='backbeat', or a plan without "
                "compression"
            )
        if plan is not None:
            check_fits(plan, {name for name, _ in module.named_parameters()})
            arguments = {**arguments, **_caps(plan, module)}
        trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
        claim(self, list(trained), list(trained.values()))
        super().__init__(**arguments)
        if plan is not None:
            # torch.compile splits the graph where such a bucket would end, and refuses less than the first bucket.
            self.bucket_bytes_cap = max(FIRST_BUCKET_BYTES, self.bucket_bytes_cap)
        count = settings.buckets.communicators or (plan.communicators if plan is not None else 1)
        self.stock = StockRun(
            frozen=[pair for pair in module.named_parameters() if pair[0] not in trained],
            spread=(count, settings.reduce_dtype) if count > 1 or settings.reduce_dtype is not None else None,
        )
        self._spread_buckets()
        runs(module, plan)
        # Last: a wrapper that was refused must leave the model as it was.
        self.stock.memory = apply_memory(self, module, memory)
        self.stock.budget_check = budget_check_of(settings.budget_bytes, memory, self.process_group, self.device)

    def _spread_buckets(self) -> None:
        """Open communicators, as every rank must together, and send each bucket on its own; once."""
        if self.stock.spread is not None and all(hook is not _spread for hook, _ in self._comm_hooks):
            count, reduce_dtype = self.stock.spread
            set_nccl_launch_order(self.process_group, self.device)
            opened = Communicators(self.process_group, self.device, count)
            self.register_comm_hook((opened, reduce_dtype), _spread)

    def attach(self, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None, **_: Any) -> None:
        """Updates stay in `step()`, as where no bucket of the plan is compressed."""
        check_uncompressed(max_grad_norm)

    @disable_dynamo  # type: ignore[untyped-decorator]
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if TorchDDP._active_ddp_module is not None:
            refuse_inside(TorchDDP._active_ddp_module, self)
        if torch.is_grad_enabled():
            self._refuse_unfrozen()
            self._spread_buckets()
            if self.stock.budget_check is not None:
                # The step before: torch's reducer calls nothing of ours when one ends.
                self.stock.budget_check.after_step()
        return super()._pre_forward(*inputs, **kwargs)

    def _refuse_unfrozen(self) -> None:
        """Torch's reducer has the parameters that were trainable when it was made; ranks would silently part."""
        ignored = self.parameters_to_ignore
        unfrozen = (name for name, one in self.stock.frozen if one.requires_grad and name not in ignored)
        name = next(unfrozen, None)
        if name is not None:
            raise InputError(
                f"parameter {name!r} became trainable after the model had been wrapped, and torch's reducer does not "
                "send its gradient: unfreeze it before, or wrap the model again; reducer='backbeat' would take it in"
            )

    def report(self) -> NoReturn:
        raise InputError(
            "report(): torch's own reducer runs, whose buckets backbeat does not time: use backbeat.runtime.Watch"
        )

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        # Torch's copies lose their hooks. Ours, with its communicators, comes back in the first forward that trains: a
        # copy kept for evaluation never needs them.
        state["_comm_hooks"] = [each for each in self._comm_hooks if each[0] is not _spread]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        ends_with(self, self.stock.memory)


def _caps(plan: Plan, module: torch.nn.Module) -> dict[str, Any]:
    sizes = {name: p.nbytes for name, p in module.named_parameters() if p.requires_grad}
    buckets = [sum(sizes.get(name, 0) for name in bucket.gradients) for bucket in plan.buckets]
    caps = [size / 2**20 for size in buckets if size]
    if "bucket_cap_mb_list" in TORCH_SIGNATURE.parameters:
        return {"bucket_cap_mb_list": caps, "bucket_cap_mb": None}
    logger.warning("this torch takes one bucket size, not a list: reducer='ddp' runs buckets of the plan's mean size")
    return {"bucket_cap_mb": max(sum(caps) / len(caps), 1e-6)}


def _spread(state, bucket):  # type: ignore[no-untyped-def]  # torch inspects a hook's annotations and refuses strings
    """Each bucket on the communicator its number gives it, scaled before the sum. Torch's own hooks send on the process
    group alone, in the bucket's dtype or in fp16 and bf16."""
    communicators, reduce_dtype = state
    buffer, size = bucket.buffer(), communicators.size
    message = buffer.mul_(1.0 / size) if reduce_dtype is None else buffer.mul(1.0 / size).to(reduce_dtype)
    future = communicators[bucket.index() % len(communicators)].all_reduce(message).get_future()

    def arrived(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        found = done.value()[0]
        return found if reduce_dtype is None else buffer.copy_(found)

    return future.then(arrived)
