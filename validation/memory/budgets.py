"""Do training runs keep their memory budget? Peaks step by step, with and without `cudnn.benchmark`, on one GPU.

    python validation/memory/budgets.py OUT.json [--models wide_resnet50_2,resnet50] [--batch 256]
        [--variants plain,channels_last,fresh] [--gigabytes 6,8,12]

Each model is profiled as `backbeat profile` does, then trained under plans for several budgets. A row holds the
predicted peak and the measured one of every step: `torch.cuda.max_memory_allocated`, reset before each step. Each
training run is a process of its own, so that no workspace of another is counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import backbeat as bb
from backbeat.comm.machine import today
from backbeat.errors import BackbeatError
from backbeat.measure import profile
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.compressed.topk_speed import measure_topk
from backbeat.runtime.memory import apply

STEPS = 12
VARIANTS = ("plain", "channels_last", "fresh")
"""`channels_last`: model and images in that format. `fresh`: every step makes a batch of its own."""


def setup(case: dict[str, Any]) -> tuple[Any, Any, Any]:
    import torchvision

    torch.manual_seed(0)
    model, shape = getattr(torchvision.models, case["model"])().to("cuda"), (case["batch"], 3, 224, 224)
    images, labels = torch.randn(shape, device="cuda"), torch.randint(0, 1000, shape[:1], device="cuda")
    if case["variant"] == "channels_last":
        model, images = (one.to(memory_format=torch.channels_last) for one in (model, images))

    def loss(one: torch.nn.Module, given: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(one(given[0]), given[1])

    return model, (images, labels), loss


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One case, in this process: profiles the model, or trains it under a plan file."""
    torch.backends.cudnn.benchmark = case["benchmark"]
    model, data, loss = setup(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if "plan" not in case:
        options: dict[str, Any] = {"precision": "bf16", "topk_speed": measure_topk, "apply_memory": apply}
        # What is judged here is memory, which no other process disturbs.
        profile(model, data, loss, optimizer, accept_noise=True, **options).save(case["profile"])
        return {}
    torch.distributed.init_process_group("nccl")
    plan = bb.Plan.load(case["plan"]) if case["plan"] else None
    ddp = DistributedDataParallel(model, plan=plan, broadcast_buffers=False)
    peaks, reserved = [], []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        if case["variant"] == "fresh":
            data = (torch.randn_like(data[0]), data[1])
        with torch.autocast("cuda", torch.bfloat16):
            found = loss(ddp, data)
        found.backward()
        optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        reserved.append(torch.cuda.max_memory_reserved())
    return {"peaks": peaks, "reserved": reserved}


def apart(case: dict[str, Any]) -> dict[str, Any]:
    """The same in a process of its own."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29653"}
    words = [sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env={**os.environ, **alone})
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def planned(file: Path, budget_gb: float | None, target: Path) -> dict[str, Any]:
    """The plan for a budget, written; or why there is none."""
    if budget_gb is None:
        return {"plan": ""}
    network = bb.Network.load("10gbe").at(workers=1)
    try:
        plan = bb.plan(bb.Profile.load(file), network, "optimal", memory_bytes=round(budget_gb * 1e9))
    except BackbeatError as error:
        return {"refused": str(error)}
    plan.save(target)
    return {"plan": str(target), "predicted_bytes": plan.memory.peak_bytes if plan.memory else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--models", default="wide_resnet50_2,resnet50")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--gigabytes", default="6,8,12")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--run", type=int, default=1, help="number of this run, of several on other hosts")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(run(json.loads(given.case))))
        return
    rows: list[dict[str, Any]] = []
    made = {"command": shlex.join(["python", *sys.argv]), "date": today(), "run": given.run}
    each = itertools.product(given.models.split(","), (True, False), given.variants.split(","))
    for name, benchmark, variant in each:
        case = {"model": name, "batch": given.batch, "benchmark": benchmark, "variant": variant}
        file = given.out.parent / f"{name}-{'benchmark' if benchmark else 'plain'}.profile.json"
        failed = apart({**case, "profile": str(file)})
        for budget in [None, *map(float, given.gigabytes.split(","))] if not failed else ():
            row = case | made | {"budget_gb": budget} | planned(file, budget, given.out.with_name("budget.plan.json"))
            row |= apart(row) if "plan" in row else {}
            rows.append(row)
            given.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(name, benchmark, variant, failed.get("error", "done"), flush=True)


if __name__ == "__main__":
    main()
