"""`backbeat predict`: how a job scales. One screen that ends in a decision, every figure, or data. Where parameters are
sharded the screen says what fits, how fast it is, and the lines to write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from backbeat.cli import options
from backbeat.cli.arguments import load_network, plan_options, size, split
from backbeat.cli.output import console, print_answer, print_json, say
from backbeat.errors import InputError
from backbeat.model import Plan, Profile
from backbeat.model.framework import framework_named
from backbeat.model.prediction import knee
from backbeat.planners import BUCKETED, BUDGETED, whole_groups
from backbeat.show.figures import plot as plots
from backbeat.show.figures.scaling_curve import Scaling
from backbeat.show.study import COMPARED, PLANNED, STOCK, Study, compare, instead_of_ddp
from backbeat.show.study_row import Compared, Question, StudyRow
from backbeat.show.tables import scaling_tables as tables
from backbeat.show.tables.terminal_table import natural_width
from backbeat.show.words import numbers
from backbeat.show.words.answer import above_linear, caveats, knee_sentence, limit_of, memory_line, unmeasured
from backbeat.show.words.commands import Settings
from backbeat.show.words.decision import decide, sharding_sentences, stock_name
from backbeat.show.words.notes import note_text
from backbeat.units import SCREEN, counted, format_bytes, parse_price, parse_workers

_SAMPLES = 1_000_000
_WORTH_A_LINE = 0.01
"""Of the bound: what an iteration takes above it."""


def predict(
    profile: options.Profile,
    network: options.Network,
    workers: Annotated[
        str | None,
        typer.Option("--workers", "-n", help="64, 4..2048 (doubling) or 8,16,48. Default: the network's own."),
    ] = None,
    strategy: options.Strategies = None,
    framework: options.Frameworks = None,
    overlap: options.Overlap = None,
    zero: Annotated[
        int | None, typer.Option(help="ZeRO stage of --framework. Default: what it shards by itself.", min=0, max=3)
    ] = None,
    plan: options.PlanFiles = None,
    accumulation: options.Accumulation = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Strong scaling: this many samples per iteration over all workers.")
    ] = None,
    communicators: options.Communicators = None,
    bucket: options.Bucket = None,
    reduce_dtype: options.ReduceDtype = None,
    memory: Annotated[
        str | None, typer.Option(help="Device memory that sharding may take, like 40GB. Default: all of the device's.")
    ] = None,
    torch: options.Torch = None,
    price: options.Price = None,
    epoch_samples: options.EpochSamples = None,
    samples: Annotated[int, typer.Option(help="GPU-hours are given for this many samples.", min=1)] = _SAMPLES,
    across: options.Across = None,
    nics_per_node: options.NicsPerNode = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve: scaling.png, .svg, .pdf or .html.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Every strategy in a row, with every figure.")] = False,
    json: options.Json = False,
) -> None:
    """Predict how the job scales, what limits it and what it costs, and say what to do."""
    one, cluster = Profile.load(profile), load_network(network, across, nics_per_node)
    counts = parse_workers(workers) if workers is not None else [cluster.workers]
    files = split(plan)
    every = wide or json
    memory_bytes = size("--memory", memory) if memory is not None else None
    bucket_bytes = size("--bucket", bucket, "MB") if bucket is not None else None
    named = list(dict.fromkeys(split(strategy)))
    frameworks = {name: framework_named(name, overlap=overlap, zero=zero) for name in split(framework)}
    if not frameworks and (overlap is not None or zero is not None):
        raise InputError("--overlap and --zero say how a framework runs: name it with --framework, or leave them out")
    if bucket is not None and named and BUCKETED.isdisjoint(named):
        raise InputError(f"--bucket is for ddp and horovod, not {', '.join(named)}: name one of them, or leave it out")
    offered: list[str] = []
    if not named and not files and not frameworks and global_batch is None:
        offered = instead_of_ddp(one, cluster, counts, budget_bytes=memory_bytes)
    names = _compared(named, offered, every=every, plans=bool(files), frameworks=bool(frameworks))
    plans = _named_apart([Plan.load(path) for path in files], files, names)
    settings = Settings(
        samples=samples,
        price=parse_price(price) if price is not None else None,
        epoch_samples=epoch_samples,
        profile_argument=profile,
        network_argument=network,
        plan_options=(
            *plan_options(across, nics_per_node, reduce_dtype),
            *(("--accumulation", str(accumulation)) if accumulation else ()),
        ),
        budget_options=(*(("--memory", memory) if memory else ()), *(("--torch", torch) if torch else ())),
        plan_files={made.strategy: file for made, file in zip(plans, files, strict=True)},
    )
    if plot is not None:
        plots.check(plot)

    left_out = [
        (name, count)
        for count in counts
        for name in names
        if count != max(counts) and not whole_groups(name, cluster, count)
    ]
    for name, count in left_out:
        say(f"note: {name} is left out at {counted(count, 'worker')}: not whole groups of its shards")
    question = Question(
        given=one,
        network=cluster,
        baseline=next(iter(frameworks), STOCK),
        memory_budget=memory_bytes,
        reduce_dtype=reduce_dtype,
        accumulation=accumulation,
        global_batch=global_batch,
    )
    schedules: dict[str, Compared] = {**frameworks}
    for name in names:
        buckets = {"bucket_bytes": bucket_bytes} if name in BUCKETED else {}
        budget = {"memory_bytes": memory_bytes, "torch_version": torch} if name in BUDGETED else {}
        schedules[name] = {"strategy": name, "communicators": communicators, **buckets, **budget}
    schedules |= {made.strategy: made for made in plans}
    found = compare(
        question, counts, schedules, unasked=set(offered), left_out=set(left_out), files=settings.plan_files
    )
    if plot is not None:
        curves = {label: sorted(curve, key=lambda point: point.workers) for label, curve in found.curves.items()}
        plots.save_scaling(Scaling(curves), plot, title=f"{one.name} on {cluster.name}")
        say(f"wrote {plot}")
    if json:
        print_json(content(found, settings))
        return
    sent = None if frameworks else reduce_dtype
    title = numbers.describe(one, cluster, accumulation=accumulation, reduce_dtype=sent, global_batch=global_batch)
    if bucket_bytes is not None:
        title += f"; DDP with buckets of {format_bytes(bucket_bytes)}"
    if frameworks and reduce_dtype is not None:
        title += f"; plans send {reduce_dtype}, a framework its own dtype"
    if found.sharded and not wide and not frameworks:
        _show_sharded(found, settings, title)
    else:
        _show(found, settings, title, wide=wide)


def _compared(named: list[str], offered: list[str], *, every: bool, plans: bool, frameworks: bool) -> list[str]:
    """The strategies to compare: those that were named, or what an answer needs."""
    names = named or ([] if plans else list(COMPARED) if every else [PLANNED])
    if offered:
        # With a job that DDP cannot hold, sharding is compared in place of buckets.
        names = [*names, *offered] if every else offered
    return names if every or frameworks or STOCK in names else [STOCK, *names]


def _named_apart(plans: list[Plan], files: list[str], names: list[str]) -> list[Plan]:
    """Plans of the same strategy as another row carry their file's name, or nobody could tell them apart."""
    strategies = [*names, *(plan.strategy for plan in plans)]
    return [
        replace(plan, strategy=f"{plan.strategy} ({file})") if strategies.count(plan.strategy) > 1 else plan
        for plan, file in zip(plans, files, strict=True)
    ]


