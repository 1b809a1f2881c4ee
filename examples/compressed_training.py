"""Send one gradient in a hundred, and keep the rest for later.

    torchrun --nproc-per-node 2 examples/compressed_training.py [folder for the residuals]

A plan says which buckets are compressed; `backbeat plan --density 0.01` chooses them where the network is slow. Here
one is written by hand: weights as top-k, biases as they are. The optimizer is handed over, so that every bucket is
updated during backward and no gradient outlives it.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from backbeat.model import Bucket, Plan
from backbeat.model.plan import Compression
from backbeat.runtime import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    names = [name for name, _ in model.named_parameters()][::-1]
    one_percent = Compression(density=0.01)
    plan = Plan(
        strategy="compressed",
        model="example",
        communicators=1,
        buckets=(
            *(Bucket(gradients=(n,), communicator=0, compression=one_percent) for n in names if n.endswith("weight")),
            Bucket(gradients=tuple(n for n in names if n.endswith("bias")), communicator=0),
        ),
    )
    wrapped = DistributedDataParallel(model, plan=plan, compression={"momentum_correction": True, "warmup_steps": 60})
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.02, momentum=0.9)
    wrapped.attach(optimizer, max_grad_norm=None)

    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    source = torch.Generator().manual_seed(100 + dist.get_rank())
    for step in range(301):
        x = torch.randn(32, 64, generator=source)
        loss = nn.functional.cross_entropy(wrapped(x), (x @ teacher).argmax(1))
        loss.backward()  # buckets are sent, and their parameters updated, in here
        optimizer.step()  # changes nothing more; schedulers count it
        if step % 60 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if len(sys.argv) > 1:
        wrapped.save_residuals(sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
