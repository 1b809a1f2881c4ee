"""Plain PyTorch: the import changes, and `plan=` is added.

torchrun --nproc-per-node 2 examples/torchrun.py --plan plan.json      # made for examples.my_model:regression
torchrun --nproc-per-node 2 examples/torchrun.py --plan auto           # measures and plans while it trains
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from my_model import regression

from backbeat.runtime import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default=None, help="a plan file, a strategy's name, or auto")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", default=None, help="continue from this file if it is there")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    network, _, loss_of = regression(device=device)
    model = DistributedDataParallel(network, plan=options.plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = 0
    if options.checkpoint and os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    for step in range(first, options.steps):
        # 64 samples a step whatever the number of ranks, so that the loss does not depend on it.
        samples = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)).to(device)
        loss = loss_of(model, samples[rank::size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            if step % 10 == 0 or step == options.steps - 1:
                print(f"step {step:3d}  ranks {size}  loss {shown.item() / size:.6f}", flush=True)
            if options.checkpoint:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, options.checkpoint + ".new")
                os.replace(options.checkpoint + ".new", options.checkpoint)
        die_at = os.environ.get("DIE_AT_STEP")
        if die_at and step == int(die_at) and rank == size - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os._exit(1)
    if rank == 0:
        print(model.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
