"""`reducer="ddp"`: the plan through torch's own reducer, as a fallback and to check ours against.

Stock DDP takes a list of bucket sizes and fills its buckets in ready order, so the buckets come out as planned where
the plan follows the ready order. A communication hook spreads them over the communicators.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch

from backbeat.comm.communicators import Communicators
from backbeat.comm.nccl import set_nccl_launch_order
from backbeat.errors import InputError
from backbeat.runtime.reduce import partition as partitions
from backbeat.runtime.reduce.arguments import TorchDDP

if TYPE_CHECKING:
    from backbeat.model import Plan

logger = logging.getLogger("backbeat.runtime")


def construct(
    wrapper: Any,
    arguments: dict[str, Any],
    plan: Plan | None,
    strategy: str | None,
    communicators: int | None,
    reduce_dtype: torch.dtype | None,
) -> None:
    """Run torch's own constructor with the plan's bucket sizes."""
    if strategy is not None:
        raise InputError(
            f"plan={strategy!r} needs backbeat's reducer to measure and switch: give a Plan, or reducer='backbeat'"
        )
    if plan is not None and plan.compressed:
        raise InputError(
            "torch's reducer cannot run a plan with compressed buckets: use reducer='backbeat', or a plan without "
            "compression"
        )
    if plan is not None:
        module = arguments["module"]
        partitions.check_fits(plan, {name for name, _ in module.named_parameters()})
        arguments = {**arguments, **_caps(plan, module)}
    TorchDDP.__init__(wrapper, **arguments)
    count = communicators or (plan.communicators if plan is not None else 1)
    if count > 1 or reduce_dtype is not None:
        set_nccl_launch_order(wrapper.process_group, wrapper.device)
        links = Communicators(wrapper.process_group, wrapper.device, count)
        TorchDDP.register_comm_hook(wrapper, (links, reduce_dtype), _spread)


def _caps(plan: Plan, module: torch.nn.Module) -> dict[str, Any]:
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters() if p.requires_grad}
    groups = [sum(sizes.get(name, 0) for name in group.gradients) for group in plan.buckets]
    caps = [size / 2**20 for size in groups if size]
    if "bucket_cap_mb_list" in inspect.signature(TorchDDP.__init__).parameters:
        return {"bucket_cap_mb_list": caps, "bucket_cap_mb": None}
    logger.warning("this torch takes one bucket size, not a list: reducer='ddp' runs buckets of the plan's mean size")
    return {"bucket_cap_mb": max(sum(caps) / len(caps), 1e-6)}


def _spread(state, bucket):  # type: ignore[no-untyped-def]  # torch inspects a hook's annotations and refuses strings
    """Each bucket on the communicator its number gives it, scaled before the sum."""
    links, reduce_dtype = state
    buffer = bucket.buffer()
    message = buffer.mul_(1.0 / links.size) if reduce_dtype is None else buffer.mul(1.0 / links.size).to(reduce_dtype)
    future = links[bucket.index() % len(links)].all_reduce(message).get_future()

    def arrived(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        found = done.value()[0]
        return found if reduce_dtype is None else buffer.copy_(found)

    return future.then(arrived)
