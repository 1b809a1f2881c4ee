"""Peak memory and time of one training step: plain, checkpointed, saved on the host, and under memory plans.

    python benchmarks/memory_activations.py OUT.json [--model resnet152|bert_large] [--batch 256] [--plan plan.json]

Needs a GPU to say anything about memory: on a CPU only times are taken. bf16 autocast, SGD with momentum. Every row is
a model of its own from the same seed; the file is written after every row. `--rows` picks rows by the beginning of
their names; `--plan` adds a row for a plan file (`.memory` of a plan, or a bare memory plan); `--profile` adds the peak
that the model of memory predicts from that profile, with gradients held (`--hold-gradients` measures so too).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backbeat.measure.model.chain import BlockCall
from backbeat.model import MemoryPlan, Plan, Profile, Segment
from backbeat.model.files import write
from backbeat.runtime.memory import apply, find_blocks, observe
from backbeat.steps.memory_timeline import memory_timeline
from backbeat.zoo import models

BATCH = {"resnet152": 256, "bert_large": 64}
Loss = Callable[[nn.Module, Any], torch.Tensor]


def measure_run(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    memory_plan: MemoryPlan | None = None,
    *,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    iterations: int = 7,
    warmup: int = 3,
    precision: torch.dtype | None = torch.bfloat16,
    hold_gradients: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train some steps, under a memory plan or inside another context, and give median time and peak.

    `hold_gradients` keeps them allocated between steps, as flat buffers of a reducer do; a prediction counts them so.
    `options` go to `backbeat.runtime.memory.apply`. Peak is `max_memory_allocated` over the timed steps; None on a CPU.
    """
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    handle = apply(model, memory_plan, **options) if memory_plan is not None else None
    times = []
    host_s = []
    loss_value = torch.zeros(())
    try:
        for step in range(warmup + iterations):
            if step == warmup and cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            if cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            with around(), autocast(device, precision):
                value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not hold_gradients)
            loss_value = value.detach()
            del value
            host_s.append(time.perf_counter() - begin)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated() if cuda else None
        host_bytes = handle.host_bytes if handle is not None else None
    finally:
        if handle is not None:
            handle.remove()
    return {
        "ms": round(statistics.median(times[warmup:]) * 1e3, 3),
        "least_ms": round(min(times[warmup:]) * 1e3, 3),
        "host_ms": round(statistics.median(host_s[warmup:]) * 1e3, 3),
        "peak_bytes": peak,
        "host_bytes": host_bytes,
        "loss": float(loss_value),
    }


def autocast(device: torch.device, precision: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if precision is None else torch.autocast(device.type, dtype=precision)


@contextlib.contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """A forward in here leaves buffers and the random generators as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({buffer.device.index or 0 for buffer in model.parameters() if buffer.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def links_of(model: nn.Module, batch: Any, loss: Loss, precision: torch.dtype | None) -> tuple[BlockCall, ...]:
    device = next(model.parameters()).device
    with quiet(model), torch.no_grad(), autocast(device, precision):
        return observe(find_blocks(model), lambda: loss(model, batch))


def segments(links: tuple[BlockCall, ...], length: int, where: str = "keep", share: float = 1.0) -> MemoryPlan:
    """Recompute everything in segments of up to `length` chained blocks; of a share of them the input is offloaded.

    A block that writes into its input goes with the one before it, whatever the length.
    """
    buckets: list[list[str]] = []
    for link in links:
        if buckets and link.chained and (link.changes_input or len(buckets[-1]) < length):
            buckets[-1].append(link.name)
        elif not link.changes_input:
            buckets.append([link.name])
    offloaded = round(share * len(buckets)) if where == "offload" else 0
    # The last one comes back at once: nothing is gained by sending it.
    spread = {round((number + 0.5) * len(buckets) / offloaded - 0.5) for number in range(offloaded)} - {
        len(buckets) - 1
    }
    return MemoryPlan(
        segments=tuple(
            Segment(blocks=tuple(names), action="recompute", input="offload" if index in spread else "keep")
            for index, names in enumerate(buckets)
        )
    )


@contextlib.contextmanager
def checkpointed(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Every named block through `torch.utils.checkpoint`, the way its documentation shows."""
    changed = []
    for name in names:
        module = model.get_submodule(name)

        def forward(*args: Any, inner: Any = module.forward, **kwargs: Any) -> Any:
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)

        module.forward = forward
        changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def repeated(links: tuple[BlockCall, ...]) -> list[str]:
    """The blocks that stand in a stack: what people checkpoint."""
    return [link.name for link in links if link.name.rsplit(".", 1)[-1].isdigit()]


