"""Does the wrapper hold more memory as it runs, and how much beside the gradients?

    torchrun --nproc-per-node 2 benchmarks/runtime_memory.py [--iterations 10000] [--json FILE]
    torchrun --nproc-per-node 1 benchmarks/runtime_memory.py --device cuda [--model linear|resnet50|…] [--json FILE]

Trains a tiny model and prints the resident memory of each rank after a tenth of the iterations and at the end, and the
bytes of all tensors that the reducer holds between steps and, at most, while buckets travel, beside the gradients' own.

On a GPU the allocator counts. A model of real size trains as it is, in stock DDP without and with gradients as views of
its buckets, and in backbeat with the same bucket cap and with a plan, each in a process of its own. What a side
holds between steps (after the update, gradients still there) is told beyond the parameters. Its peak in a step is told
beyond a bare backward whose gradients are dropped as they come: that is parameters, activations and the one gradient in
the making. Steps are those after backbeat has learnt the graph and stock DDP has rebuilt its buckets; the first step of
all stands beside them. The communication library's own memory is outside the allocator and not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from harness import machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.errors import InputError
from backbeat.model import files
from backbeat.model.plan import Bucket, Plan
from backbeat.runtime import DistributedDataParallel

WARM_STEPS, STEPS = 3, 3
ROUNDING = 512
"""The allocator hands out memory in multiples of this."""
CONTROL_BYTES = 64 * 2**10
"""What status messages may take on the device: a few numbers for each of 16 steps, each a tensor."""
ZEROS = ", zeroed"
NOISE_BYTES = 2**20
"""Resident memory that moves by less over a run has not grown: the interpreter's own pools move by as much."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def tensors_of(wrapped: Any) -> int:
    """Bytes of the storages of gradients and of the reducer's buffers, each counted once."""
    found: dict[int, int] = {}
    held = [parameter.grad for parameter in wrapped.parameters() if parameter.grad is not None]
    for tensor in (*held, *(bucket.flat for bucket in wrapped.reducer.buckets)):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def growth(iterations: int, device: torch.device, *, stock: bool = False) -> dict[str, Any]:
    """Train a tiny model for long: what was held after a tenth and at the end, and what the tensors take."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]).to(device)
    wrapped: Any = (TorchDDP if stock else DistributedDataParallel)(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    x = torch.ones(4, 32, device=device)
    peak = 0

    def look(_: torch.Tensor) -> None:
        nonlocal peak
        peak = max(peak, tensors_of(wrapped))

    tenth = max(1, iterations // 10)
    series: list[dict[str, int]] = []
    for step in range(iterations):
        if step and step % tenth == 0:
            series.append({"iteration": step, **_held(device)})
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
    series.append({"iteration": iterations, **_held(device)})
    early, late = series[0], series[-1]
    grown = {kind: late[kind] - early[kind] for kind in late if kind != "iteration"}
    if stock:
        return {"iterations": iterations, "from": early["iteration"], "series": series, "grown": grown}
    for parameter in wrapped.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    optimizer.zero_grad()
    wrapped(x).square().mean().backward()
    return {
        "iterations": iterations,
        "from": early["iteration"],
        "series": series,
        "grown": grown,
        "buckets": len(wrapped.reducer.buckets),
        "gradient_bytes": bytes_of(wrapped),
        "largest_bucket_bytes": max(bucket.bytes for bucket in wrapped.reducer.buckets),
        "held_bytes": tensors_of(wrapped),
        "peak_bytes": peak,
    }


def _held(device: torch.device) -> dict[str, int]:
    gc.collect()
    found = {"resident": resident_bytes()}
    if device.type == "cuda":
        torch.cuda.synchronize()
        found["allocated"] = torch.cuda.memory_allocated(device)
        found["reserved"] = torch.cuda.memory_reserved(device)
    return found


def told(found: dict[str, Any]) -> str:
    grown, early, gradients = found["grown"]["resident"], found["series"][0]["resident"], found["gradient_bytes"]
    return (
        f"rank {dist.get_rank()} of {dist.get_world_size()}: resident memory grew by {grown / 1024:.0f} KiB from "
        f"iteration {found['from']} to {found['iterations']} ({early / 2**20:.0f} MiB before);\n"
        f"  gradients {gradients} bytes in {found['buckets']} buckets, the largest {found['largest_bucket_bytes']}; "
        f"held between steps {found['held_bytes']}, in backward at most {found['peak_bytes']} "
        f"({(found['peak_bytes'] - gradients) / found['largest_bucket_bytes']:.2f} buckets more)"
    )


Loss = Callable[[nn.Module, Any], torch.Tensor]


def workload(name: str, batch_size: int, device: torch.device, layers: int, width: int) -> tuple[nn.Module, Any, Loss]:
    if name != "linear":
        from backbeat.zoo import models

        factory = getattr(models, name, None)
        if name.startswith("_") or not callable(factory):
            raise InputError(f"--model is {name!r}: it must be linear or a model of backbeat.zoo.models")
        found: tuple[nn.Module, Any, Loss] = factory(batch_size, str(device))
        return found
    with device:
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        batch = torch.ones(batch_size, width)
    return model, batch, lambda model, batch: model(batch).square().mean()


def plan_of(model: nn.Module, count: int) -> Plan:
    """About `count` buckets of like size, from the last parameter to the first."""
    trained = [(name, p.numel() * p.element_size()) for name, p in model.named_parameters() if p.requires_grad]
    total, done = sum(size for _, size in trained), 0
    buckets: list[list[str]] = [[]]
    for name, size in reversed(trained):
        if buckets[-1] and done >= total * len(buckets) / count:
            buckets.append([])
        buckets[-1].append(name)
        done += size
    return Plan(
        strategy="custom",
        model=type(model).__name__,
        communicators=1,
        buckets=tuple(Bucket(gradients=tuple(names), communicator=0) for names in buckets),
    )


class Device:
    """What the models of one run hold on a GPU, each built anew after the one before is gone."""

    def __init__(self, device: torch.device, build: Callable[[], tuple[nn.Module, Any, Loss]], cap_mb: float) -> None:
        self._device = device
        self._build = build
        self._cap_mb = cap_mb

    def base(self) -> int:
        """Peak of a bare step that keeps no gradient: parameters, activations and the gradient in the making."""

        def dropping(model: nn.Module) -> nn.Module:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
            return model

        # Twice: libraries take their workspaces in the first run and keep them.
        self._run(dropping, set_to_none=True)
        return self._run(dropping, set_to_none=True)["peak_bytes"]

    def sides(self, buckets: int) -> dict[str, Callable[[nn.Module], nn.Module]]:
        cap = self._cap_mb
        return {
            "bare": lambda model: model,
            "stock DDP": lambda model: TorchDDP(model, bucket_cap_mb=cap),
            "stock DDP, views": lambda model: TorchDDP(model, bucket_cap_mb=cap, gradient_as_bucket_view=True),
            "backbeat, same cap": lambda model: DistributedDataParallel(model, bucket_cap_mb=cap),
            "backbeat, plan": lambda model: DistributedDataParallel(model, plan=plan_of(model, buckets)),
        }

    def measure(self, name: str, wrap: Callable[[nn.Module], nn.Module], base: int, none: bool) -> dict[str, Any]:
        found = self._run(wrap, set_to_none=none)
        gradients, bucket = found["gradient_bytes"], found["largest_bucket_bytes"]
        beyond = {
            "between_beyond_bytes": found["between_bytes"] - found["model_bytes"],
            "cleared_beyond_bytes": found["cleared_bytes"] - found["model_bytes"],
            "peak_beyond_bytes": found["peak_bytes"] - base,
            "first_beyond_bytes": found["first_bytes"] - base,
        }
        return {
            "side": name,
            "set_to_none": none,
            **found,
            **beyond,
            **{f"{key.split('_')[0]}_gradients": value / gradients for key, value in beyond.items()},
            "peak_buckets_beside_gradients": (beyond["peak_beyond_bytes"] - gradients) / bucket if bucket else None,
        }

    def _run(self, wrap: Callable[[nn.Module], nn.Module], *, set_to_none: bool) -> dict[str, int]:
        _empty()
        start = torch.cuda.memory_allocated(self._device)
        found = self._trained(wrap, start, set_to_none)
        _empty()
        return {**found, "left_behind_bytes": torch.cuda.memory_allocated(self._device) - start}

    def _trained(self, wrap: Callable[[nn.Module], nn.Module], start: int, set_to_none: bool) -> dict[str, int]:
        device = self._device
        model, batch, loss = self._build()
        holds = torch.cuda.memory_allocated(device) - start
        wrapped: Any = wrap(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-6)

        def peak_of(steps: int) -> int:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(device)
            for _ in range(steps):
                optimizer.zero_grad(set_to_none=set_to_none)
                loss(wrapped, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated(device) - start

        first = peak_of(1)
        peak_of(WARM_STEPS)
        _let_go()
        peak = peak_of(STEPS)
        _let_go()
        between = torch.cuda.memory_allocated(device) - start
        optimizer.zero_grad(set_to_none=set_to_none)
        cleared = torch.cuda.memory_allocated(device) - start
        buckets = wrapped.reducer.buckets if isinstance(wrapped, DistributedDataParallel) else []
        return {
            "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
            "model_bytes": holds,
            "tensors": len(list(model.parameters())),
            "buckets": len(buckets),
            "largest_bucket_bytes": max((bucket.bytes for bucket in buckets), default=0),
            "first_bytes": first,
            "peak_bytes": peak,
            "between_bytes": between,
            "cleared_bytes": cleared,
        }


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _empty() -> None:
    _let_go()
    torch.cuda.empty_cache()


def _let_go() -> None:
    """Wait until nothing is given back any more: NCCL's watchdog holds the tensors of works that are done until its
    next round."""
    gc.collect()
    torch.cuda.synchronize()
    held, still = torch.cuda.memory_allocated(), 0
    for _ in range(50):
        time.sleep(0.1)
        now = torch.cuda.memory_allocated()
        held, still = now, still + 1 if now == held else 0
        if still >= 5:
            return


def row(found: dict[str, Any]) -> str:
    buckets = found["peak_buckets_beside_gradients"]
    beside = (
        f": gradients and {buckets:+.2f} of the largest of {found['buckets']} buckets" if buckets is not None else ""
    )
    return (
        f"{_where(found)}: between steps {found['between_beyond_bytes'] / 2**20:.1f} MiB "
        f"({found['between_gradients']:.3f} of the gradients), when cleared {found['cleared_gradients']:.3f}, "
        f"peak {found['peak_beyond_bytes'] / 2**20:.1f} MiB ({found['peak_gradients']:.3f}{beside}), "
        f"first step {found['first_gradients']:.3f}, left behind {found['left_behind_bytes']} bytes"
    )


def _where(found: dict[str, Any]) -> str:
    return f"{found['side']}, zero_grad({'set_to_none' if found['set_to_none'] else 'to zeros'})"


def claims(rows: list[dict[str, Any]], grown: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, whether it held, and the figures."""
    found: list[dict[str, Any]] = []

    def claim(text: str, held: bool, figures: str) -> None:
        found.append({"claim": text, "held": held, "figures": figures})

    stock = {row["set_to_none"]: row for row in rows if row["side"] == "stock DDP"}
    for ours in (row for row in rows if row["side"].startswith("backbeat")):
        gradients, bucket, peak = ours["gradient_bytes"], ours["largest_bucket_bytes"], ours["peak_beyond_bytes"]
        spare = ROUNDING * ours["tensors"] + CONTROL_BYTES
        allowed = f"({spare} more allowed for rounding and control numbers)"
        where, other = _where(ours), stock[ours["set_to_none"]]
        claim(
            f"{where}: at most gradients and one bucket in a step",
            peak <= gradients + bucket + spare,
            f"{peak} of {gradients} + {bucket} bytes {allowed}",
        )
        claim(
            f"{where}: the gradients alone between steps",
            ours["between_beyond_bytes"] <= gradients + spare,
            f"{ours['between_beyond_bytes']} of {gradients} bytes {allowed}",
        )
        claim(
            f"{where}: less than stock DDP without views in a step",
            peak < other["peak_beyond_bytes"],
            f"{ours['peak_gradients']:.3f} against {other['peak_gradients']:.3f} of the gradients",
        )
        claim(f"{where}: gone when dropped", ours["left_behind_bytes"] <= 0, f"{ours['left_behind_bytes']} bytes left")
    during = f"iterations {grown['from']} to {grown['iterations']}"
    for kind in ("allocated", "reserved"):
        more = grown["grown"][kind]
        claim(f"no growth on the device ({kind}), {during}", more <= 0, f"{more:+d} bytes")
    more, steps = grown["grown"]["resident"], max(1, grown["iterations"] - grown["from"])
    claim(
        f"no growth on the host, {during}",
        more <= NOISE_BYTES,
        f"{more / 1024:+.0f} KiB, {more / steps:.1f} bytes an iteration ({NOISE_BYTES // 1024} KiB taken for noise)",
    )
    return found


