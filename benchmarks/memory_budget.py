"""The whole of compressed in a memory budget on one GPU: profile, plan for budgets, train, against the usual ways.

    python benchmarks/memory_budget.py FOLDER [--models resnet152,bert_large] [--rows compressed,dense,usual,overhead]

Writes FOLDER/<model>.profile.json, the plans, and FOLDER/<model>.json after every row. Budgets are bytes on the device
over the timed steps (`max_memory_allocated`); each planned row holds what was predicted beside what was measured. One
rank: what compressed buckets cost the device is there, their traffic is not. bf16 autocast, SGD with momentum.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from memory_activations import checkpointed, links_of, measure_run, repeated

from backbeat import Network, Plan, Profile, plan, predict
from backbeat.errors import InputError
from backbeat.measure import profile as measure_profile
from backbeat.model import Bucket, Compression
from backbeat.model.blocks import segments_of
from backbeat.model.files import write
from backbeat.model.resident import ResidentMemory
from backbeat.planners.memory_moves import uniform
from backbeat.planners.memory_plan import MemorySearch
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.compressed.topk_speed import measure_topk
from backbeat.runtime.memory import apply
from backbeat.steps.memory_timeline import BlockChain
from backbeat.zoo import models

BATCH = {"resnet152": 256, "bert_large": 64}
COMPRESSED_GB = {"resnet152": (4.5, 6.0, 9.0), "bert_large": (4.6, 5.7, 7.0, 10.0)}
DENSE_GB = {"resnet152": (5.0, 8.0, 14.0), "bert_large": (7.0, 9.0, 12.0)}
DENSITY = 0.01
BUCKET_BYTES = {"resnet152": 50 * 2**20, "bert_large": 200 * 2**20}
"""At most, of compressed buckets within a budget. Scratch is as large as the largest bucket, so they are small where
memory is short; every bucket costs launches, so they are large where the host is the limit. The embedding of BERT alone
has 119 MiB."""
ROOMY_BYTES = {"resnet152": 50 * 2**20, "bert_large": 300 * 2**20}
"""Without a budget."""
SMALL_BYTES = 2**16
TURNS = {"resnet152": 12, "bert_large": 40}
Setup = tuple[Any, Any, Any, torch.optim.Optimizer]


def bert_classifier(batch_size: int, device: str) -> Any:
    """BERT-Large with a classifier of two classes, 128 tokens a sample: no vocabulary-wide output."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    with torch.device(device):
        model = transformers.BertForSequenceClassification(config)
        tokens = torch.randint(0, config.vocab_size, (batch_size, 128))
        labels = torch.randint(0, 2, (batch_size,))
    return model.train(), {"input_ids": tokens, "labels": labels}, lambda one, batch: one(**batch).loss


FACTORIES: dict[str, Callable[..., Any]] = {"resnet152": models.resnet152, "bert_large": bert_classifier}


def setup(name: str, device: str, batch: int) -> Setup:
    torch.manual_seed(0)
    model, data, loss = FACTORIES[name](batch_size=batch, device=device)
    return model, data, loss, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def compressed_plan(profile: Profile, largest: int) -> Plan:
    """Every tensor above 64 KiB in top-k buckets in ready order, the small ones dense at the end."""
    buckets: list[list[str]] = [[]]
    size = 0
    small = []
    for gradient in profile.gradients:
        if gradient.bytes <= SMALL_BYTES:
            small.append(gradient.name)
            continue
        if size and size + gradient.bytes > largest:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient.name)
        size += gradient.bytes
    compression = Compression(density=DENSITY)
    return Plan(
        strategy="custom",
        model=profile.model,
        workers=1,
        communicators=1,
        buckets=(
            *(Bucket(gradients=tuple(names), communicator=0, compression=compression) for names in buckets),
            *((Bucket(gradients=tuple(small), communicator=0),) if small else ()),
        ),
    )


class NaiveTopK:
    """Residual, velocity and a dense result for each parameter, one after the other: what the usual loop does."""

    def __init__(self, model: Any, lr: float) -> None:
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=lr)
        self.residual = [torch.zeros_like(one) for one in self.parameters]
        self.velocity = [torch.zeros_like(one) for one in self.parameters]

    def step(self) -> None:
        with torch.no_grad():
            for parameter, residual, velocity in zip(self.parameters, self.residual, self.velocity, strict=True):
                if parameter.grad is None:
                    continue
                velocity.mul_(0.9).add_(parameter.grad)
                residual.add_(velocity)
                flat = residual.view(-1)
                indices = flat.abs().topk(max(1, int(flat.numel() * DENSITY))).indices
                dense = torch.zeros_like(flat)
                dense[indices] = flat[indices]
                flat[indices] = 0
                velocity.view(-1)[indices] = 0
                parameter.grad = dense.view_as(parameter)
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def wrapped_run(given: Setup, made: Plan, iterations: int, attach: bool = True) -> dict[str, Any]:
    model, data, loss, optimizer = given
    ddp = DistributedDataParallel(model, plan=made, broadcast_buffers=False)
    if attach:
        ddp.attach(optimizer, max_grad_norm=None)
    try:
        # The wrapper times its own first steps, which costs the host something.
        return measure_run(ddp, data, loss, optimizer, iterations=iterations, warmup=10)
    finally:
        if ddp.reducer.memory is not None:
            ddp.reducer.memory.remove()
        ddp._remove_autograd_hooks()