def rows(links: tuple[BlockCall, ...]) -> dict[str, Any]:
    """Name to what is done: a memory plan, or the name of one of PyTorch's own ways."""
    stack = repeated(links)
    found: dict[str, Any] = {
        "plain": None,
        "checkpoint every block (torch)": "checkpoint",
        "save_on_cpu(pin_memory=True)": "save_on_cpu",
        "recompute the same blocks": MemoryPlan(
            segments=tuple(Segment(blocks=(name,), action="recompute") for name in stack)
        ),
        "recompute every block": segments(links, 1),
    }
    for length in (2, 3, 4, 6):
        found[f"recompute, segments of {length}"] = segments(links, length)
    for share in (0.4, 1.0):
        found[f"recompute every block, {share:.0%} of inputs offloaded"] = segments(links, 1, "offload", share)
    found["recompute, segments of 2, inputs offloaded"] = segments(links, 2, "offload")
    found["offload half of the blocks"] = MemoryPlan(
        segments=tuple(Segment(blocks=(name,), action="offload") for name in stack[::2])
    )
    return found


def load_plan(path: str) -> MemoryPlan:
    raw = msgspec.json.decode(Path(path).read_bytes())
    if "schema" not in raw:
        return msgspec.convert(raw, MemoryPlan)
    plan = Plan.load(path).memory
    if plan is None:
        raise SystemExit(f"{path} has no memory plan: make one with `backbeat plan --memory`")
    return plan


def run_row(
    factory: Callable[..., Any], batch_size: int, device: str, what: Any, iterations: int, hold_gradients: bool
) -> dict[str, Any]:
    options: dict[str, Any] = {"iterations": iterations, "hold_gradients": hold_gradients}
    torch.manual_seed(0)
    model, batch, loss = factory(batch_size=batch_size, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    try:
        if what == "checkpoint":
            names = repeated(links_of(model, batch, loss, torch.bfloat16))
            with checkpointed(model, names):
                return measure_run(model, batch, loss, optimizer, **options)
        if what == "save_on_cpu":

            def around() -> Any:
                return torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda")

            return measure_run(model, batch, loss, optimizer, around=around, **options)
        result = measure_run(model, batch, loss, optimizer, what, **options)
        return result if what is None else {**result, "segments": len(what.segments), "plan": msgspec.to_builtins(what)}
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUT.json")
    parser.add_argument("--model", default="resnet152", help="a factory of backbeat.zoo.models")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--rows", nargs="*", help="only rows whose names begin so")
    parser.add_argument("--plan", action="append", default=[], help="a plan file; may be given several times")
    parser.add_argument("--profile", help="a profile of the same model and batch: predict each peak from it")
    parser.add_argument("--hold-gradients", action="store_true", help="keep gradients allocated between steps")
    given = parser.parse_args()
    profile = Profile.load(given.profile) if given.profile else None
    factory = getattr(models, given.model)
    size = given.batch or BATCH.get(given.model, 64)
    model, batch, loss = factory(batch_size=size, device=given.device)
    table = rows(links_of(model, batch, loss, torch.bfloat16))
    del model, batch, loss
    table.update({f"plan {path}": load_plan(path) for path in given.plan})
    if given.rows is not None:
        table = {name: what for name, what in table.items() if name.startswith((*given.rows, "plan "))}
    document: dict[str, Any] = {
        "model": given.model,
        "batch": size,
        "precision": "bf16",
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else platform.processor(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": {},
    }
    for name, what in table.items():
        gc.collect()
        if given.device.startswith("cuda"):
            torch.cuda.empty_cache()
        row = run_row(factory, size, given.device, what, given.iterations, given.hold_gradients)
        if profile is not None and not isinstance(what, str):
            predicted = memory_timeline(profile, what or MemoryPlan())
            row["predicted_bytes"] = predicted.peak_bytes
            row["predicted_ms"] = round((predicted.forward_s + predicted.backward_s + profile.update_s) * 1e3, 3)
        document["rows"][name] = row
        peak = f"{row['peak_bytes'] / 1e9:6.2f} GB" if row.get("peak_bytes") else "     ?   "
        line = f"{name:55s} {row.get('ms', float('nan')):9.1f} ms  {peak}  {row.get('error', '')}"
        if "predicted_bytes" in row:
            line += f"  predicted {row['predicted_ms']:.1f} ms, {row['predicted_bytes'] / 1e9:.2f} GB"
        print(line, flush=True)
        write(Path(given.output), json.dumps(document, indent=1).encode())


if __name__ == "__main__":
    main()
