"""Accelerate: prepare the model inside `planned`.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.integrations.accelerate import planned


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(256, 8)), batch_size=16)
    with planned():
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for _ in range(3):
        for (x,) in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    ours = isinstance(model, DistributedDataParallel)
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"rank {accelerator.process_index}: backbeat {ours}, loss {loss.item():.6f}, parameters sum to {total:.12f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
