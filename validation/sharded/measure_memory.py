"""Peak memory of FSDP2 steps on one GPU beside what is predicted from a profile of the plain model.

    python validation/sharded/measure_memory.py -o OUT/memory.json [--models gpt2,bert_large] [--limit 200]

The process group sends nothing (torch's `fake` backend), so that one process is one rank of any number: sizes, streams
and the allocator are real, values are not. Each model is profiled as it is (SGD with momentum), then sharded by each
strategy and trained for three steps; the peak is `max_memory_allocated` of the last two. A bf16 model runs twice:
`native`, computing in the dtype of its gathered parameters, and under `autocast`, as it was profiled. Saved after every
row.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
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

import backbeat as bb
from backbeat.measure import profile as measure
from backbeat.measure.model.training_step import autocast, release
from backbeat.model import MemoryPlan, Plan, Profile, Segment
from backbeat.steps.sharded_memory import sharded_memory
from backbeat.zoo import models

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
MODELS = {
    "gpt2": (models.gpt2, 8),
    "gpt2_medium": (models.gpt2_medium, 4),
    "bert_large": (models.bert_large, 16),
    "vit_l": (models.vit_l, 32),
    "llama_1b": (models.llama_1b, 2),
    "resnet152": (models.resnet152, 64),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Tiny(nn.Module):
    """For a try without a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4))
        self.head = nn.Linear(64, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.embed(value)
        for layer in self.layers:
            value = layer(value)
        return self.head(value)


def tiny(batch_size: int, device: str) -> Any:
    return Tiny().to(device), torch.randn(batch_size, 64, device=device), lambda model, batch: model(batch).sum()


@contextmanager
def ranks(count: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module, plan: Plan, device: str, recomputed: bool) -> None:
    """torch's own calls, unit by unit."""
    sharding = plan.sharding
    assert sharding is not None
    mesh = sharding.mesh
    if mesh.replicate > 1:
        grid = init_device_mesh(device, (mesh.replicate, mesh.shard), mesh_dim_names=("copies", "shards"))
    else:
        grid = init_device_mesh(device, (mesh.shard,))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[sharding.param_dtype], reduce_dtype=DTYPES[sharding.reduce_dtype])
    for unit in sharding.units:
        for name in unit.modules if recomputed else ():
            parent, _, own = name.rpartition(".")
            wrapped = checkpoint_wrapper(model.get_submodule(name))
            holder = model.get_submodule(parent)
            if own.isdigit():
                holder[int(own)] = wrapped  # type: ignore[index]
            else:
                setattr(holder, own, wrapped)
        modules = [model.get_submodule(name) for name in unit.modules]
        fully_shard(
            modules[0] if len(modules) == 1 else modules,
            mesh=grid,
            mp_policy=policy,
            reshard_after_forward=unit.reshard,
        )
    fully_shard(model, mesh=grid, mp_policy=policy)


def peak_of(
    factory: Callable[..., Any], batch_size: int, device: str, plan: Plan, case: tuple[Any, ...], precision: str
) -> int:
    """`precision`: what forward runs under; fp32 leaves it to the parameters' dtype."""
    _, _, micro_batches, recomputed = case
    sharding = plan.sharding
    assert sharding is not None
    with ranks(sharding.mesh.workers):
        model, batch, loss = factory(batch_size, device)
        shard(model, plan, device, recomputed)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for step in range(3):
            if step == 1 and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for number in range(micro_batches):
                last = number == micro_batches - 1
                model.set_requires_gradient_sync(last or sharding.gradient_sync == "every")
                model.set_reshard_after_backward(last or sharding.reshard_after_backward)
                with autocast(precision, torch.device(device)):
                    result = loss(model, batch)
                result.backward()
                del result
            optimizer.step()
            optimizer.zero_grad()
        found = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        del model, batch, optimizer
    release(torch.device(device))
    return found


def plan_for(profile: Profile, case: tuple[Any, ...]) -> Plan:
    strategy, workers, _, recomputed = case
    plan = bb.plan(profile, bb.Network.load("nvlink-ib400").at(workers=workers), strategy)
    if not recomputed or plan.sharding is None:
        return plan
    names = [name for unit in plan.sharding.units for name in unit.modules]
    memory = MemoryPlan(segments=tuple(Segment(blocks=(name,), action="recompute") for name in names))
    return msgspec.structs.replace(plan, memory=memory, predicted=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precisions", default="bf16,tf32")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which nothing new is begun")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    end = time.monotonic() + options.limit
    device = options.device
    index = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    rows: list[dict[str, Any]] = []
    answer = {"torch": torch.__version__, "device": index, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    for precision in options.precisions.split(","):
        for name in options.models.split(","):
            factory, batch_size = (tiny, 4) if name == "tiny" else MODELS[name]
            if time.monotonic() > end:
                break
            try:
                torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
                model, batch, loss = factory(batch_size, device)
                profile = measure(
                    model, batch, loss, precision=precision, device=device, name=name, model_name=name,
                    batch_size=batch_size, iterations=8, warmup=3, time_limit_s=20.0, accept_noise=True,
                )  # fmt: skip
                profile.save(options.output.with_name(f"{name}-{precision}.profile.json.gz"))
                del model, batch
                release(torch.device(device))
            except Exception as error:
                rows.append(
                    {"model": name, "precision": precision, "error": f"{error}", "trace": traceback.format_exc()}
                )
                options.output.write_text(json.dumps(answer, indent=1))
                release(torch.device(device))
                continue
            for case in CASES:
                if time.monotonic() > end:
                    break
                row: dict[str, Any] = dict(
                    zip(("strategy", "workers", "micro_batches", "recomputed"), case, strict=True),
                    model=name, precision=precision, batch_size=batch_size,
                )  # fmt: skip
                try:
                    plan = plan_for(profile, case)
                    held = sharded_memory(profile, plan, micro_batches=case[2])
                    assert held is not None
                    row["predicted_bytes"] = held.total_bytes
                    kinds = {f"{kind}_bytes": size for kind, size in held.held.items()}
                    row["kinds"] = kinds | {"where": held.where, "phase": held.phase}
                    for style in ("native", "autocast") if precision in ("bf16", "fp16") else ("native",):
                        under = precision if style == "autocast" else "fp32"
                        found = peak_of(factory, batch_size, device, plan, case, under)
                        row[f"{style}_bytes"] = found
                        row[f"{style}_error"] = held.total_bytes / found - 1 if found else None
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"
                    row["trace"] = traceback.format_exc()
                    release(torch.device(device))
                rows.append(row)
                options.output.write_text(json.dumps(answer, indent=1))
                print({key: value for key, value in row.items() if key not in ("kinds", "trace")}, flush=True)


if __name__ == "__main__":
    main()
