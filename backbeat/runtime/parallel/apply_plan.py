"""A plan of either kind on a plain model: buckets in the DDP wrapper, units by `fully_shard`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from backbeat.errors import InputError
from backbeat.model import Plan
from backbeat.runtime.ddp.wrapper import DistributedDataParallel
from backbeat.runtime.plain_model import check_model
from backbeat.runtime.reduce.managed_parameters import check_free
from backbeat.runtime.running_plans import runs
from backbeat.runtime.torch_internals import TorchDDP


def apply_plan(model: nn.Module, plan: Plan, *, group: Any = None, mesh: DeviceMesh | None = None) -> nn.Module:
    """The model, running as the plan says. Units change the model in place, buckets wrap it."""
    if plan.sharding is not None:
        # torch takes a second to import it.
        from backbeat.runtime.sharded.shard import fully_shard

        return fully_shard(model, plan, mesh)
    if not is_stock(plan):
        return DistributedDataParallel(model, plan=plan, process_group=group)
    unused = plan.made_for is not None and plan.made_for.unused
    wrapped: Any = DistributedDataParallel(model, reducer="ddp", process_group=group, find_unused_parameters=unused)
    runs(model, plan)
    parallel: nn.Module = wrapped
    return parallel


def is_stock(plan: Plan) -> bool:
    """Whether `parallelize` found torch's own DDP best: the plan is then only its prediction."""
    return plan.strategy == "ddp" and plan.memory is None and plan.made_for is not None


def check_plain(model: nn.Module) -> None:
    """Refuse a model that runs in parallel already."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}: it must be a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, TorchDDP):
            which = f"module {name!r}" if name else "the model"
            raise InputError(
                f"{which} is wrapped in {type(module).__name__} already: give the plain model (model.module), before "
                "its optimizer is made"
            )
    check_model(model)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if not trained:
        raise InputError("no parameter of the model has requires_grad: there is nothing to train; unfreeze some")
    check_free(list(trained), list(trained.values()))
