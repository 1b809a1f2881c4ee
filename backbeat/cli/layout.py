"""`backbeat layout`: which layout a language model takes on a cluster, how fast it is, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from backbeat.cli import options
from backbeat.cli.arguments import load_network
from backbeat.cli.output import check_page, print_answer, print_json, write_page
from backbeat.errors import InputError
from backbeat.importers.config_json import read_architecture
from backbeat.model import Network
from backbeat.model.architecture import Architecture
from backbeat.model.framework import LAYOUT_FRAMEWORKS, Framework, framework_named
from backbeat.model.layout import Job, job_of
from backbeat.show.pages.layout_page import layout_content, layout_report
from backbeat.show.tables import layout_tables as tables
from backbeat.show.words import layout_answer as words
from backbeat.show.words.layout_answer import search
from backbeat.show.words.megatron_flags import flag_lines, megatron_flags, why_no_flags
from backbeat.show.words.notes import worded
from backbeat.steps.predict_layout import predict_layout
from backbeat.units import counted, format_seconds, parse_workers


def layout(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hugging Face config.json, or a bundled name like llama-3-70b.")
    ],
    cluster: options.Network,
    gpus: Annotated[str | None, typer.Option(help="64; or 64,128 or 64..512 to compare the best of each.")] = None,
    global_batch: Annotated[int, typer.Option(help="Sequences of one step, over all GPUs.", min=1)] = 512,
    sequence: Annotated[int, typer.Option(help="Tokens of one sequence.", min=1)] = 4096,
    layout_text: Annotated[
        str | None,
        typer.Option(
            "--layout", metavar="FIELDS", help="One in full: dp=8+tp=4+pp=2+micro=1+recompute=selective+schedule=1f1b."
        ),
    ] = None,
    accelerator: Annotated[str | None, typer.Option(help="The GPUs, like h100. Default: the network's own.")] = None,
    precision: Annotated[str, typer.Option(help="Of the matrix products: bf16, fp16 or fp8.")] = "bf16",
    framework: Annotated[str, typer.Option(help=f"Whose habits: {', '.join(LAYOUT_FRAMEWORKS)}.")] = "megatron",
    overlap: options.Overlap = None,
    dispatcher: Annotated[str | None, typer.Option(help="Of tokens to experts: alltoall or deepep.")] = None,
    zero: Annotated[str, typer.Option(help="ZeRO stages to try, comma-separated.")] = "1",
    imbalance: Annotated[
        float, typer.Option(help="Tokens of the busiest expert rank over the average.", min=1.0)
    ] = 1.0,
    compute_factor: Annotated[
        float, typer.Option(help="Measured over predicted computation, from a run of any one layout.")
    ] = 1.0,
    straggler: Annotated[
        list[str] | None,
        typer.Option(help="A slow GPU or node: rank=13,slowdown=1.3 or node=3,slowdown=1.3. May be repeated."),
    ] = None,
    contention: Annotated[bool, typer.Option(help="Computation takes longer beside communication.")] = False,
    family: Annotated[str, typer.Option(help="With --layout: events, or closed-form.")] = "events",
    most: Annotated[int, typer.Option(help="Layouts to show.", min=1)] = 10,
    across: options.Across = None,
    nics_per_node: options.NicsPerNode = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a page instead, like layout.html.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Rank the layouts of a language model on a cluster, or show one in full."""
    if output is not None:
        check_page(output)
    network, shape = load_network(cluster, across, nics_per_node), read_architecture(model)
    habits = framework_named(framework, layouts=True, overlap=overlap, dispatcher=dispatcher)
    job: dict[str, Any] = {
        "global_batch": global_batch,
        "sequence": sequence,
        "precision": precision,
        "framework": framework,
        "overlap": overlap,
        "dispatcher": dispatcher,
        "accelerator": accelerator,
        "imbalance": imbalance,
        "compute_factor": compute_factor,
        "stragglers": slow_ranks(straggler or [], network.topology.gpus_per_node),
        "contention": contention,
    }
    counts = parse_workers(gpus, "GPUs") if gpus is not None else []
    if layout_text is not None:
        if len(counts) > 1:
            raise InputError(f"--gpus {gpus} with --layout: one layout has one number of GPUs; leave --gpus out")
        count = counts[0] if counts else None
        found = predict_layout(shape, network, layout_text, gpus=count, family=family, **job)  # type: ignore[arg-type]
        if json:
            print_json(_data(found))
            return
        if output is None:
            drawn = predict_layout(shape, network, found.layout, **{**job, "global_batch": tables.drawn_batch(found)})
            _show(shape, found, drawn, habits)
        else:
            _write(output, shape, network, {found.gpus: [found]}, job)
        return
    if gpus is None:
        raise InputError("--gpus is missing: say how many, like --gpus 64, or give one --layout")
    stages = _stages(zero)
    ranked = [search(shape, network, gpus=count, zero=stages, most=most, **job) for count in counts]
    if json:
        answers = [[_data(one) for one in rows] for rows in ranked]
        print_json(answers if len(counts) > 1 else answers[0])
        return
    if output is not None:
        _write(output, shape, network, dict(zip(counts, ranked, strict=True)), job, stages)
        return
    several = len(counts) > 1
    shown = [rows[0] for rows in ranked if rows] if several else ranked[0]
    if shown:
        title = f"{shown[0].model} on {shown[0].cluster}: {global_batch} x {sequence} tokens, {precision}, {framework}"
        print_answer(tables.ranked_table(shown, title=title, counts=several))
    missing = [count for count, rows in zip(counts, ranked, strict=True) if not rows]
    print_answer(*(words.nothing_fits(shape, network, count, job, stages)[1] for count in missing))
    if shown:
        # Of several numbers of GPUs the one that takes least GPU time a step.
        best = min(shown, key=lambda one: one.step_s * one.gpus) if several else shown[0]
        print_answer(
            words.layout_answer(best),
            *(words.compared(best, shown) if several else ()),
            _flags(shape, best, habits),
        )


