"""One line that measures and takes what is fastest: stock DDP, planned buckets, or planned units.

torchrun --nproc-per-node 2 examples/parallelize.py
torchrun --nproc-per-node 2 examples/parallelize.py --plan auto:plans/run1.json     # the second run reads the plan
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

from backbeat.runtime import parallelize


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--plan", default="auto", help="auto, auto:FILE, or a plan's file")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--budget", type=float, default=50.0, help="seconds that auto may take")
    given = options.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(given.width) for _ in range(4))).to(device)
    torch.manual_seed(dist.get_rank())
    batch = (torch.randn(32, given.width, device=device), torch.randn(32, given.width, device=device))

    model = parallelize(model, plan=given.plan, example=(batch, loss), optimizer="adamw", budget_s=given.budget)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(given.steps):
        found = loss(model, batch)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step in (0, given.steps - 1):
            print(f"step {step}: loss {found.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