def on_cuda(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def build() -> tuple[nn.Module, Any, Loss]:
        torch.manual_seed(0)
        return workload(options.model, options.batch_size, device, options.layers, options.width)

    measured = Device(device, build, options.cap_mb)
    if options.side == "growth of stock DDP":
        return {"grown": growth(options.iterations, device, stock=True)}
    if options.side:
        name, none = options.side.rsplit(ZEROS, 1)[0], not options.side.endswith(ZEROS)
        base = measured.base()
        return {"base": base, "rows": [measured.measure(name, measured.sides(options.buckets)[name], base, none)]}
    sides = measured.sides(options.buckets)
    others = in_processes([*sides, *(f"{side}{ZEROS}" for side in sides), "growth of stock DDP"])
    grown = growth(options.iterations, device)
    found_apart = [json.loads(one.result()) for one in others]
    stock = found_apart.pop()["grown"]
    base = found_apart[0]["base"]
    rows = [row for one in found_apart for row in one["rows"]]
    if rank == 0:
        print(f"{options.model}, {ranks} rank(s): a bare step that keeps no gradient takes {base} bytes", flush=True)
        for one in rows:
            print(row(one), flush=True)
    judged = claims(rows, grown)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, (grown, judged))
    if rank == 0:
        print(told(grown), flush=True)
        print(f"stock DDP beside it: {stock['grown']} bytes more on rank 0", flush=True)
        for number, (_, of_rank) in enumerate(every):
            for found in of_rank:
                verdict = "held" if found["held"] else "NOT HELD"
                print(f"rank {number}: {verdict}: {found['claim']}: {found['figures']}", flush=True)
    return {
        "model": options.model,
        "batch_size": options.batch_size,
        "cap_mb": options.cap_mb,
        "base_bytes": base,
        "rows": rows,
        "growth": [of_rank for of_rank, _ in every],
        "growth_of_stock": stock,
        "claims": [of_rank for _, of_rank in every],
    }


