"""`backbeat profile`: measure a model, or compute its profile from shapes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Annotated, Any

import typer

from backbeat.cli.arguments import need_torch
from backbeat.cli.output import check_writable, say
from backbeat.errors import InputError
from backbeat.model import Profile
from backbeat.model.accelerator import accelerator
from backbeat.model.batches import join, measured
from backbeat.model.files import encode
from backbeat.model.gpu_memory import device_bytes
from backbeat.model.rule import MEMORY_ERROR, fits
from backbeat.show.words.numbers import format_number
from backbeat.units import SCREEN, format_bytes, format_seconds, parse_duration


def profile(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE.MODULE:FACTORY",
            help="A function that returns (model, batch, loss) or (model, batch, loss, optimizer).",
        ),
    ],
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE[,SIZE]",
            help="Samples per iteration; the factory's own default, else 64. Several, like 32,64, make a profile that "
            "knows how it grows with the batch; the first is its own.",
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="fp32, tf32, bf16 or fp16 (the last two by autocast); analytic also fp8.")
    ] = "fp32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; cuda where there is one.")] = None,
    iterations: Annotated[int, typer.Option(help="Iterations to time.")] = 30,
    warmup: Annotated[int, typer.Option(help="Iterations to run first, untimed.")] = 10,
    accumulation: Annotated[int, typer.Option(help="Micro-batches per iteration.")] = 1,
    optimizer: Annotated[
        str | None,
        typer.Option(help="sgd (with momentum), adam or adamw (both fused), for a factory that returns none."),
    ] = None,
    compile_blocks: Annotated[
        bool, typer.Option("--compile", help="Run under torch.compile: a graph for each block and all between.")
    ] = False,
    from_layers: Annotated[
        str | None,
        typer.Option(
            metavar="FEW,MORE",
            help="Measure with this many layers, like 2,4, and compose the whole; the factory takes `layers`.",
        ),
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option(help="Time fewer iterations (8 at least) where they take longer, like 20s.")
    ] = None,
    accept_noise: Annotated[
        bool, typer.Option("--accept-noise", help="Keep a profile that a busy machine disturbed; a note says how much.")
    ] = False,
    analytic: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="Compute instead of measuring, for this GPU: h100, b200, mi300x, …"),
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="Analytic: peak TFLOP/s of another GPU.")] = None,
    gbps: Annotated[float | None, typer.Option(help="Analytic: its memory bandwidth in GB/s.")] = None,
    launch_overhead: Annotated[
        bool, typer.Option(help="Analytic: count what the host takes to launch operators, or take it to be ahead.")
    ] = True,
    name: Annotated[str | None, typer.Option(help="The profile's name.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the profile here (.json or .json.gz).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile's file instead of a summary.")] = False,
) -> None:
    """Measure how long a model computes and when each of its gradients is ready."""
    limit_s = None if time_limit is None else parse_duration(time_limit)
    if output is not None:
        check_writable(output)
    need_torch("profile")
    from backbeat.measure.model.factory import load_factory

    batches = [None] if batch is None else _batch_sizes(batch)
    options: dict[str, Any] = {
        "precision": precision,
        "accumulation": accumulation,
        "optimizer": optimizer,
        "name": name,
        # As it was given, with the program's name rather than its path.
        "command": shlex.join(["backbeat", *sys.argv[1:]]),
    }
    if analytic is not None or tflops is not None or gbps is not None:
        if from_layers is not None:
            raise InputError("--from-layers is for measuring: drop it, or --analytic")
        if device is not None:
            raise InputError(f"--device {device} with --analytic: nothing runs on a device then; drop one of the two")
        from backbeat.measure.model.analytic import analytic_profile

        loaded = load_factory(factory)
        computed = [
            analytic_profile(
                loaded,
                gpu=analytic,
                tflops=tflops,
                gbps=gbps,
                batch_size=size,
                compiled=compile_blocks,
                launch_overhead=launch_overhead,
                **options,
            )
            for size in batches
        ]
        result = join(*computed)
    else:
        if not launch_overhead:
            raise InputError("--no-launch-overhead is of --analytic: leave it out to measure")
        from backbeat.measure.model.factory_profile import profile_factory
        from backbeat.measure.model.inputs import MeasureOptions
        from backbeat.runtime.compressed.topk_speed import measure_topk
        from backbeat.runtime.memory import apply

        say(f"profiling {factory} …")
        loaded = load_factory(factory)
        measuring = MeasureOptions(
            device=device,
            compile_blocks=compile_blocks,
            iterations=iterations,
            warmup=warmup,
            time_limit_s=limit_s,
            accept_noise=accept_noise,
            topk_speed=measure_topk,
            apply_memory=apply,
            **options,
        )
        layers = None if from_layers is None else _two_counts(from_layers)
        result = profile_factory(loaded, measuring, batches, layers)
    if output is not None:
        result.save(output)
        say(f"wrote {output}")
    typer.echo(encode(result).decode() if as_json else summary(result), nl=not as_json)
    if output is not None and not as_json:
        typer.echo(f"Next: backbeat predict {output} CLUSTER --gpus 8..512    # networks: backbeat zoo")


def _batch_sizes(text: str) -> list[int | None]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts) or len({*map(int, parts)}) < len(parts):
        raise InputError(f"--batch is {text!r}: give a number of samples, or several different ones like 32,64")
    return [int(part) for part in parts]


def _two_counts(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts) or int(parts[0]) == int(parts[1]):
        raise InputError(f"--from-layers is {text!r}: give two different numbers of layers, like 2,4")
    return int(parts[0]), int(parts[1])


def summary(profile: Profile) -> str:
    """A few lines a person can check the measurement by."""
    from backbeat.measure.model.noise import band

    first, last = profile.gradients[0], profile.gradients[-1]
    rows = [
        ("forward", format_seconds(profile.forward_s)),
        ("backward", format_seconds(profile.backward_s)),
        ("update", format_seconds(profile.update_s) + (f", {profile.optimizer}" if profile.optimizer else "")),
    ]
    if profile.accumulation > 1:
        rows.append(("micro-batches", str(profile.accumulation)))
    rows.append(("iteration", _speed(profile)))
    if profile.iteration_s:
        times = profile.iteration_s
        low, high = map(format_seconds, band(times))
        middle = f"median {format_seconds(median(times))} of {len(times)} iterations"
        rows.append(("as measured", f"{middle}, 10 to 90 %: {low} to {high}"))
    if profile.batches:
        others = [one for one in measured(profile) if one.batch_size != profile.batch_size]
        rows += [(f"batch {one.batch_size}", _speed(one)) for one in others]
    rows += [
        ("gradients", f"{len(profile.gradients)}, {format_bytes(profile.total_bytes)}"),
        ("first ready", f"{first.name} after {format_seconds(first.ready_s)}"),
        ("last ready", f"{last.name} after {format_seconds(last.ready_s)}"),
    ]
    tokens = "" if profile.sequence_length is None else f" of {profile.sequence_length} tokens"
    if profile.flops_per_sample is not None:
        rows.append(("arithmetic", f"{profile.flops_per_sample / 1e9:.4g} GFLOP per sample{tokens}"))
    elif tokens:
        rows.append(("samples", tokens.removeprefix(" ")))
    if (memory := profile.memory) is not None:
        peak, steady = format_bytes(memory.peak_bytes), format_bytes(memory.steady_bytes)
        activations = format_bytes(memory.activation_bytes)
        rows.append(("memory", f"peak {peak}, between iterations {steady}, activations {activations}"))
        if (device := accelerator(profile.device)) is not None and memory.peak_bytes:
            has = device_bytes(device)
            rating = fits(memory.peak_bytes, has, MEMORY_ERROR["shape" if profile.analytic else "profile"])
            said = {"yes": "fits", "tight": "is tight", "no": "does not fit"}[rating]
            rows.append(("on one GPU", f"{said}: {device.name} has {format_bytes(has)} for tensors"))
    if profile.blocks:
        saved = format_bytes(sum(block.saved_bytes for block in profile.blocks))
        text = f"{len(profile.blocks)}, {saved} saved inside them"
        if (link := profile.host_link) is not None:
            out, back = (format_bytes(round(rate)) for rate in (link.to_host_bytes_per_s, link.to_device_bytes_per_s))
            text += f"; host link {out}/s out, {back}/s in"
        rows.append(("blocks", text))
    rows += [("note", note if len(note) <= 300 else note[:299] + "…") for note in profile.notes]
    width = max(len(label) for label, _ in rows) + 2
    title = f"{profile.name}: {profile.model}, batch {profile.batch_size}, {profile.precision}, {profile.device}"
    hanging = " " * (width + 2)
    return "\n".join(
        [title, *(fill(f"  {label:<{width}}{text}", SCREEN, subsequent_indent=hanging) for label, text in rows)]
    )


def _speed(profile: Profile) -> str:
    rate = profile.batch_size * profile.accumulation / profile.single_s if profile.single_s else 0.0
    return f"{format_seconds(profile.single_s)}, {format_number(rate)} samples/s"
