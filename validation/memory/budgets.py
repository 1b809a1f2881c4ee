"""Do training runs keep their memory budget? Peaks step by step, with and without `cudnn.benchmark`, on one GPU.

    python validation/memory/budgets.py OUT.json [--models wide_resnet50_2,resnet50] [--batch 256]
        [--variants plain,channels_last,fresh]

Each model is profiled as `backbeat profile` does, then trained under plans for several budgets. A row holds the
predicted peak and the measured one of every step: `torch.cuda.max_memory_allocated`, reset before each step. Each
training run is a process of its own, so that no workspace of another is counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchvision

import backbeat as bb
from backbeat.errors import BackbeatError
from backbeat.measure import profile
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.compressed.topk_speed import measure_topk
from backbeat.runtime.memory import apply

STEPS = 12


def setup(name: str, batch: int, device: str, variant: str) -> tuple[Any, Any, Any]:
    """`channels_last`: model and images in that format. `fresh` is `run`'s: every step makes a batch of its own."""
    torch.manual_seed(0)
    side = 224 if device == "cuda" else 64
    model = getattr(torchvision.models, name)().to(device)
    data = (torch.randn(batch, 3, side, side, device=device), torch.randint(0, 1000, (batch,), device=device))

    if variant == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        data = (data[0].to(memory_format=torch.channels_last), data[1])

    def loss(one: torch.nn.Module, given: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(one(given[0]), given[1])

    return model, data, loss


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One case, in this process: `make` profiles and plans, `train` trains under a plan file."""
    torch.backends.cudnn.benchmark = case["benchmark"]
    device = case["device"]
    model, data, loss = setup(case["model"], case["batch"], device, case["variant"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if case["do"] == "make":
        options = {"precision": "bf16", "device": device, "topk_speed": measure_topk, "apply_memory": apply}
        # What is judged here is memory, which no other process disturbs.
        found = profile(model, data, loss, optimizer, accept_noise=True, **options)
        found.save(case["profile"])
        return {"steady_bytes": found.memory.steady_bytes, "peak_bytes": found.memory.peak_bytes}
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    plan = bb.Plan.load(case["plan"]) if case["plan"] else None
    ddp = DistributedDataParallel(model, plan=plan, broadcast_buffers=False)
    peaks, reserved, took = [], [], []
    for _ in range(STEPS):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        optimizer.zero_grad()
        if case["variant"] == "fresh":
            data = (torch.randn_like(data[0]), data[1])
        with torch.autocast(device, torch.bfloat16):
            found = loss(ddp, data)
        found.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
            reserved.append(torch.cuda.max_memory_reserved())
        took.append(time.perf_counter() - begun)
    return {"peaks": peaks, "reserved": reserved, "took_s": [round(one, 4) for one in took]}


def apart(case: dict[str, Any]) -> dict[str, Any]:
    """The same in a process of its own."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29653"}
    done = subprocess.run(
        [sys.executable, __file__, "--case", json.dumps(case)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **alone},
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--models", default="wide_resnet50_2,resnet50")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--gigabytes", default="6,8,12")
    parser.add_argument("--variants", default="plain,channels_last,fresh")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case")
    given = parser.parse_args()
    if given.case:
        print(json.dumps(run(json.loads(given.case))))
        return
    rows = []
    for name in given.models.split(","):
        for benchmark, variant in itertools.product((True, False), given.variants.split(",")):
            folder = given.out.parent
            case = {"do": "make", "model": name, "batch": given.batch, "benchmark": benchmark, "device": given.device}
            case["variant"] = variant
            file = folder / f"{name}-{'benchmark' if benchmark else 'plain'}.profile.json"
            made = apart({**case, "profile": str(file)})
            print(name, benchmark, variant, made, flush=True)
            if "error" in made:
                continue
            network = bb.Network.load("10gbe").at(workers=1)
            for budget in [None, *(float(one) for one in given.gigabytes.split(","))]:
                row: dict[str, Any] = {**case, "budget_gb": budget}
                plan_file = ""
                if budget is not None:
                    try:
                        plan = bb.plan(bb.Profile.load(str(file)), network, "optimal", memory_bytes=round(budget * 1e9))
                    except BackbeatError as error:
                        rows.append({**row, "refused": str(error)})
                        continue
                    plan_file = str(folder / "budget.plan.json")
                    plan.save(plan_file)
                    row["predicted_bytes"] = plan.memory.peak_bytes
                row |= apart({**case, "do": "train", "plan": plan_file})
                rows.append(row)
                print(row, flush=True)
                given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