class Apart:
    """One side in a process of its own, as this rank of the job: nothing of another side can stay behind in it."""

    def __init__(self, side: str, number: int) -> None:
        self._file = Path(tempfile.mkdtemp()) / "found.json"
        environment = {**os.environ, "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1 + number)}
        # Torchrun's own store answers for its own job alone.
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        command = [sys.executable, *sys.argv, "--side", side, "--json", str(self._file)]
        self._process = subprocess.Popen(command, env=environment)

    def result(self) -> bytes:
        if self._process.wait():
            raise SystemExit("a side failed: see above")
        return self._file.read_bytes()


def in_processes(sides: list[str]) -> list[Apart]:
    return [Apart(side, number) for number, side in enumerate(sides)]


def on_cpu(options: argparse.Namespace) -> dict[str, Any]:
    found = growth(options.iterations, torch.device("cpu"))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            print(told(found), flush=True)
    return {"growth": every}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", metavar="FILE", help="write what was found as data")
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument("--model", default="linear", help="linear, or a model of backbeat.zoo.models")
    gpu.add_argument("--batch-size", type=int, default=32)
    gpu.add_argument("--layers", type=int, default=24, help="of the linear model")
    gpu.add_argument("--width", type=int, default=2048, help="of the linear model")
    gpu.add_argument("--cap-mb", type=float, default=25.0, help="bucket cap of stock DDP and backbeat, MiB")
    gpu.add_argument("--buckets", type=int, default=6, help="of the plan")
    gpu.add_argument("--side", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cuda = options.device == "cuda"
    if cuda:
        # Ranks beyond the GPUs there are share them.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("nccl" if cuda else "gloo")
    found = on_cuda(options) if cuda else on_cpu(options)
    if options.json and (options.side or dist.get_rank() == 0):
        document = {
            "benchmark": "runtime_memory",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "gpu": torch.cuda.get_device_name() if cuda else None,
            "torch": str(torch.__version__),
            "device": options.device,
            "ranks": dist.get_world_size(),
            **found,
        }
        files.write(options.json, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
