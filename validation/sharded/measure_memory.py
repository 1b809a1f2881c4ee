"""Peak memory of FSDP2 steps on one GPU beside what is predicted from a profile of the plain model.

    python validation/sharded/measure_memory.py OUT/h200-native-bf16.json [--models gpt2,bert_large] [--autocast]

The process group sends nothing (torch's `fake` backend), so that one process is one rank of any number: sizes, streams
and the allocator are real, values are not. Each model is profiled as it is (SGD with momentum), then sharded by each
strategy and trained for three steps; the peak is `max_memory_allocated` of the last two. Models compute in the dtype of
their gathered parameters, or under autocast, as they were profiled. Saved after every row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import backbeat as bb
from backbeat.comm.machine import source
from backbeat.measure import profile as measure
from backbeat.measure.model.factory import load_factory
from backbeat.measure.model.training_step import autocast, release, tensor_cores
from backbeat.model import Plan, Profile
from backbeat.model.files import write
from backbeat.planners.planned import planned
from backbeat.steps.sharded_memory import sharded_memory
from backbeat.units import parse_duration
from validation.replays import recomputed

CASES = (
    # strategy, workers, micro-batches, every block recomputed
    ("fsdp", 8, 1, False),
    ("fsdp", 64, 1, False),
    ("hsdp:8", 16, 1, False),
    ("zero2", 8, 1, False),
    ("zero2", 8, 3, False),
    ("zero1", 8, 3, False),
    ("fsdp", 8, 1, True),
)
MODELS = {"gpt2": 8, "gpt2_medium": 4, "bert_large": 16, "vit_l": 32, "llama_1b": 2, "resnet152": 64}
"""Of `backbeat.zoo.models`, with their batch sizes."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@contextmanager
def ranks(count: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module, plan: Plan, device: str) -> None:
    """torch's own calls, unit by unit."""
    sharding, checkpointed = plan.sharding, plan.memory is not None and bool(plan.memory.segments)
    assert sharding is not None
    mesh = sharding.mesh
    if mesh.replicate > 1:
        grid = init_device_mesh(device, (mesh.replicate, mesh.shard), mesh_dim_names=("copies", "shards"))
    else:
        grid = init_device_mesh(device, (mesh.shard,))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[sharding.param_dtype], reduce_dtype=DTYPES[sharding.reduce_dtype])
    for unit in sharding.units:
        for name in unit.modules if checkpointed else ():
            parent, _, own = name.rpartition(".")
            model.get_submodule(parent).register_module(own, checkpoint_wrapper(model.get_submodule(name)))
        modules: Any = [model.get_submodule(name) for name in unit.modules]
        fully_shard(
            modules if len(modules) > 1 else modules[0], mesh=grid, mp_policy=policy, reshard_after_forward=unit.reshard
        )
    fully_shard(model, mesh=grid, mp_policy=policy)


def peak_of(name: str, plan: Plan, micro_batches: int, precision: str, given: argparse.Namespace) -> int:
    """`precision`: what forward runs under; fp32 leaves it to the parameters' dtype."""
    sharding, device = plan.sharding, torch.device(given.device)
    assert sharding is not None
    with ranks(sharding.mesh.workers):
        workload = built(name, given)
        model: Any = workload.model
        shard(model, plan, device.type)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for step in range(3):
            if step == 1 and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for number in range(micro_batches):
                last = number == micro_batches - 1
                model.set_requires_gradient_sync(last or sharding.gradient_sync == "every")
                model.set_reshard_after_backward(last or sharding.reshard_after_backward)
                with autocast(precision, device):
                    result = workload.loss(model, workload.batch)
                result.backward()
                del result
            optimizer.step()
            optimizer.zero_grad()
        found = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        del model, workload, optimizer
    release(device)
    return found


def built(name: str, given: argparse.Namespace) -> Any:
    factory = load_factory(name if ":" in name else f"backbeat.zoo.models:{name}")
    return factory.build(given.batch_size or MODELS.get(name), given.device)


def profiled(name: str, given: argparse.Namespace) -> Profile:
    workload = built(name, given)
    with tensor_cores(given.precision, torch.device(given.device)):
        found = measure(
            workload.model, workload.batch, workload.loss, precision=given.precision, device=given.device, name=name,
            model_name=name, iterations=8, warmup=3, time_limit_s=20.0, accept_noise=True, keep=False,
        )  # fmt: skip
    found.save(given.output.with_name(f"{name.rpartition(':')[2]}-{given.precision}.profile.json.gz"))
    del workload
    release(torch.device(given.device))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--models", default=",".join(MODELS), help="of the zoo, or PACKAGE.MODULE:FACTORY")
    parser.add_argument("--batch-size", type=int, help="default: the model's own")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp16", "tf32"))
    parser.add_argument("--autocast", action="store_true", help="training runs under autocast")
    parser.add_argument("--limit", default="200s", help="nothing new is begun past it")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    end, rows = time.monotonic() + parse_duration(given.limit), []
    made = msgspec.to_builtins(source(" ".join(["python", *sys.argv]), torch.device(given.device)))
    for name in given.models.split(","):
        profile = profiled(name, given)
        for case in CASES:
            if time.monotonic() > end:
                break
            strategy, workers, micro_batches, every_block = case
            plan = planned(profile, bb.Network.load("nvlink-ib400").at(workers=workers), strategy)
            plan = recomputed(plan) if every_block else plan
            row: dict[str, Any] = dict(
                zip(("strategy", "workers", "micro_batches", "recomputed"), case, strict=True),
                model=name, precision=given.precision, batch_size=profile.batch_size,
            )  # fmt: skip
            held = sharded_memory(profile, plan, micro_batches=micro_batches)
            row["predicted_bytes"] = held.total_bytes if held else None
            try:
                under = given.precision if given.autocast else "fp32"
                row["measured_bytes"] = peak_of(name, plan, micro_batches, under, given)
            except RuntimeError as error:
                row["failed"] = f"{type(error).__name__}: {error}"
                release(torch.device(given.device))
            rows.append(row)
            write(given.output, (json.dumps({**made, "rows": rows}, indent=1) + "\n").encode())
            print(row, flush=True)


if __name__ == "__main__":
    main()
