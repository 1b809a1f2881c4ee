"""`parallelize`: prepare a model for data-parallel training, before its optimizer is made.

from backbeat.runtime import parallelize

model = parallelize(model, plan="auto", example=(batch, loss))     # or plan="plan.json"
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)         # as always, after
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import nn

from backbeat.comm.agreement import same_on_all_ranks
from backbeat.errors import InputError
from backbeat.measure.model.inputs import device_of
from backbeat.measure.model.training_step import Loss
from backbeat.model import Network, Plan
from backbeat.model.files import encode
from backbeat.runtime.parallel.apply_plan import apply_plan, check_plain
from backbeat.runtime.parallel.plan_file import digest, model_digest
from backbeat.runtime.parallel.request import ParallelRequest, auto_path, given_plan
from backbeat.runtime.parallel.search import ParallelSearch
from backbeat.runtime.parallel.trials import MakeOptimizer

BUDGET_S = 50.0


def parallelize(
    model: nn.Module,
    plan: Plan | str | os.PathLike[str] = "auto",
    *,
    example: tuple[Any, Loss] | None = None,
    optimizer: MakeOptimizer = "adamw",
    memory: int | str | None = None,
    compression: str | None = None,
    network: Network | str | os.PathLike[str] | None = None,
    precision: str | None = None,
    budget_s: float = BUDGET_S,
) -> nn.Module:
    """The model, ready to train data-parallel on all ranks; every rank calls it.

    Make the optimizer afterwards, of the model returned: units replace parameters, and one made before trains nothing.

    plan: a `Plan` or the path of one: buckets run in `DistributedDataParallel`, units by `fully_shard`. "auto" measures
        and takes the fastest of stock DDP, planned buckets and planned units. "auto:FILE" also writes the plan. The
        next run reads it, if it was made for the same ranks, model, batch, device, network, versions and arguments.
    example: for "auto": a batch of this rank, and `loss(model, batch)`, which returns what backward starts from.
        It trains copies of the model; where memory has no room for one, it times the model itself and restores it from
        the host. Afterwards weights, buffers, gradients and random generators are as before, also of what else the loss
        reaches, as a GAN's discriminator; a warning says where the loss reaches more than the model.
    optimizer: for "auto": what to try with: `sgd`, `adam` or `adamw`, or a function of a list of parameters.
    memory: for "auto": what an iteration may take on the device, in bytes or like "6GB".
    compression: for "auto": "allow" lets it take compressed buckets. Then also call `model.attach(optimizer,
        max_grad_norm=…)`.
    network: for "auto": a `Network`, a name or a path to predict with; measured on the job's ranks where left out. What
        it does not say of the model and the host is measured: how much communication slows a step down, and FSDP2's
        cost.
    precision: for "auto": `bf16` or `fp16` where training runs under autocast around `loss`; left out, the loss runs
        as it is.
    budget_s: for "auto": about how long it may take.
    """
    if not dist.is_initialized():
        raise InputError("torch.distributed is not initialised: call init_process_group first, or run under torchrun")
    with same_on_all_ranks("parallelize") as said:
        check_plain(model)
        said["model"] = model_digest(model)
        path = auto_path(plan)
        if path is None:
            given = given_plan(plan)
            said["plan"] = digest([encode(given).decode()])
        else:
            request = ParallelRequest.checked(
                device_of(model, None),
                example=example,
                optimizer=optimizer,
                memory=memory,
                compression=compression,
                network=network,
                precision=precision,
                budget_s=budget_s,
            )
            said |= {"plan": "auto:…" if path else "auto", **request.in_words()}
    if path is None:
        return apply_plan(model, given)
    return apply_plan(model, ParallelSearch(model, path, request).run().plan)
