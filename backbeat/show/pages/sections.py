"""The figures of a report in their order, each with what it shows, how to read it, and its numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backbeat.show.figures import compared
from backbeat.show.figures.canvas import Drawing
from backbeat.show.figures.given import cost_curve, draw_cost_curve, draw_gradient_sizes, largest_gradients
from backbeat.show.figures.scaling_curve import Scaling, draw_scaling
from backbeat.show.figures.timeline import Timeline
from backbeat.show.study import STOCK, Study
from backbeat.show.words.answer import knee_sentence
from backbeat.show.words.decision import sharding_headline, sharding_sentences
from backbeat.show.words.numbers import format_number, gpu_hours, over_bound, scaling_range
from backbeat.steps.sharded_memory import memory_levels
from backbeat.units import format_bytes, format_seconds

_MOST_ROWS = 1000

Cell = str | tuple[str, float]
"""A text, or a number as it is shown with the number itself."""


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One figure. `anchor` is its permalink, `summary` what a screen reader says instead of the drawing."""

    anchor: str
    title: str
    summary: str
    how: str
    views: Sequence[tuple[str, Drawing]] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    chooser: bool = False
    """The page itself composes the drawing, from timelines that are chosen."""


def sections(study: Study, *, samples: int) -> list[Section]:
    possible = [
        scaling_section(study, samples),
        sharding_section(study),
        step_memory_section(study),
        timeline_section(study),
        exposed_section(study),
        measured_section(study),
        gradients_section(study),
        cost_section(study),
        memory_section(study),
    ]
    return [section for section in possible if section is not None]


def scaling_section(study: Study, samples: int) -> Section:
    data = Scaling(study.curves)
    curve = study.curves[study.best_label]
    knee = knee_sentence(study.frontier)
    rows = [
        (
            _number(point.workers),
            label,
            (f"{point.scaling_factor:.1%}", point.scaling_factor),
            *([(scaling_range(point, 1), point.on_busy.scaling_factor)] if data.load_band else []),
            (format_number(point.samples_per_s), point.samples_per_s),
            (f"{gpu_hours(point, samples):,.2f}", gpu_hours(point, samples)),
            _seconds(point.iteration_s),
            _seconds(point.exposed_s),
            (f"{over_bound(point):.1%}", over_bound(point)),
            point.bottleneck,
        )
        for label, points in study.curves.items()
        for point in points
    ]
    headings = ["GPUs", "strategy", "scaling", *(["busy–quiet"] if data.load_band else []), "samples/s"]
    headings += [f"GPU-hours / {samples:,}", "iteration", "exposed"]
    return Section(
        anchor="scaling",
        title="How it scales",
        summary=f"With {study.best_label}, scaling goes from {curve[0].scaling_factor:.0%} on {curve[0].workers} GPUs "
        f"to {curve[-1].scaling_factor:.0%} on {curve[-1].workers}"
        f"{f' ({edges} from a busy to a quiet cluster)' if (edges := scaling_range(curve[-1])) else ''}. {knee}",
        how="100 % means that N GPUs do the work of N. Each line is one way to send gradients, or to shard; grey is "
        "stock PyTorch DDP. Where a line falls, GPUs wait for communication instead of computing. The shaded band is "
        + ("a busy to a quiet cluster" if data.load_band else "how much single iterations differ")
        + ". The diamond marks the knee: beyond it, an added GPU brings less than half "
        "of what it could do alone.",
        views=[("share of perfect", draw_scaling(data)), ("samples a second", draw_scaling(data, view="throughput"))],
        tables=[Table("scaling", [*headings, "over bound", "limited by"], rows)],
        note=knee,
    )


def timeline_section(study: Study) -> Section | None:
    best, stock = study.timeline(study.best_label), study.timeline(STOCK)
    if not best.bars:
        return None
    shown = [best] if study.best_label == STOCK else [best, stock]
    merged = sum(one.merged for one in shown)
    return Section(
        anchor="timeline",
        title=f"One iteration on {study.top} GPUs",
        summary=f"With {study.best_label} the iteration ends after {format_seconds(best.end_s)}, with {STOCK} after "
        f"{format_seconds(stock.end_s)}.",
        how="Time runs to the right. The compute lane shows one GPU: forward, backward, update. A bar in a "
        "communicator lane is one message: a bucket of gradients, darker where it is larger. Messages below the "
        "backward bar cost nothing; what sticks out to the right of it is time that every GPU waits. Of a sharded step "
        "(fsdp, hsdp, zero2) each collective has its lane, and a bar is one unit: its parameters are gathered before "
        "it computes, its gradients are scattered after its backward, and gaps in the compute lane are what the GPU "
        "waits. Compare two "
        "strategies: the shorter picture wins. Point at a bar to see what it carries. Waiting for "
        "the slowest worker is not drawn.",
        tables=[_buckets_table(one) for one in shown],
        note=f"{merged} buckets are drawn together with their neighbours, since there are too many to draw one by one. "
        "The whole timeline is in the trace."
        if merged
        else "",
        chooser=True,
    )


