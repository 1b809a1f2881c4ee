"""Host overhead of backbeat's reducer against stock DDP at the same partition, in one run, interleaved.

    torchrun --nproc-per-node 1 benchmarks/runtime_overhead.py [--device cuda] [--tensors 50,200,1000]

One rank keeps the wire out of it: what is left is the work each wrapper adds to a step. Tensors are tiny, so a step is
nothing but overhead: forward and backward of the bare module are timed too and taken off. With more ranks the figure
includes their communication. On a CPU the training thread's own CPU time is printed beside: it leaves out what others
on the machine do and what the thread only waits for, so it is host time alone on any number of ranks. Printed are
medians over blocks that alternate between the sides, and their ratio.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.runtime import DistributedDataParallel


class Scales(nn.Module):
    """As many small parameters as asked for, each used once."""

    def __init__(self, tensors: int, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(tensors)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def block(model: nn.Module, x: torch.Tensor, steps: int) -> tuple[float, float]:
    """Seconds a step, host time until the device is done too, and CPU seconds of this thread."""
    if x.is_cuda:
        torch.cuda.synchronize()
    begin, begin_cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        model.zero_grad()
        model(x).sum().backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps, (time.thread_time() - begin_cpu) / steps


def compare(tensors: int, width: int, device: torch.device, cap_mb: float, steps: int, blocks: int) -> str:
    model = Scales(tensors, width).to(device)
    x = torch.ones(width, device=device)
    sides: dict[str, Callable[[], nn.Module]] = {
        "bare": lambda: copy.deepcopy(model),
        "stock": lambda: TorchDDP(copy.deepcopy(model), bucket_cap_mb=cap_mb),
        "stock, views": lambda: TorchDDP(copy.deepcopy(model), bucket_cap_mb=cap_mb, gradient_as_bucket_view=True),
        "backbeat": lambda: DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap_mb),
    }
    models = {name: make() for name, make in sides.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for wrapped in models.values():
        block(wrapped, x, 12)
    gc.collect()
    gc.disable()
    for turn in range(blocks):
        order = list(models) if turn % 2 == 0 else list(reversed(models))
        for name in order:
            times[name].append(block(models[name], x, steps))
    gc.enable()
    groups = len(models["backbeat"].reducer.buckets)
    kinds = ("step", "training thread's CPU") if device.type == "cpu" else ("step",)
    found = [f"{tensors:5d} tensors, {groups:3d} groups"]
    for index, kind in enumerate(kinds):
        medians = {name: statistics.median(pair[index] for pair in pairs) for name, pairs in times.items()}
        over = {name: (medians[name] - medians["bare"]) * 1e6 for name in medians}
        found.append(
            f"{kind}: bare {medians['bare'] * 1e6:.0f} µs; overhead stock {over['stock']:.0f}, stock with views "
            f"{over['stock, views']:.0f}, backbeat {over['backbeat']:.0f} µs; backbeat/stock: overhead "
            f"{over['backbeat'] / over['stock']:.2f}, whole {medians['backbeat'] / medians['stock']:.3f}"
        )
    return "\n    ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tensors", default="50,200,1000")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device, int(os.environ.get("LOCAL_RANK", 0)) if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for tensors in (int(count) for count in options.tensors.split(",")):
        cap = tensors * options.width * 4 / options.groups / 2**20
        line = compare(tensors, options.width, device, cap, options.steps, options.blocks)
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} rank(s), {device}: {line}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
