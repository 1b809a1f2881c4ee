"""What compression costs beside the computation: one rank, so that nothing travels, against dense buckets and a naive
loop.

    python benchmarks/topk_overhead.py [--device cuda] [--model resnet152,bert_large] [--batch-size 64] [--json FILE]

Sides: `dense`, the wrapper with dense buckets of 25 MiB and SGD with momentum; `compressed`, the same buckets as top-k
with the optimizer handed over, with and without momentum correction, with residuals on the device or the host; `naive`,
a loop over the parameters after backward with residual, velocity and `topk`. On a GPU under bf16 autocast. Sides are
built, warmed up and timed in turn, in several rounds; printed are the median iteration over all blocks, its ratio to
`dense`, and on a GPU the peak of allocated memory. Rows are saved as they come. `--model small` is a stack of linear
layers of four million parameters that any CPU can run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import machine
from torch import nn

from backbeat.model import Bucket, Plan
from backbeat.model.blocks import MemoryPlan
from backbeat.model.files import write
from backbeat.model.plan import Compression
from backbeat.runtime import DistributedDataParallel
from backbeat.zoo import models as zoo

GROUP_BYTES = 25 * 2**20


def small(batch_size: int, device: str) -> Any:
    """Sixteen linear layers, normalised: gradients that fade into denormal numbers would be what is timed."""
    layers = (layer for _ in range(16) for layer in (nn.Linear(512, 512), nn.LayerNorm(512), nn.ReLU()))
    model = nn.Sequential(*layers).to(device)
    batch = (torch.randn(batch_size, 512, device=device), torch.randn(batch_size, 512, device=device))
    return model, batch, lambda model, batch: (model(batch[0]) - batch[1]).square().mean()


def buckets_of(model: nn.Module) -> list[list[str]]:
    """Buckets of 25 MiB in the reverse order of registration."""
    buckets: list[list[str]] = [[]]
    size = 0
    for name, parameter in reversed(list(model.named_parameters())):
        if size >= GROUP_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += 4 * parameter.numel()
    return buckets


def plan_of(model: nn.Module, compression: Compression | None, *, host: bool = False) -> Plan:
    return Plan(
        strategy="overhead",
        model=type(model).__name__,
        communicators=1,
        buckets=tuple(Bucket(gradients=tuple(g), communicator=0, compression=compression) for g in buckets_of(model)),
        memory=MemoryPlan(residuals="host") if host else None,
    )


class Naive:
    """What a first attempt does: one parameter after the other, with everything it needs kept apart."""

    def __init__(self, model: nn.Module, density: float, momentum: float = 0.9) -> None:
        self._parameters = list(model.parameters())
        self._density, self._momentum = density, momentum
        self._residual = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._velocity = [torch.zeros_like(parameter) for parameter in self._parameters]

    def sparsify(self) -> None:
        for parameter, residual, velocity in zip(self._parameters, self._residual, self._velocity, strict=True):
            if parameter.grad is None:
                continue
            velocity.mul_(self._momentum).add_(parameter.grad)
            residual.add_(velocity)
            flat = residual.view(-1)
            index = flat.abs().topk(max(1, int(self._density * flat.numel()))).indices
            dense = torch.zeros_like(flat)
            dense[index] = flat[index]
            flat[index] = 0
            parameter.grad = dense.view_as(parameter)


def side(name: str, model: nn.Module, density: float) -> tuple[Any, Callable[[], None]]:
    """The model as this side runs it, and what follows each backward."""
    if name == "naive":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        naive = Naive(model, density)

        def after() -> None:
            naive.sparsify()
            optimizer.step()
            optimizer.zero_grad()

        return model, after
    words = name.split(", ")
    compression = Compression(density=density) if words[0] == "compressed" else None
    wrapped = DistributedDataParallel(
        model,
        plan=plan_of(model, compression, host="host" in words),
        compression={"momentum_correction": "corrected" in words},
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4, momentum=0.9)
    if compression is not None:
        wrapped.attach(optimizer, max_grad_norm=None)

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return wrapped, finish


SIDES = ["dense", "compressed", "compressed, corrected", "compressed, host", "naive"]


def measure(name: str, workload: Any, device: str, density: float, warmup: int, blocks: int, steps: int) -> Any:
    """(seconds of each block's iterations, peak bytes)."""
    model, batch, loss = workload()
    running, after = side(name, model, density)
    cuda = device == "cuda"

    def iteration() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            value = loss(running, batch)
        value.backward()
        after()

    for _ in range(warmup):
        iteration()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(blocks):
        begin = time.perf_counter()
        for _ in range(steps):
            iteration()
        if cuda:
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - begin) / steps)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    if hasattr(running, "reducer"):
        running.reducer.remove_hooks()
    return taken, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="small", help="`small`, or names of backbeat.zoo.models")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--sides", default=";".join(SIDES), help="separated by semicolons")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--json", default="", help="where to save the rows")
    arguments = parser.parse_args()
    store = Path(tempfile.mkdtemp()) / "store"
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else machine()
    print(f"{where}, torch {torch.__version__}, batch {arguments.batch_size}, density {arguments.density}")
    rows: list[dict[str, Any]] = []
    for model in arguments.model.split(","):
        factory = small if model == "small" else getattr(zoo, model)
        times: dict[str, list[float]] = {}
        peaks: dict[str, int] = {}
        for _ in range(arguments.rounds):
            for name in arguments.sides.split(";"):
                torch.manual_seed(0)
                taken, peak = measure(
                    name, lambda f=factory: f(arguments.batch_size, arguments.device), arguments.device,
                    arguments.density, arguments.warmup, arguments.blocks, arguments.steps,
                )  # fmt: skip
                times.setdefault(name, []).extend(taken)
                peaks[name] = peak
                gc.collect()
                if arguments.device == "cuda":
                    torch.cuda.empty_cache()
                base = statistics.median(times["dense"]) if "dense" in times else float("nan")
                found = [row for row in rows if row["model"] != model]
                found += [
                    {
                        "model": model, "side": key, "iteration_s": statistics.median(value), "blocks_s": value,
                        "over_dense": statistics.median(value) / base, "peak_bytes": peaks[key],
                    }
                    for key, value in times.items()
                ]  # fmt: skip
                rows = found
                if arguments.json:
                    record = {
                        "command": " ".join(["python", "benchmarks/topk_overhead.py", *sys.argv[1:]]),
                        "machine": where, "torch": torch.__version__, "batch_size": arguments.batch_size,
                        "density": arguments.density, "date": datetime.now(UTC).date().isoformat(), "rows": rows,
                    }  # fmt: skip
                    write(arguments.json, json.dumps(record, indent=1).encode())
        for row in rows:
            if row["model"] == model:
                print(
                    f"{model:12s} {row['side']:28s} {row['iteration_s'] * 1e3:9.2f} ms   "
                    f"{row['over_dense']:.3f} of dense"
                    + (f"   {row['peak_bytes'] / 1e9:.2f} GB" if row["peak_bytes"] else ""),
                    flush=True,
                )
    dist.destroy_process_group()
    os.unlink(store) if store.exists() else None


if __name__ == "__main__":
    main()