def _buckets_table(timeline: Timeline) -> Table:
    rows = [
        (
            _number(index),
            bar.lane,
            bar.name,
            _number(bar.gradients) if bar.gradients else ("", 0.0),
            _bytes(bar.bytes),
            _seconds(bar.start_s),
            _seconds(bar.end_s),
            _seconds(bar.duration_s),
        )
        for index, bar in enumerate(sorted(timeline.transfers, key=lambda bar: bar.start_s))
    ]
    headings = ["bucket", "lane", "gradients", "count", "bytes", "starts", "ends", "takes"]
    return Table(f"buckets of {timeline.label}", headings, rows)


def sharding_section(study: Study) -> Section | None:
    if not study.shardings:
        return None
    rows = [
        (
            row.label,
            row.name,
            "unknown" if row.fit is None else row.fit.rating,
            *([_bytes(row.fit.peak_bytes)] if row.fit is not None else [("", 0.0)]),
            _seconds(row.prediction.iteration_s),
            (f"{row.prediction.scaling_factor:.1%}", row.prediction.scaling_factor),
            (format_number(row.prediction.samples_per_s), row.prediction.samples_per_s),
            _seconds(row.prediction.exposed_s),
            row.prediction.bottleneck,
        )
        for row in study.shardings
    ]
    headings = ["strategy", "known as", "fits", "peak", "iteration", "scaling", "samples/s", "exposed", "limited by"]
    words = " ".join([sharding_headline(study.shardings), *sharding_sentences(study.shardings)])
    return Section(
        anchor="sharding",
        title="DDP, FSDP or HSDP?",
        summary=words,
        how="DDP keeps the whole model on every GPU and sends gradients. FSDP gives every GPU a part (a shard) of "
        "parameters, gradients and optimizer state, and gathers each unit's parameters when it computes; HSDP does so "
        "within a node and keeps a copy of the model in each; ZeRO-2 gathers once a step and keeps parameters until "
        "backward. `sharded` is what the planner chooses of all that. The upper bars are the time of one iteration, "
        "the lower ones the highest memory of one GPU, with the device's limit as a line. Of those that fit take the "
        "fastest; where two are within 1 %, the simpler.",
        views=[("", compared.draw_shardings(study.shardings))],
        tables=[Table("shardings", headings, rows)],
        note=words,
    )


def step_memory_section(study: Study) -> Section | None:
    found = step_memories(study)
    if not found:
        return None
    summary = " ".join(
        f"With {one.label} the peak is {format_bytes(one.peak.total_bytes)}"
        + ("" if one.limit_bytes is None else f" of {format_bytes(one.limit_bytes)}")
        + "."
        for one in found
    )
    return Section(
        anchor="step-memory",
        title="Memory over the step",
        summary=summary,
        how="What one GPU holds from the start of a sharded step to its end, piled up by kind. Shards are there all "
        "the time. Activations pile up in forward and go in backward. Gathered parameters, whole gradients and buffers "
        "come and go unit by unit; without resharding (ZeRO-2) gathered parameters stay until their backward. The "
        "dashed line is what the device has, or the budget.",
        views=[(one.label, compared.draw_step_memory(one)) for one in found],
        note=summary,
    )


def step_memories(study: Study) -> list[compared.StepMemory]:
    """Of every sharding, the fastest first, in no more corners than can be looked at."""
    network, micro_batches = study.network.at(workers=study.top), study.profile.accumulation
    found = []
    for row in sorted(study.shardings, key=lambda row: row.prediction.iteration_s):
        if row.plan is None or row.plan.sharding is None:
            continue
        levels = memory_levels(study.profile, network, row.plan, micro_batches=micro_batches)
        limit = study.memory_budget or (row.fit.device_bytes if row.fit is not None else None)
        if levels:
            found.append(compared.StepMemory(row.label, levels, limit))
    return found


def exposed_section(study: Study) -> Section | None:
    if study.top == 1:
        return None
    parts = compared.exposed_by_part(study.at_top.values())
    rows = [
        (
            label,
            *(_seconds(values[index]) for values in parts.values()),
            _seconds(one.exposed_s),
            (f"{one.exposed_s / one.single_s:.1%}", one.exposed_s / one.single_s),
        )
        for index, (label, one) in enumerate(study.at_top.items())
    ]
    index = list(study.at_top).index(study.best_label)
    return Section(
        anchor="exposed",
        title="Where the lost time goes",
        summary=f"With {study.best_label}, {format_seconds(study.best.exposed_s)} of each iteration are lost: "
        + ", ".join(f"{format_seconds(values[index])} {compared.PARTS[part][0]}" for part, values in parts.items())
        + ".",
        how="Every iteration takes longer on many GPUs than on one; the bar is how much longer, split by cause. "
        "Blue (bandwidth) shrinks with a faster network or fewer bytes, orange (latency) with fewer and larger "
        "messages, purple (waiting) with smaller buckets at the end. Grey is the slowest worker of all: no schedule "
        "changes it.",
        views=[("", compared.draw_exposed(study.at_top))],
        tables=[Table("exposed time", ["strategy", *parts, "all", "of one iteration alone"], rows)],
    )


