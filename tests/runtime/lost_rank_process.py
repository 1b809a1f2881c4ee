"""One rank of a job whose last rank dies in mid-backward; the others go on training. `compressed`: under top-k.
`killed`: by a signal, and each of torchrun's agents stands for a machine."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from msgspec.structs import replace
from rank_faults import Interrupted
from scenario_rig import small_plan

from backbeat.model.plan import Compression
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.reduce import peers

HEALTHY = 3
STUCK_S = 45
"""Who has not ended by then says where it stands."""


def main() -> None:
    faulthandler.dump_traceback_later(STUCK_S)
    killed = sys.argv[1:] == ["killed"]
    if killed:
        peers.machine = lambda: f"machine {os.environ['GROUP_RANK']}"
    device = torch.device(os.environ.get("BACKBEAT_TEST_DEVICE", "cpu"))
    torch.set_num_threads(1)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        timeout=timedelta(seconds=20),
        device_id=device if device.type == "cuda" else None,
    )
    torch.manual_seed(0)
    model = Interrupted().to(device)
    plan = small_plan(model)
    if sys.argv[1:] == ["compressed"]:
        compression = Compression(density=0.5)
        plan = replace(plan, buckets=tuple(replace(bucket, compression=compression) for bucket in plan.buckets))
    wrapped = DistributedDataParallel(model, plan=plan)
    for step in range(HEALTHY + 20):
        if step == HEALTHY and dist.get_rank() == dist.get_world_size() - 1:
            model.call = lambda: os.kill(os.getpid(), signal.SIGKILL) if killed else os._exit(1)
        wrapped.zero_grad()
        wrapped(torch.ones(3, 6, device=device)).square().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"step {step + 1} done", flush=True)


if __name__ == "__main__":
    main()