class Table:
    """Rows of one model, written after each."""

    def __init__(self, folder: Path, name: str, device: str) -> None:
        self.path = folder / f"{name}.json"
        self.document: dict[str, Any] = {
            "model": name,
            "batch": BATCH[name],
            "precision": "bf16",
            "density": DENSITY,
            "bucket_bytes": {"within a budget": BUCKET_BYTES[name], "without": ROOMY_BYTES[name]},
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "rows": {},
        }

    def add(self, name: str, run: Callable[[], dict[str, Any]], **more: Any) -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        begun = time.perf_counter()
        try:
            row = {**run(), **more}
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(limit=-6), **more}
        row["took_s"] = round(time.perf_counter() - begun, 1)
        self.document["rows"][name] = row
        peak, wanted = row.get("peak_bytes") or 0, row.get("predicted_peak_bytes") or 0
        print(
            f"{self.document['model']:11s} {name:44s} {row.get('ms', float('nan')):8.1f} ms {peak / 1e9:6.2f} GB"
            + (f"  predicted {row.get('predicted_ms', 0):.0f} ms {wanted / 1e9:.2f} GB" if wanted else "")
            + (f"  {row['error'][:200]}" if "error" in row else "")
            + f"  [{row['took_s']} s]",
            flush=True,
        )
        self.save()

    def save(self) -> None:
        write(self.path, json.dumps(self.document, indent=1).encode())


def usual_rows(table: Table, name: str, device: str, iterations: int) -> None:
    batch = BATCH[name]

    def checkpoint_run() -> dict[str, Any]:
        model, data, loss, optimizer = setup(name, device, batch)
        with checkpointed(model, repeated(links_of(model, data, loss, torch.bfloat16))):
            return measure_run(model, data, loss, optimizer, iterations=iterations)

    def naive_run() -> dict[str, Any]:
        model, data, loss, _ = setup(name, device, batch)
        return measure_run(model, data, loss, NaiveTopK(model, 1e-3), iterations=iterations)  # type: ignore[arg-type]

    def host_run() -> dict[str, Any]:
        given = setup(name, device, batch)
        return measure_run(
            *given,
            around=lambda: torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"),
            iterations=2,
            warmup=2,
        )

    table.add("plain", lambda: measure_run(*setup(name, device, batch), iterations=iterations))
    table.add("naive top-k, residual and velocity", naive_run)
    table.add("checkpoint every block (torch)", checkpoint_run)
    table.add("save_on_cpu(pin_memory=True)", host_run)


def planned_rows(table: Table, profile: Profile, kind: str, device: str, iterations: int, folder: Path) -> None:
    name = table.document["model"]
    base = compressed_plan(profile, BUCKET_BYTES[name]) if kind == "compressed" else None
    for gigabytes in (COMPRESSED_GB if kind == "compressed" else DENSE_GB)[name]:
        for residuals in (
            ("device", "host") if kind == "compressed" and gigabytes == COMPRESSED_GB[name][0] else ("device",)
        ):
            label = f"{kind} {gigabytes:g} GB" + (", residuals on the host" if residuals == "host" else "")
            try:
                made = budgeted(profile, base, round(gigabytes * 1e9), residuals)
            except InputError as error:
                table.document["rows"][label] = {"refused": str(error)}
                print(f"{name:11s} {label:44s} {error}", flush=True)
                table.save()
                continue
            made.save(folder / f"{name}-{label.replace(' ', '-').replace(',', '')}.plan.json")
            result = predict(profile, Network.load("10gbe").at(workers=1), made, broadcast_buffers=False)
            assert made.memory is not None
            table.add(
                label,
                lambda made=made: wrapped_run(setup(name, device, BATCH[name]), made, iterations),
                budget_bytes=made.memory.budget_bytes,
                predicted_peak_bytes=made.memory.peak_bytes,
                predicted_ms=result.iteration_s * 1e3,
                actions={
                    what: sum(len(one.blocks) for one in made.memory.segments if (one.action, one.input) == key)
                    for what, key in {
                        "keep": ("keep", "keep"),
                        "recompute": ("recompute", "keep"),
                        "recompute, input offloaded": ("recompute", "offload"),
                        "offload": ("offload", "keep"),
                    }.items()
                },
                segments=len(made.memory.segments),
            )
    if kind == "dense":
        chain = BlockChain(profile, ResidentMemory.of(profile, None, "device", 1))
        for policy, ranges in uniform(chain).items():
            if policy == "keep":
                continue
            run = MemorySearch(chain).run(ranges)
            memory = msgspec.convert({"segments": msgspec.to_builtins(segments_of(profile, ranges))}, type(made.memory))
            table.add(
                f"uniform: {policy}",
                lambda memory=memory: measure_run(*setup(name, device, BATCH[name]), memory, iterations=iterations),
                predicted_peak_bytes=run.peak_bytes,
                predicted_ms=(run.time_s + profile.update_s) * 1e3,
            )