def measured_section(study: Study) -> Section | None:
    found = [one for one in study.measured if one.measured_s]
    if not found:
        return None
    errors = sorted(abs(one.error) for one in found)
    rows = [
        (
            one.label,
            _number(one.workers),
            _seconds(one.measured_s),
            _seconds(one.predicted_s),
            (f"{one.error:+.1%}", one.error),
            _number(one.iterations),
        )
        for one in found
    ]
    return Section(
        anchor="measured",
        title="Predicted against measured",
        summary=f"{len(found)} plans were measured; the median error of the prediction is "
        f"{errors[len(errors) // 2]:.1%}, the largest {errors[-1]:.1%}.",
        how="The dot is what was measured, with the range of most iterations; the upright tick is what was predicted "
        "before. The closer the two, the more the rest of this report can be trusted for this kind of network.",
        views=[("", compared.draw_measured(found))],
        tables=[Table("measured", ["plan", "nodes", "measured", "predicted", "error", "iterations"], rows)],
    )


def gradients_section(study: Study) -> Section:
    profile = study.profile
    shown = largest_gradients(profile)
    largest = sorted(profile.gradients, key=lambda gradient: -gradient.bytes)[:_MOST_ROWS]
    count = len(profile.gradients)
    cut = count - len(largest)
    return Section(
        anchor="gradients",
        title="Gradients: how large, and when they are ready",
        summary=f"{count} gradients with {format_bytes(profile.total_bytes)} in all; the largest is "
        f"{largest[0].name} with {format_bytes(largest[0].bytes)}.",
        how="Each dot is the gradient of one parameter, at the moment backward has finished it. Below, orange is how "
        "many bytes are ready to travel, green how many have arrived. The gap between the two is waiting to be sent; "
        "what green still lacks when backward ends is exposed.",
        views=[("", draw_gradient_sizes(profile, study.timeline(study.best_label)))],
        tables=[
            Table(
                "gradients",
                ["gradient", "bytes", "ready"],
                [(one.name, _bytes(one.bytes), _seconds(one.ready_s)) for one in largest],
                f"The {cut} smallest are left out." if cut else "",
            )
        ],
        note=f"The {count - len(shown)} smallest of {count} gradients "
        f"({format_bytes(profile.total_bytes - sum(one.bytes for one in shown))} together) "
        "are not drawn as dots; the lines count all."
        if len(shown) < count
        else "",
    )


def cost_section(study: Study) -> Section:
    data = cost_curve(study.network, study.top)
    straight = (
        f"On {data.measured_workers} workers an all-reduce takes about {format_seconds(data.latency_s)} plus its bytes "
        f"at {format_bytes(data.bytes_per_s)}/s."
        if data.bytes_per_s != float("inf")
        else f"On {data.measured_workers} workers an all-reduce takes {format_seconds(data.latency_s)}."
    )
    rows = [
        (_bytes(size), _seconds(seconds), (f"{residual:+.1%}", residual))
        for (size, seconds), residual in zip(data.points, data.residuals, strict=True)
    ]
    return Section(
        anchor="network",
        title="What the network costs",
        summary=straight,
        how="How long one all-reduce takes by its size, on logarithmic axes. The flat part on the left is latency: "
        "small messages cost the same whatever they carry, which is why gradients travel in buckets. The slope on the "
        "right is bandwidth. Lines marked as computed are moved to another number of workers. Where points are "
        "given, the bars below say how far a straight line is from them; predictions follow the points themselves.",
        views=[("", draw_cost_curve(data))],
        tables=[Table("all-reduce", ["bytes", "given", "straight line"], rows)] if rows else [],
        note=straight if rows else f"{straight} This network is given by these two numbers, not by points.",
    )


def memory_section(study: Study) -> Section | None:
    budget = study.memory_budget
    memory = study.profile.memory
    if memory is None or not (kinds := compared.memory_kinds(memory)):
        return None
    peak = memory.peak_bytes or sum(kinds.values())
    more = ""
    if budget is not None:
        more = f" That is {'within' if peak <= budget else 'above'} the budget of {format_bytes(budget)}."
    fit = study.fits[STOCK]
    if fit is not None:
        more += f" In training, with DDP's buckets: {fit}."
    summary = f"One worker needs {format_bytes(peak)} at its peak.{more}"
    return Section(
        anchor="memory",
        title="Memory of one worker",
        summary=summary,
        how="What fills the GPU's memory during an iteration, by kind. Workspace is what the peak holds beyond the "
        "kinds that were counted. Under DDP more GPUs do not change it: every worker holds the whole model.",
        views=[("", compared.draw_memory_use(memory, budget))],
        tables=[Table("memory", ["kind", "bytes"], [(kind, _bytes(size)) for kind, size in kinds.items()])],
        note=summary,
    )


def _number(value: int) -> Cell:
    return str(value), float(value)


def _seconds(value: float) -> Cell:
    return format_seconds(value), value


def _bytes(value: int) -> Cell:
    return format_bytes(value), float(value)
