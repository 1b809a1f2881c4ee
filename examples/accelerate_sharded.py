"""Accelerate's FSDP2: shard by the plan, then prepare. Accelerate takes a model that is sharded already as it is.

torchrun --nproc-per-node 2 examples/accelerate_sharded.py [plan.json]
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from sharded_plan import plan_for
from torch import nn
from torch.distributed.fsdp import FSDPModule

from backbeat.runtime import full_state_dict, fully_shard


def main() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    if not torch.cuda.is_available():
        # Accelerate turns to FSDP2 on accelerators alone; with this the example runs without one.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    plan = sys.argv[1] if len(sys.argv) > 1 else plan_for(["0", "2", "4"], accelerator.num_processes)
    fully_shard(model, plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(256, 8)), batch_size=16)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for _ in range(3):
        for (x,) in data:
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
    state = full_state_dict(model)
    if accelerator.is_main_process:
        total = sum(value.double().sum().item() for value in state.values())
        sharded = accelerator.is_fsdp2 and isinstance(model, FSDPModule)
        print(f"sharded {sharded}, loss {loss.item():.6f}, parameters sum to {total:.12f}")
    # Together: torch keeps the connections of a sharded model's group open until the process ends.
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