def content(found: Study, settings: Settings) -> dict[str, Any]:
    """The answer as data."""
    profile, samples = found.given, settings.samples or _SAMPLES
    data = []
    for row in found.rows:
        one, fit = row.prediction, row.fit
        share = numbers.utilisation(one, profile)
        fields: dict[str, Any] = msgspec.to_builtins(one)
        for left_out in ("timeline", "gap_parts", "plan"):
            del fields[left_out]
        fields |= {
            "notes": [{"kind": note.kind, **note.values, "text": note_text(note)} for note in one.notes],
            "gap": one.gap,
            "gpu_hours": numbers.gpu_hours(one, samples),
            "tokens_per_s": numbers.tokens_per_s(one, profile),
            "mfu": share if isinstance(share, float) else None,
            "largest_batch": row.largest_batch,
            "memory": None
            if one.memory is None
            else {
                "peak_bytes": one.memory.peak_bytes,
                "by_kind": dict(one.memory.by_kind),
                "device_bytes": None if fit is None else fit.device_bytes,
                "fits": None if fit is None else fit.fits,
            },
        }
        if settings.price is not None:
            fields["cost"] = numbers.costs(one, profile, settings.price, settings.epoch_samples)
        data.append(fields)
    return {
        "profile": profile.name,
        "network": found.network.name,
        "scaling": "weak" if found.global_batch is None else "strong",
        "samples": samples,
        "rows": data,
        "headline": decide(found, settings, sharding=found.sharded).headline,
        "not_measured": unmeasured(profile, found.network),
        "knee": {name: knee(curve) for name, curve in found.curves.items()},
    }