def slow_ranks(texts: list[str], per_node: int) -> dict[int, float]:
    """
    >>> slow_ranks(["rank=5,slowdown=1.2", "slowdown=2,node=1"], 2)
    {5: 1.2, 2: 2.0, 3: 2.0}
    """
    found: dict[int, float] = {}
    for text in texts:
        parts = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
        slowdown = parts.pop("slowdown", "")
        (index, number), *others = parts.items() or [("", "")]
        plain = slowdown.replace(".", "", 1)
        if index not in ("rank", "node") or others or not (number.isdecimal() and plain.isdecimal()):
            raise InputError(f"--straggler {text}: write it like rank=13,slowdown=1.3 or node=3,slowdown=1.3")
        first, count = (int(number), 1) if index == "rank" else (int(number) * per_node, per_node)
        found |= dict.fromkeys(range(first, first + count), float(slowdown))
    return found


def _stages(zero: str) -> tuple[int, ...]:
    if not zero or any(part.strip() not in ("0", "1", "2", "3") for part in zero.split(",")):
        raise InputError(f"--zero {zero}: ZeRO stages are 0, 1, 2 and 3, like --zero 1,3")
    return tuple(int(part) for part in zero.split(","))


def _write(
    output: Path,
    model: Architecture,
    network: Network,
    ranked: Mapping[int, Sequence[Any]],
    job: dict[str, Any],
    zero: tuple[int, ...] = (1,),
) -> None:
    content = {count: layout_content(model, network, count, found, job, zero) for count, found in ranked.items()}
    page = layout_report(content, f"{model.name} on {network.name}")
    write_page(output, page, "fewer numbers of GPUs or a smaller --most")


def _data(found: Any) -> dict[str, Any]:
    """The answer as JSON holds it, with its layout whole."""
    derived = ("way", "gpus", "step_s", "jitter_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu")
    whole = {"layout": msgspec.structs.asdict(found.layout), **{name: getattr(found, name) for name in derived}}
    return {**msgspec.to_builtins(found), **whole}


def _job(found: Any) -> Job:
    return job_of(found.global_batch, found.sequence, found.precision)


def _flags(model: Architecture, found: Any, framework: Framework) -> str | None:
    flags = megatron_flags(model, found.layout, _job(found), framework)
    if not flags:
        return why_no_flags(found.layout, framework)
    return f"Flags of Megatron-LM for {counted(found.gpus, 'GPU')}:\n{flag_lines(flags)}"


def _show(model: Architecture, found: Any, drawn: Any, framework: Framework) -> None:
    count = drawn.global_batch // (drawn.layout.dp * drawn.layout.micro_batch)
    spread = None
    if found.jitter_s is not None:
        low, high = (format_seconds(edge) for edge in found.jitter_s)
        spread = f"Single steps vary from {low} to {high} (10th to 90th percentile)."
    print_answer(
        tables.breakdown_table(found),
        tables.layout_memory_table(found),
        f"The stages in a step of {count} micro-batches:" if drawn.global_batch != found.global_batch else None,
        *tables.stage_lines(drawn.timeline),
        *(f"* {note}" for note in worded(found.notes)),
        spread,
    )
    if found.fits != "no":
        print_answer(words.layout_answer(found), _flags(model, found, framework))
    else:
        print_answer("It does not fit: recompute more, shard more (zero), or add stages.")
