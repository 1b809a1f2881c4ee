"""Steps that the host may limit, measured beside predicted, on one rank.

    python validation/memory/host_steps.py OUT.json --models backbeat.zoo.models:bert_large:64
    python validation/memory/host_steps.py OUT.json --models examples.my_model:small_cnn:4 --precision fp32

Each model is profiled as `backbeat profile` does it, then trained: plain, in the wrapper with the buckets of stock DDP,
and with every block recomputed, recomputed from an input on the host, and offloaded (also inside torch's own
checkpointing). Steps run in a row, as training does; a row holds the median step, the host's own time of a step that
begins with an idle device, and what is predicted. The file is written after every row; a row that fails keeps its
error.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import backbeat as bb
from backbeat.comm.machine import source
from backbeat.measure.model.chain import find_blocks
from backbeat.measure.model.factory import load_factory
from backbeat.measure.model.factory_profile import measure_factory
from backbeat.measure.model.inputs import MeasureOptions
from backbeat.measure.model.training_step import autocast, tensor_cores
from backbeat.model import MemoryPlan, Profile, Segment
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.compressed.topk_speed import measure_topk
from backbeat.runtime.memory import apply
from backbeat.steps.host_lane import HostLane

WAYS = ("plain", "wrapped", "recompute", "fetch", "offload", "torch's checkpointing")


class Steps:
    """A model, and steps of it."""

    def __init__(self, spec: str, batch: int, device: torch.device, precision: str) -> None:
        torch.manual_seed(0)
        workload = load_factory(spec).build(batch, device)
        self.model, self.batch, self.loss = workload.model.to(device), workload.batch, workload.loss
        self.called: Any = self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.device, self.precision = device, precision

    def step(self) -> None:
        with autocast(self.precision, self.device):
            loss = self.loss(self.called, self.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, count: int) -> dict[str, Any]:
        for _ in range(5):
            self.step()
        hosts, rounds = [], []
        for _ in range(5):
            self.wait()
            begin = time.perf_counter()
            self.step()
            hosts.append(time.perf_counter() - begin)
        for _ in range(5):
            self.wait()
            begin = time.perf_counter()
            for _ in range(count):
                self.step()
            self.wait()
            rounds.append((time.perf_counter() - begin) / count)
        return {"step_s": statistics.median(rounds), "rounds_s": rounds, "host_s": statistics.median(hosts)}


@contextlib.contextmanager
def treated(steps: Steps, profile: Profile, way: str) -> Iterator[None]:
    """The model as one row trains it."""
    if way == "wrapped":
        steps.called = DistributedDataParallel(steps.model, plan=wrapped_plan(profile), broadcast_buffers=False)
        yield
        steps.called._remove_autograd_hooks()
    elif way == "torch's checkpointing":
        modules = [module for name, module in find_blocks(steps.model).items() if name in names(profile)]
        for module in modules:
            module.forward = _checkpointed(module.forward)
        yield
    elif way == "plain":
        yield
    else:
        handle = apply(steps.model, memory_plan(profile, way))
        yield
        handle.remove()


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def names(profile: Profile) -> list[str]:
    return [block.name for block in profile.blocks if not block.changes_input]


def memory_plan(profile: Profile, way: str) -> MemoryPlan:
    how: dict[str, Any] = {
        "recompute": {"action": "recompute"},
        "fetch": {"action": "recompute", "input": "offload"},
        "offload": {"action": "offload"},
    }[way]
    return MemoryPlan(segments=tuple(Segment(blocks=(name,), **how) for name in names(profile)))


def wrapped_plan(profile: Profile) -> bb.Plan:
    return bb.plan(profile, bb.Network.load("10gbe").at(workers=1), "ddp")


def predicted(profile: Profile, way: str) -> float | None:
    if way == "torch's checkpointing":
        return None
    plan = wrapped_plan(profile)
    if way == "wrapped":
        lane = HostLane.of(profile)
        return lane.paced(profile.single_s, 1, collectives=len(plan.buckets), gradients=len(profile.gradients))
    if way != "plain":
        plan = msgspec.structs.replace(plan, memory=memory_plan(profile, way))
    return bb.predict(profile, bb.Network.load("10gbe").at(workers=1), plan, broadcast_buffers=False).iteration_s


def row_of(spec: str, batch: int, profile: Profile, way: str, given: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(given.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        steps = Steps(spec, batch, device, given.precision)
        with tensor_cores(given.precision, device), treated(steps, profile, way):
            row = steps.measure(given.steps)
        row["predicted_s"] = predicted(profile, way)
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {error}"}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", required=True, help="PACKAGE.MODULE:FACTORY:BATCH, separated by commas")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=8, help="in a row, five times")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds; rows after it are left out")
    given = parser.parse_args()
    ends = time.monotonic() + given.time_limit
    device = torch.device(given.device)
    document: dict[str, Any] = {
        "source": msgspec.to_builtins(source("validation/memory/host_steps.py", device)),
        "precision": given.precision,
        "models": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1
        )
        for text in given.models.split(","):
            spec, _, batch = text.rpartition(":")
            options = MeasureOptions(
                batch_size=int(batch),
                device=given.device,
                precision=given.precision,
                accept_noise=True,
                topk_speed=measure_topk,
                apply_memory=apply,
            )
            profile = measure_factory(load_factory(spec), options).profile
            entry: dict[str, Any] = {"rows": {}, "profile": {"schema": profile.schema, **msgspec.to_builtins(profile)}}
            document["models"][text] = entry
            for way in WAYS:
                if time.monotonic() > ends:
                    break
                row = entry["rows"][way] = row_of(spec, int(batch), profile, way, given)
                given.out.write_text(json.dumps(document, indent=1) + "\n")
                said = row.get("predicted_s")
                print(
                    f"{text} {way:22}",
                    row.get("error") or f"{row['step_s'] * 1e3:8.2f} ms, host {row['host_s'] * 1e3:8.2f}",
                    f"predicted {said * 1e3:8.2f} ({said / row['step_s'] - 1:+.1%})" if said else "",
                    flush=True,
                )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
