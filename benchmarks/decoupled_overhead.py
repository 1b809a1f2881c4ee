"""What a group costs the host in a decoupled plan, beside the same groups sent dense, by turns in one run.

    torchrun --nproc-per-node 1 benchmarks/decoupled_overhead.py [--device cuda] [--groups 5,40,80] [--json FILE]

One rank and tiny tensors: a step is nothing but the host's work. A decoupled plan has twice the collectives, scatters
in backward and gathers behind the next forward, and updates each gathered group by itself. Printed are medians of
steps, until the device is done too, and of the training thread's own CPU time; and the difference to the dense plan,
for each of the plan's halves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from datetime import UTC, datetime
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from harness import machine
from torch import nn

from backbeat.model import files
from backbeat.model.plan import Group, Plan
from backbeat.runtime import DistributedDataParallel

LAYERS, WIDTH = 80, 16


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


def cut(names: list[str], count: int) -> list[tuple[str, ...]]:
    size = -(-len(names) // count)
    return [tuple(names[place : place + size]) for place in range(0, len(names), size)]


def plan_of(names: list[str], count: int, *, decoupled: bool) -> Plan:
    """Groups of like size: from the last parameter to the first, and gathers from the first to the last."""
    backward = cut(names[::-1], count)
    if decoupled:
        groups = [Group(gradients=one, channel=0, phase="reduce_scatter") for one in backward]
        groups += [Group(gradients=one, channel=0, phase="all_gather") for one in cut(names, count)]
    else:
        groups = [Group(gradients=one, channel=0) for one in backward]
    return Plan(strategy="decoupled" if decoupled else "custom", model="affine", channels=1, groups=tuple(groups))


class Side:
    def __init__(self, count: int, device: torch.device, *, decoupled: bool) -> None:
        model = nn.Sequential(*[Affine() for _ in range(LAYERS)]).to(device)
        plan = plan_of([name for name, _ in model.named_parameters()], count, decoupled=decoupled)
        self.model: Any = DistributedDataParallel(model, plan=plan)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        if decoupled:
            self.model.attach(self.optimizer)
        self._x = torch.ones(WIDTH, device=device)
        self.groups = len(plan.groups)

    def steps(self, count: int) -> tuple[float, float]:
        """Seconds a step, and CPU seconds of this thread."""
        begin, thread = time.perf_counter(), time.thread_time()
        for _ in range(count):
            self.model(self._x).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self._x.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count, (time.thread_time() - thread) / count


def compare(count: int, device: torch.device, blocks: int, steps: int) -> dict[str, Any]:
    sides = {name: Side(count, device, decoupled=name == "decoupled") for name in ("dense", "decoupled")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for side in sides.values():
        side.steps(15)
    for turn in range(blocks):
        for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
            times[name].append(sides[name].steps(steps))
    sides["decoupled"].model.finish()
    found: dict[str, Any] = {"groups": {name: side.groups for name, side in sides.items()}}
    for index, kind in enumerate(("step_s", "thread_s")):
        medians = {name: statistics.median(pair[index] for pair in pairs) for name, pairs in times.items()}
        more = (medians["decoupled"] - medians["dense"]) / sides["decoupled"].groups
        found[kind] = {**medians, "more_a_half": more}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--groups", default="5,40,80")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="write the rows as data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cuda = options.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rows = []
    for count in (int(one) for one in options.groups.split(",")):
        rows.append(compare(count, device, options.blocks, options.steps))
        step, thread = rows[-1]["step_s"], rows[-1]["thread_s"]
        if dist.get_rank() == 0:
            print(
                f"{dist.get_world_size()} rank(s), {device}: {count} groups, {2 * LAYERS} tensors: step dense "
                f"{step['dense'] * 1e3:.2f} ms, decoupled {step['decoupled'] * 1e3:.2f} ms, "
                f"{step['more_a_half'] * 1e6:.0f} µs more for each half; training thread's CPU "
                f"{thread['dense'] * 1e3:.2f} and {thread['decoupled'] * 1e3:.2f} ms",
                flush=True,
            )
    if options.json and dist.get_rank() == 0:
        document = {
            "benchmark": "decoupled_overhead",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "torch": str(torch.__version__),
            "device": options.device,
            "ranks": dist.get_world_size(),
            "rows": rows,
        }
        files.write(options.json, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
