"""`backbeat plan`: the gradient schedule and what is kept of activations, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
import typer
from msgspec.structs import replace
from rich.table import Table

from backbeat.cli import options
from backbeat.cli.arguments import load_network, one_count, size
from backbeat.cli.output import console, print_answer, print_json, say
from backbeat.errors import InputError
from backbeat.model import MemoryPlan, Network, Plan, Prediction, Profile, Sharding
from backbeat.model.blocks import segments_of
from backbeat.model.resident import ResidentMemory
from backbeat.planners import STRATEGIES
from backbeat.planners.memory_moves import uniform
from backbeat.planners.planned import planned as make_plan
from backbeat.planners.planned import predicted as predict
from backbeat.planners.planned import resolved as resolve
from backbeat.show.study_row import Question, device_fit, fitting_batch
from backbeat.show.tables import plan_tables as tables
from backbeat.show.words.answer import above_linear, caveats, memory_line
from backbeat.show.words.commands import sharding_lines, wrapping_lines
from backbeat.show.words.decision import decide_on_plan
from backbeat.show.words.numbers import capitalised, describe, over_bound, scaling_range
from backbeat.steps.memory_timeline import BlockChain, memory_timeline
from backbeat.steps.sharded_memory import sharded_memory
from backbeat.units import counted, first_few, format_bytes, format_seconds, parse_duration


def plan(
    profile: options.Profile,
    network: options.Network,
    workers: options.OneCount = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            "-s",
            help=f"One of {', '.join(STRATEGIES)}. Default: best; with --density compressed.",
            autocompletion=options.strategy_names,
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan here.")] = None,
    accumulation: options.Accumulation = None,
    communicators: options.Communicators = None,
    bucket: options.Bucket = None,
    budget: Annotated[str | None, typer.Option(help="Stop improving after this long, like 2s (best only).")] = None,
    memory: options.Memory = None,
    reserve: Annotated[
        str | None,
        typer.Option(
            help="Of --memory, left to what a profile cannot know, like 5% or 500MB. Default: 1%, at most 64 MiB."
        ),
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(help="Send this share of the elements where it pays (strategy compressed), like 0.01."),
    ] = None,
    residuals: Annotated[
        str | None,
        typer.Option(help="Where residuals of compressed buckets live: device or host. Default: device if it fits."),
    ] = None,
    reduce_dtype: options.ReduceDtype = None,
    torch: options.Torch = None,
    across: options.Across = None,
    nics_per_node: options.NicsPerNode = 1,
    json: options.Json = False,
) -> None:
    """Choose which gradients travel together, in which order and on which communicator, and what memory is spent on."""
    memory_bytes = size("--memory", memory) if memory is not None else None
    if reserve is not None and memory_bytes is None:
        raise InputError("--reserve goes with --memory: add it, or leave this out")
    left = _reserve(reserve) if reserve is not None else None
    if strategy is not None and "," in strategy:
        raise InputError(f"--strategy {strategy} names several: a plan has one; `backbeat predict` compares several")
    chosen = strategy or ("best" if density is None else "compressed")
    if residuals not in (None, "device", "host"):
        raise InputError(f"--residuals is {residuals!r}: it must be device or host")
    one, cluster = Profile.load(profile), load_network(network, across, nics_per_node)
    if workers is not None:
        cluster = cluster.at(workers=one_count(workers))
    made = make_plan(
        one,
        cluster,
        chosen,
        accumulation=accumulation,
        communicators=communicators,
        reduce_dtype=reduce_dtype,
        bucket_bytes=size("--bucket", bucket, "MB") if bucket is not None else None,
        budget_s=parse_duration(budget) if budget is not None else None,
        density=density,
        memory_bytes=memory_bytes,
        reserve=left,
        residuals=cast('Literal["device", "host"] | None', residuals),
        torch_version=torch,
    )
    _show(one, cluster, made, output, json, reduce_dtype, accumulation)


def _reserve(text: str) -> float:
    """A share of the budget, below 1, or bytes."""
    if not text.strip().endswith("%"):
        return size("--reserve", text, "MB", least=0)
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise InputError(f"--reserve is {text!r}: it must be from 0% to below 100%, or a size like 500MB")
    return share


def _show(
    one: Profile,
    cluster: Network,
    made: Plan,
    output: Path | None,
    json: bool,
    reduce_dtype: str | None,
    accumulation: int | None,
) -> None:
    if output is not None:
        made.save(output)
        say(f"wrote {output}")
    if json:
        print_json({"schema": made.schema, **msgspec.to_builtins(made)})
        return
    # A sharded step holds its gradients as profiled: their dtype on the way is the plan's.
    sent, _ = resolve(one, cluster, made, reduce_dtype=reduce_dtype)
    result = predict(one, cluster, made, reduce_dtype=reduce_dtype, accumulation=accumulation)
    stock = predict(one, cluster, "ddp", reduce_dtype=reduce_dtype, accumulation=accumulation)
    if result.workers == 1:
        shown: list[Table | str] = ["One worker sends nothing: the plan's buckets never leave."]
    elif made.sharding is not None:
        shown = _sharding(one, made, made.sharding, accumulation)
    else:
        shown = [tables.plan_table(made, result, console().width)]
    if made.memory is not None and one.blocks and made.sharding is None:
        shown += _memory(sent, cluster, made, made.memory, result, accumulation)
    edges = scaling_range(result)
    fit = device_fit(sent, result.memory)
    largest = fitting_batch(
        fit,
        Question(given=one, network=cluster, accumulation=accumulation, reduce_dtype=reduce_dtype),
        made,
        cluster.workers,
    )
    file = str(output or "plan.json")
    lines = wrapping_lines(file, reduce_dtype) if made.sharding is None else sharding_lines(file, one.optimizer)
    print_answer(
        describe(one, cluster, reduce_dtype=reduce_dtype, accumulation=accumulation),
        "",
        *shown,
        f"{made.strategy} at {counted(result.workers, 'worker')}: "
        f"{format_seconds(result.iteration_s)} per iteration, scaling "
        f"{result.scaling_factor:.1%}{f' ({edges} from a busy to a quiet cluster)' if edges else ''}, "
        f"{format_seconds(result.exposed_s)} exposed, {over_bound(result):+.1%} over the "
        f"bound; stock DDP {'' if made.memory is None else 'with everything kept '}"
        f"{format_seconds(stock.iteration_s)}"
        + (f" ({stock.iteration_s / result.iteration_s:.2f}x)." if result.iteration_s > 0 else "."),
        above_linear([result]) or None,
        memory_line(fit, largest),
        *dict.fromkeys(
            [
                *(f"* {note}" for note in made.notes),
                *caveats(result, cluster, one, shown_by=f"`backbeat predict --wide --strategy {made.strategy}`"),
            ]
        ),
        "",
        decide_on_plan(made, result, stock, fit, lines, written=output is not None),
    )


def _sharding(one: Profile, made: Plan, sharding: Sharding, accumulation: int | None) -> list[Table | str]:
    """Units, what they take of the device's memory, and how they travel."""
    held = sharded_memory(one, made, micro_batches=accumulation or one.accumulation)
    again = [segment.blocks[0] for segment in made.memory.segments] if made.memory else []
    settings = [
        f"parameters travel in {sharding.param_dtype}, gradients in {sharding.reduce_dtype}",
        *([f"recomputed: {first_few(again)}"] if again else []),
        *([f"{sharding.reduce_scatter_buffers} reduce-scatter inputs"] if sharding.reduce_scatter_buffers > 1 else []),
        *(["reduce-scatters on their own communicator"] if sharding.separate_reduce_scatter else []),
        *(["gradients are reduced with the last micro-batch"] if sharding.gradient_sync == "last" else []),
    ]
    shown: list[Table | str] = [tables.units_table(one, made)]
    if held is not None:
        shown.append(tables.memory_table(held))
    shown += ["", f"{capitalised('; '.join(settings))}."]
    if held is not None and made.memory is not None and made.memory.budget_bytes is not None:
        shown.append(f"Budget: {format_bytes(held.peak_bytes)} of {format_bytes(made.memory.budget_bytes)}.")
    if held is not None and one.autocast in ("bf16", "fp16"):
        shown.append(
            f"Activations are those under autocast in {one.precision}, as profiled: train under it too. Without it "
            "they take less, and so does the peak."
        )
    return shown


def _memory(
    one: Profile, cluster: Network, made: Plan, memory: MemoryPlan, result: Prediction, accumulation: int | None
) -> list[Table | str]:
    """What is done with which blocks, and what treating all alike would give."""
    budget, residuals = memory.budget_bytes, memory.residuals
    shown: list[Table | str] = ["", "Everything is kept: it fits."]
    if memory.segments:
        shown = ["", tables.segments_table(one, memory, console().width), ""]
    if budget is not None:
        policies = {"this plan": result}
        chain = BlockChain(one, ResidentMemory.of(one, made, residuals, cluster.workers))
        for name, ranges in uniform(chain).items():
            alike = replace(made, memory=MemoryPlan(segments=segments_of(one, ranges), residuals=residuals))
            policies[f"{name}, every block"] = predict(one, cluster, alike, accumulation=accumulation)
        shown.append(tables.policies_table(policies, budget))
    return [*shown, "", tables.peak_line(memory_timeline(one, memory, made, workers=cluster.workers), budget)]
