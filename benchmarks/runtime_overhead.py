"""Host overhead of backbeat's reducer against stock DDP at the same partition, in one run, interleaved.

    torchrun --nproc-per-node 1 benchmarks/runtime_overhead.py [--device cuda] [--tensors 50,200,1000] [--json FILE]

With one rank nothing travels: what is left is the work each wrapper adds to a step. Tensors are tiny, so a step is
nothing but overhead: forward and backward of the bare module are timed too and taken off. With more ranks the figure
includes their communication. On a CPU the training thread's own CPU time is printed beside: it leaves out what others
on the machine do and what the thread only waits for, so it is host time alone on any number of ranks. On a GPU the host
alone is printed beside: the time until the last call of a block returned, before the device is waited for. A row is
one line: medians over blocks that alternate between the sides, their ratio, and the quartiles of the ratio by turn.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from harness import machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.model import files
from backbeat.runtime import DistributedDataParallel

KINDS = {"cpu": {"step": "step", "cpu": "training thread's CPU"}, "cuda": {"step": "step", "host": "host alone"}}
"""What is timed on each kind of device, and its name in print."""


class Scales(nn.Module):
    """As many small parameters as asked for, each used once."""

    def __init__(self, tensors: int, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(tensors)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def block(model: nn.Module, x: torch.Tensor, steps: int) -> dict[str, float]:
    """Seconds a step: until the device is done, until the last call returned, and of this thread's CPU."""
    if x.is_cuda:
        torch.cuda.synchronize()
    begin, begin_cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        model.zero_grad()
        model(x).sum().backward()
    returned = time.perf_counter()
    if x.is_cuda:
        torch.cuda.synchronize()
    return {
        "step": (time.perf_counter() - begin) / steps,
        "host": (returned - begin) / steps,
        "cpu": (time.thread_time() - begin_cpu) / steps,
    }


def compare(tensors: int, width: int, device: torch.device, cap_mb: float, steps: int, blocks: int) -> dict[str, Any]:
    model = Scales(tensors, width).to(device)
    x = torch.ones(width, device=device)
    sides: dict[str, Callable[[], nn.Module]] = {
        "bare": lambda: copy.deepcopy(model),
        "stock": lambda: TorchDDP(copy.deepcopy(model), bucket_cap_mb=cap_mb),
        "stock, views": lambda: TorchDDP(copy.deepcopy(model), bucket_cap_mb=cap_mb, gradient_as_bucket_view=True),
        "backbeat": lambda: DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap_mb),
    }
    models: dict[str, Any] = {name: make() for name, make in sides.items()}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for wrapped in models.values():
        block(wrapped, x, 12)
    gc.collect()
    gc.disable()
    for turn in range(blocks):
        order = list(models) if turn % 2 == 0 else list(reversed(models))
        for name in order:
            times[name].append(block(models[name], x, steps))
    gc.enable()
    return {
        "tensors": tensors,
        "buckets": len(models["backbeat"].reducer.buckets),
        "device": device.type,
        "ranks": dist.get_world_size(),
        "steps": steps,
        "blocks": blocks,
        "times": {
            kind: _judged({name: [b[kind] for b in times[name]] for name in times}) for kind in KINDS[device.type]
        },
    }


def _judged(times: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(found) for name, found in times.items()}
    turns = [
        (ours - bare) / (stock - bare)
        for ours, stock, bare in zip(times["backbeat"], times["stock"], times["bare"], strict=True)
        if stock > bare
    ]
    quartiles = statistics.quantiles(turns, n=4) if len(turns) > 1 else turns * 3
    return {
        "median_s": medians,
        "overhead_s": {name: medians[name] - medians["bare"] for name in medians if name != "bare"},
        "overhead_ratio": (medians["backbeat"] - medians["bare"]) / (medians["stock"] - medians["bare"]),
        "overhead_ratio_by_turn": {"lower_quartile": quartiles[0], "upper_quartile": quartiles[-1]} if turns else None,
        "whole_ratio": medians["backbeat"] / medians["stock"],
    }


def line(row: dict[str, Any]) -> str:
    parts = [f"{row['ranks']} rank(s), {row['device']}: {row['tensors']:5d} tensors, {row['buckets']:3d} buckets"]
    for kind, title in KINDS[row["device"]].items():
        found = row["times"][kind]
        over = {name: seconds * 1e6 for name, seconds in found["overhead_s"].items()}
        turn = found["overhead_ratio_by_turn"]
        spread = f" ({turn['lower_quartile']:.2f} to {turn['upper_quartile']:.2f} by turn)" if turn else ""
        parts.append(
            f"{title}: bare {found['median_s']['bare'] * 1e6:.0f} µs, overhead stock {over['stock']:.0f}, stock with "
            f"views {over['stock, views']:.0f}, backbeat {over['backbeat']:.0f} µs, backbeat/stock: overhead "
            f"{found['overhead_ratio']:.2f}{spread}, whole {found['whole_ratio']:.3f}"
        )
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=sorted(KINDS))
    parser.add_argument("--tensors", default="50,200,1000")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--buckets", type=int, default=8)
    parser.add_argument("--steps", type=int, help="a block; 20, on a GPU 10 or, of few tensors, up to 40")
    parser.add_argument("--blocks", type=int, help="of each side; 15, on a GPU 11")
    parser.add_argument("--json", metavar="FILE", help="write the rows as data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cuda = options.device == "cuda"
    device = torch.device(options.device)
    if cuda:
        # Ranks beyond the GPUs there are share them.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rows: list[dict[str, Any]] = []
    for tensors in (int(count) for count in options.tensors.split(",")):
        cap = tensors * options.width * 4 / options.buckets / 2**20
        steps = options.steps or (max(10, min(40, 2000 // tensors)) if cuda else 20)
        row = compare(tensors, options.width, device, cap, steps, options.blocks or (11 if cuda else 15))
        rows.append(row)
        if dist.get_rank() == 0:
            print(line(row), flush=True)
            if options.json:
                _write(options.json, rows, device)
    dist.destroy_process_group()


def _write(path: str, rows: list[dict[str, Any]], device: torch.device) -> None:
    found = {
        "benchmark": "runtime_overhead",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": str(torch.__version__),
        "rows": rows,
    }
    files.write(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main()