def budgeted(profile: Profile, base: Plan | None, budget: int, residuals: Any) -> Plan:
    from backbeat.planners.memory_plan import memory_plan

    buckets = base if base is not None else plan(profile, Network.load("10gbe").at(workers=1), "ddp")
    return msgspec.structs.replace(
        buckets, memory=memory_plan(profile, budget, buckets, residuals=residuals, workers=1)
    )


def overhead_rows(table: Table, profile: Profile, device: str, iterations: int) -> None:
    name = table.document["model"]
    compressed = compressed_plan(profile, ROOMY_BYTES[name])
    dense = msgspec.structs.replace(
        compressed, buckets=tuple(msgspec.structs.replace(bucket, compression=None) for bucket in compressed.buckets)
    )
    table.add(
        "dense buckets, no memory plan",
        lambda: wrapped_run(setup(name, device, BATCH[name]), dense, iterations, attach=False),
    )
    table.add(
        "top-k buckets, updates attached", lambda: wrapped_run(setup(name, device, BATCH[name]), compressed, iterations)
    )
    table.add("in turns", lambda: in_turns(name, device, {"dense": dense, "top-k": compressed}))


def in_turns(name: str, device: str, plans: dict[str, Plan]) -> dict[str, Any]:
    """Steps of plain training, and of the wrapper with each plan, by turns in one run: what else the host does falls
    on all alike. Ratios are to the dense plan's steps of the same turn."""
    sides: dict[str, Setup] = {"plain": setup(name, device, BATCH[name])}
    wrapped = []
    for side, made in plans.items():
        model, data, loss, optimizer = setup(name, device, BATCH[name])
        ddp: Any = DistributedDataParallel(model, plan=made, broadcast_buffers=False)
        if made.compressed:
            ddp.attach(optimizer, max_grad_norm=None)
        wrapped.append(ddp)
        sides[side] = (ddp, data, loss, optimizer)
    times: dict[str, list[float]] = {side: [] for side in sides}
    try:
        for given in sides.values():
            measure_run(*given, iterations=1, warmup=12)
        for turn in range(TURNS[name]):
            for side in list(sides) if turn % 2 == 0 else reversed(list(sides)):
                times[side].append(measure_run(*sides[side], iterations=3, warmup=1)["ms"])
    finally:
        for ddp in wrapped:
            ddp._remove_autograd_hooks()
    found: dict[str, Any] = {
        "turns": TURNS[name],
        "sides": {
            side: {"ms": statistics.median(ms), "quartiles_ms": statistics.quantiles(ms, n=4), "least_ms": min(ms)}
            for side, ms in times.items()
        },
        "ratios": {},
        "all_ms": times,
    }
    for side, ms in times.items():
        ratios = [one / other for one, other in zip(ms, times["dense"], strict=True)]
        found["ratios"][side] = {"median": statistics.median(ratios), "quartiles": statistics.quantiles(ratios, n=4)}
        print(
            f"{name:11s} {side:8s} {statistics.median(ms):7.1f} ms, least {min(ms):.1f}; to dense, by turn "
            f"{statistics.median(ratios):.3f} ({statistics.quantiles(ratios, n=4)[0]:.3f} to "
            f"{statistics.quantiles(ratios, n=4)[2]:.3f})",
            flush=True,
        )
    return found


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{folder}/meet",
            rank=0,
            world_size=1,
            device_id=torch.device("cuda", 0) if device == "cuda" else None,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="resnet152,bert_large")
    parser.add_argument("--rows", default="compressed,dense,overhead,usual")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--batch", type=int, help="instead of the models' own")
    parser.add_argument("--bucket-mib", type=int, help="most of a compressed bucket, instead of the models' own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    wanted = given.rows.split(",")
    for name in given.models.split(","):
        if given.batch:
            BATCH[name] = given.batch
        if given.bucket_mib:
            BUCKET_BYTES[name] = ROOMY_BYTES[name] = given.bucket_mib * 2**20
        with one_rank(given.device):
            table = Table(given.folder, name, given.device)
            model, data, loss, optimizer = setup(name, given.device, BATCH[name])
            profile = measure_profile(
                model, data, loss, optimizer, precision="bf16", iterations=10, warmup=3, keep=False,
                batch_size=BATCH[name], model_name=name, device=given.device,
                topk_speed=measure_topk, apply_memory=apply,
            )  # fmt: skip
            profile.save(given.folder / f"{name}.profile.json")
            print(name, "profiled:", len(profile.blocks), "blocks", f"{profile.single_s * 1e3:.1f} ms", flush=True)
            del model, data, loss, optimizer
            for kind in wanted:
                if kind in ("compressed", "dense"):
                    planned_rows(table, profile, kind, given.device, given.iterations, given.folder)
                elif kind == "overhead":
                    overhead_rows(table, profile, given.device, given.iterations)
                elif kind == "usual":
                    usual_rows(table, name, given.device, given.iterations)


if __name__ == "__main__":
    main()
