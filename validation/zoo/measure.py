"""Measure the zoo on one GPU: every model at two batch sizes, tf32 and bf16, one file a profile.

    python validation/zoo/measure.py OUT [--limit 6min] [--models resnet50,bert_base] [--no-traces]

Profiles are saved as they are taken (OUT/NAME.json.gz), so that a run cut short keeps what it has and a second run goes
on where the first stopped. The main batch size of every model comes first. Kineto traces of a few of them are taken at
the very end (OUT/NAME.kineto.json.gz): the tracer slows launches for the rest of a process's life.
OUT/summary.tsv holds one line a profile, with the profiler's own cost; at the end that cost is printed for profiles
bound by the device, close to launch-bound and launch-bound, each apart.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from backbeat.errors import BackbeatError
from backbeat.measure.model.factory import Workload, load_factory
from backbeat.measure.model.factory_profile import profile_name
from backbeat.measure.model.inputs import MeasureOptions
from backbeat.measure.model.profiler import MeasuredModel, measure
from backbeat.measure.model.training_step import autocast, release, tensor_cores
from backbeat.runtime.compressed.topk_speed import measure_topk
from backbeat.runtime.memory import apply
from backbeat.units import parse_duration


class Model(NamedTuple):
    factory: str
    batch_sizes: tuple[int, int]
    """The main one first."""


ZOO = (
    Model("resnet50", (64, 128)),
    Model("bert_base", (64, 32)),
    Model("vgg16", (64, 128)),
    Model("gpt2", (8, 16)),
    Model("densenet121", (64, 128)),
    Model("vit_b", (64, 128)),
    Model("resnet152", (64, 128)),
    Model("bert_large", (64, 32)),
    Model("llama_1b", (4, 2)),
    Model("efficientnet_b0", (64, 128)),
    Model("convnext_tiny", (64, 128)),
    Model("t5_base", (16, 8)),
    Model("densenet161", (64, 32)),
    Model("vit_l", (32, 64)),
    Model("gpt2_medium", (8, 4)),
    Model("resnet101", (64, 128)),
    Model("densenet201", (64, 32)),
    Model("inception_v3", (64, 128)),
    Model("googlenet", (64, 128)),
)
PRECISIONS = ("bf16", "tf32")
TRACED = (("resnet50", "tf32"), ("bert_base", "bf16"), ("vgg16", "bf16"))
TRACED_STEPS = 3


def main() -> int:
    options = _arguments()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    deadline = time.monotonic() + parse_duration(options.limit)
    if device.type == "cuda":
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, cuda {torch.version.cuda}", flush=True)
    chosen = options.models.split(",") if options.models else [model.factory for model in ZOO]
    unknown = set(chosen) - {model.factory for model in ZOO}
    if unknown:
        print(f"no such model in the zoo: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    models = [next(model for model in ZOO if model.factory == name) for name in chosen]
    precisions = options.precisions.split(",")
    kept_for_traces = 0.0 if options.no_traces else options.traces_s
    failures, left = 0, 0
    for index in range(1 if options.main_only or options.batch_size else 2):
        for model in models:
            batch_size = options.batch_size or model.batch_sizes[index]
            wanted = [
                precision
                for precision in precisions
                if not _path(out, model, batch_size, precision, device, options).exists()
            ]
            if not wanted:
                continue
            if time.monotonic() > deadline - kept_for_traces:
                left += len(wanted)
                continue
            failures += _measure_model(model, batch_size, wanted, device, out, options)
    traced = 0 if options.no_traces else _trace_all(models, device, out, options, deadline)
    size = sum(file.stat().st_size for file in out.glob("*.json.gz") if ".kineto." not in file.name)
    count = sum(1 for file in out.glob("*.json.gz") if ".kineto." not in file.name)
    for line in overheads(out / "summary.tsv"):
        print(line, flush=True)
    print(f"{count} profiles, {size / 1e6:.2f} MB; {traced} traces; {failures} failed; {left} left for want of time")
    return 1 if failures else 0


def _measure_model(
    model: Model, batch_size: int, precisions: list[str], device: torch.device, out: Path, options: argparse.Namespace
) -> int:
    """Build once, measure in each precision; a failure is printed and does not stop the rest."""
    failures = 0
    try:
        factory = load_factory(f"backbeat.zoo.models:{model.factory}")
        workload = factory.build(batch_size, device)
        for precision in precisions:
            path = _path(out, model, batch_size, precision, device, options)
            started = time.monotonic()
            release(device)
            try:
                measuring = MeasureOptions(
                    optimizer=options.optimizer,
                    device=device,
                    precision=precision,
                    iterations=options.iterations,
                    warmup=options.warmup,
                    time_limit_s=options.each_s,
                    accept_noise=options.accept_noise,
                    batch_size=batch_size,
                    compile_blocks=options.compile,
                    name=_name(model, batch_size, precision, device, options),
                    model_name=factory.title,
                    keep=False,
                    command=_command(model, batch_size, precision, device, options),
                    notes=(f"{factory.spec}: {factory.description}",),
                    topk_speed=measure_topk,
                    apply_memory=apply,
                )
                result = measure(workload.model, workload.batch, workload.loss, measuring)
            except BackbeatError as error:
                failures += 1
                print(f"FAILED {path.name}: {error}", flush=True)
                continue
            result.profile.save(path)
            _report(result, path, time.monotonic() - started, out)
    except Exception as error:
        failures += 1
        print(f"FAILED {model.factory} b{batch_size}: {type(error).__name__}: {error}", flush=True)
    # Outside the handler: while it runs, the error's traceback holds every tensor of the model.
    workload = None  # type: ignore[assignment]
    release(device)
    return failures


def _report(result: MeasuredModel, path: Path, seconds: float, out: Path) -> None:
    profile = result.profile
    memory, bound = profile.memory, result.launch_bound
    columns = {
        "name": profile.name,
        "iteration_ms": f"{profile.single_s * 1e3:.3f}",
        "forward_ms": f"{profile.forward_s * 1e3:.3f}",
        "backward_ms": f"{profile.backward_s * 1e3:.3f}",
        "update_ms": f"{profile.update_s * 1e3:.3f}",
        "gradients": str(len(profile.gradients)),
        "gradient_MB": f"{profile.total_bytes / 1e6:.1f}",
        "peak_GB": f"{memory.peak_bytes / 1e9:.2f}" if memory else "",
        "hooked_over_plain": f"{result.overhead:.4f}",
        "pace": bound.kind if bound else "",
        "host_ms": f"{bound.host_s * 1e3:.3f}" if bound else "",
        "device_ms": f"{bound.device_s * 1e3:.3f}" if bound and bound.device_s else "",
        "iterations": str(len(profile.iteration_s)),
    }
    summary = out / "summary.tsv"
    lines = [] if summary.exists() else ["\t".join(columns)]
    with summary.open("a") as file:
        file.write("\n".join([*lines, "\t".join(columns.values())]) + "\n")
    print(
        f"{profile.name:<34} {columns['iteration_ms']:>9} ms = {columns['forward_ms']} + {columns['backward_ms']} + "
        f"{columns['update_ms']}, {columns['gradients']} gradients, {columns['gradient_MB']} MB, "
        f"peak {columns['peak_GB']} GB, hooked/plain {columns['hooked_over_plain']}, {columns['pace'] or 'host'}, "
        f"{path.stat().st_size / 1e3:.1f} kB, {seconds:.1f} s",
        flush=True,
    )


def overheads(summary: Path) -> list[str]:
    """Hooked over plain forward and backward, for each kind of pace."""
    if not summary.exists():
        return []
    header, *rows = (line.split("\t") for line in summary.read_text().splitlines())
    by_pace: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        columns = dict(zip(header, row, strict=True))
        by_pace.setdefault(columns["pace"], []).append((float(columns["hooked_over_plain"]), columns["name"]))
    lines = []
    for pace, found in sorted(by_pace.items()):
        worst, name = max(found)
        middle = median(overhead for overhead, _ in found)
        under = sum(1 for overhead, _ in found if overhead < 1.02)
        lines.append(
            f"{pace or 'host'}: {len(found)} profiles, hooked/plain median {middle:.4f}, "
            f"{under} under 1.02, worst {worst:.4f} ({name})"
        )
    return lines


def _trace_all(
    models: list[Model], device: torch.device, out: Path, options: argparse.Namespace, deadline: float
) -> int:
    traced = 0
    for factory_name, precision in TRACED:
        model = next((model for model in models if model.factory == factory_name), None)
        if model is None:
            continue
        batch_size = options.batch_size or model.batch_sizes[0]
        path = out / f"{_name(model, batch_size, precision, device)}.kineto.json.gz"
        if path.exists():
            traced += 1
            continue
        if time.monotonic() > deadline:
            print(f"no time left to trace {path.name}", flush=True)
            continue
        try:
            workload = load_factory(f"backbeat.zoo.models:{model.factory}").build(batch_size, device)
            _trace(workload, precision, device, path)
            traced += 1
            print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB", flush=True)
        except Exception as error:
            print(f"FAILED {path.name}: {type(error).__name__}: {error}", flush=True)
        workload = None  # type: ignore[assignment]
        release(device)
    return traced


def _trace(workload: Workload, precision: str, device: torch.device, path: Path) -> None:
    """Three steps as a user would trace them, after a warm-up long enough for the clocks to settle."""
    model, batch, loss = workload.model, workload.batch, workload.loss
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        with autocast(precision, device):
            value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with tensor_cores(precision, device):
        for _ in range(10):
            step()
        with torch.profiler.profile(
            activities=activities,
            record_shapes=True,
            schedule=torch.profiler.schedule(wait=0, warmup=2, active=TRACED_STEPS, repeat=1),
        ) as profiler:
            for _ in range(2 + TRACED_STEPS):
                step()
                profiler.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    temporary = path.with_name(f"partial-{path.name}")
    profiler.export_chrome_trace(str(temporary))
    temporary.rename(path)


def _name(
    model: Model, batch_size: int, precision: str, device: torch.device, options: argparse.Namespace | None = None
) -> str:
    chosen = MeasureOptions(precision=precision)
    if options is not None:
        chosen = replace(chosen, optimizer=options.optimizer, compile_blocks=options.compile)
    return profile_name(load_factory(f"backbeat.zoo.models:{model.factory}"), batch_size, chosen, device)


def _path(
    out: Path, model: Model, batch_size: int, precision: str, device: torch.device, options: argparse.Namespace
) -> Path:
    return out / f"{_name(model, batch_size, precision, device, options)}.json.gz"


def _command(model: Model, batch_size: int, precision: str, device: torch.device, options: argparse.Namespace) -> str:
    optimizer = f" --optimizer {options.optimizer}" if options.optimizer else ""
    return (
        f"backbeat profile backbeat.zoo.models:{model.factory} --batch {batch_size} --precision {precision} "
        f"--device {device.type}{optimizer}{' --compile' if options.compile else ''}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the zoo on one GPU.")
    parser.add_argument("out", type=Path, help="folder for the profiles")
    parser.add_argument("--limit", default="6min", help="wall-clock limit; nothing new is begun past it (default 6min)")
    parser.add_argument("--traces-s", type=float, default=25.0, help="seconds of the limit kept for the traces")
    parser.add_argument("--no-traces", action="store_true", help="take no Kineto traces")
    parser.add_argument("--models", help="comma-separated factories; all by default")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="comma-separated")
    parser.add_argument("--batch-size", type=int, help="this one instead of the zoo's two")
    parser.add_argument("--accept-noise", action="store_true", help="keep disturbed profiles; a note says how much")
    parser.add_argument("--main-only", action="store_true", help="only the main batch size of every model")
    parser.add_argument("--optimizer", help="sgd (with momentum), adam or adamw (both fused); sgd by default")
    parser.add_argument("--compile", action="store_true", help="under torch.compile, block by block")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--each-s", type=float, default=2.0, help="measuring time a profile, about (default 2)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