def _show(found: Study, settings: Settings, title: str, *, wide: bool) -> None:
    """The answer in 80 columns, which ends in a decision. With `wide`, or where strategies beside each other take more
    columns, each has a row of its own with every figure."""
    decided, best, curves = decide(found, settings, sharding=False), found.best, found.curves
    row = next(row for row in found.rows_at(found.top) if row.label == found.best_label)
    shown = [tables.answer_table(found, settings.price)] if not wide else []
    if wide or natural_width(shown[0]) > SCREEN:
        wide = True
        rows = [row.prediction for row in found.rows]
        shown = tables.scaling_tables(rows, samples=settings.samples or _SAMPLES, width=console().width)
    large = {name: "the plan" if name == PLANNED else stock_name(name) for name in sorted(found.too_big)}
    sizes = {name: known.peak_bytes for name, known in found.fits.items() if known is not None}
    print_answer(
        title,
        "",
        decided.headline,
        "",
        *(part for table in shown for part in (table, "")),
        numbers.figures_line(best, found.given, settings, f" with {best.strategy}" if wide and len(curves) > 1 else ""),
        f"Limit: {limit_of(found, best)}" if best.workers > 1 else None,
        _gap(row),
        knee_sentence(curves[found.best_label]) if wide else None,
        memory_line(row.fit, row.largest_batch) if row.fits else None,
        *(f"Too big: {words}, {format_bytes(sizes[name])}." for name, words in large.items()),
        *_peaks(found, settings),
        *caveats(best, found.network, found.given, every=wide),
        *_plan_notes(found, settings),
        "",
        decided.text,
    )


def _show_sharded(found: Study, settings: Settings, title: str) -> None:
    """The answer in 80 columns, which ends in a decision and the lines to write."""
    decided = decide(found, settings, sharding=True)
    why: list[str] = []
    if decided.row is not None:
        taken = decided.row.prediction
        why = [
            numbers.figures_line(taken, found.given, settings, f" with {taken.strategy}"),
            f"Limit: {limit_of(found, taken)}",
            *sharding_sentences(found.rows_at(found.top)),
            *caveats(taken, found.network, found.given),
        ]
        why.append("")
    print_answer(
        title,
        "",
        decided.headline,
        "",
        tables.strategies_table(found, settings.price),
        "",
        above_linear(row.prediction for row in found.rows) or None,
        *why,
        decided.text,
    )


def _plan_notes(found: Study, settings: Settings) -> list[str]:
    """What is to be said of the plans asked about beside what is said of the best."""
    noted = found.best.notes
    return [
        f"* {label}: {note_text(note)}"
        for label in settings.plan_files
        for note in found.at_top[label].notes
        if note not in noted and found.at_top[label] is not found.best
    ]


def _gap(row: StudyRow) -> str | None:
    """What it takes above its bound, where that is worth a line."""
    if row.prediction.gap < _WORTH_A_LINE or (parts := row.find_gap()) is None:
        return None
    return f"Bound: {numbers.gap_line(row.prediction, parts)}."


def _peaks(found: Study, settings: Settings) -> list[str]:
    """Device memory of the plans that say what is kept of activations."""
    lines = []
    for label in settings.plan_files:
        memory = found.plans[label].memory
        peak = max((row.peak_bytes or 0 for row in found.curves[label]), default=0)
        if memory is not None and peak:
            line = f"{label}: predicted peak {format_bytes(peak)} of device memory"
            if (budget := memory.budget_bytes) is not None:
                line += f", of a budget of {format_bytes(budget)}" + (": too much" if peak > budget else "")
            lines.append(f"{line}.")
    return lines
