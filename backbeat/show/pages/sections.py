"""The figures of a report in their order, each with what it shows, how to read it, and its numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backbeat.answer.answer import Answer
from backbeat.answer.row import AnswerRow
from backbeat.model import Network, Profile
from backbeat.model.gpu_memory import KINDS
from backbeat.show.figures import compared
from backbeat.show.figures.canvas import Drawing
from backbeat.show.figures.given import cost_curve, draw_cost_curve, draw_gradient_sizes, largest_gradients
from backbeat.show.figures.scaling_curve import Scaling, draw_scaling
from backbeat.show.figures.timeline import Timeline, draw_timeline, draw_two, timeline
from backbeat.show.measured import Measured
from backbeat.show.steps_traced import traced
from backbeat.show.tables.answer_table import shown_rows
from backbeat.show.words.decision_words import called, mesh_words
from backbeat.show.words.numbers import format_count, format_number
from backbeat.units import format_bytes, format_seconds

_MOST_ROWS = 1000
_MOST_TIMELINES = 6

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


def sections(answer: Answer, measured: Sequence[Measured] = (), *, most: int = 400) -> list[Section]:
    """`most` is how many bars a timeline has at most."""
    profile, rows = answer.asked.profile, shown_rows(answer)
    here = [row for row in rows if row.gpus == answer.taken.gpus]
    shown = timelines(answer, here, measured, most=most)
    possible = [
        ways_section(answer, here),
        memory_section(here),
        scaling_section(answer) if answer.curve else None,
        timeline_section(answer, shown),
        exposed_section(here),
        measured_section(measured),
        gradients_section(profile, shown[0]) if profile is not None and shown else None,
        cost_section(answer.asked.network, answer.taken.gpus) if answer.taken.gpus > 1 else None,
    ]
    return [section for section in possible if section is not None]


def ways_section(answer: Answer, here: Sequence[AnswerRow]) -> Section:
    taken = answer.taken
    return Section(
        anchor="ways",
        title=f"Every way on {taken.gpus} GPUs",
        summary=f"{called(taken.way)} takes {format_seconds(taken.step_s)} a step.",
        how="All ways do the same work in a step, so the shortest bar is the fastest. The line over a bar is where the "
        "median step of such a job is found, 10th to 90th percentile. Green is recommended, grey does not fit. Of ways "
        "that are level the simplest is recommended.",
        views=[("", compared.draw_steps(here, taken))],
        tables=[rows_table(answer)],
    )


def rows_table(answer: Answer) -> Table:
    """Every row of the answer, with every figure."""
    headings = ["GPUs", "way", "mesh", "runs by", "batch", "step", "p10", "p90", "samples/s", "tokens/s", "MFU"]
    headings += ["scaling", "memory", "fits", "limit", "hours", "cost"]
    rows = []
    for row in answer.rows:
        one, cost = row.prediction, row.cost
        low, high = row.range_s
        rows.append(
            (
                _number(row.gpus),
                row.way,
                mesh_words(row.mesh),
                one.runs_by or "",
                f"{one.batch} × {one.micro_batches}",
                _seconds(row.step_s),
                _seconds(low),
                _seconds(high),
                (format_number(one.samples_per_s), one.samples_per_s),
                "" if one.tokens_per_s is None else (format_count(one.tokens_per_s), one.tokens_per_s),
                "" if one.mfu is None else (f"{one.mfu:.1%}", one.mfu),
                (f"{one.scaling_factor:.1%}", one.scaling_factor),
                "" if row.peak is None else _bytes(row.peak),
                one.fits or "unknown",
                row.limit,
                "" if cost is None else (format_number(cost.hours), cost.hours),
                "" if cost is None or cost.money is None else (f"{cost.money:,.0f}", cost.money),
            )
        )
    return Table("every way", headings, rows)


def memory_section(here: Sequence[AnswerRow]) -> Section | None:
    drawing = compared.draw_memory(here)
    if drawing is None:
        return None
    known = [row for row in here if row.memory is not None and row.memory.by_kind]
    kinds = list(dict.fromkeys(kind for row in known for kind in row.memory.by_kind))
    rows = [(row.way, *(_bytes(round(row.memory.by_kind.get(kind, 0))) for kind in kinds)) for row in known]
    return Section(
        anchor="memory",
        title="Memory of one GPU",
        summary="; ".join(f"{row.way} {format_bytes(row.peak or 0)}" for row in known),
        how="What one GPU holds when it holds most, by kind. The dashed line is what it has for tensors. Shards of "
        "parameters, gradients and optimizer state shrink with more GPUs, activations do not.",
        views=[("", drawing)],
        tables=[Table("memory", ["way", *(KINDS[kind] for kind in kinds)], rows)],
    )


def scaling_section(answer: Answer) -> Section:
    data = Scaling.of(answer)
    data = Scaling(data.curves, data.best, answer.decision.knee)
    rows = [
        (
            _number(one.gpus),
            label,
            one.way,
            (f"{one.scaling_factor:.1%}", one.scaling_factor),
            (format_number(one.samples_per_s), one.samples_per_s),
            _seconds(one.step_s),
            _seconds(one.exposed_s),
        )
        for label, points in data.curves.items()
        for one in points
    ]
    knee = answer.decision.knee
    note = "Every added GPU still brings more than half of its own work."
    if knee is not None:
        note = f"The knee lies at {knee} GPUs: beyond, an added one brings less than half of its own work."
    return Section(
        anchor="scaling",
        title="How it scales",
        summary=note,
        how="100 % means that N GPUs do the work of N. The line called best by hand is the fastest that people write "
        "without a planner, on sizes that double; the knee is found on it, so it is the same whatever sizes were "
        "asked. The shaded band is where the median step is found.",
        views=[("share of perfect", draw_scaling(data)), ("samples a second", draw_scaling(data, view="throughput"))],
        tables=[Table("scaling", ["GPUs", "line", "way", "scaling", "samples/s", "step", "exposed"], rows)],
        note=note,
    )


def timelines(answer: Answer, here: Sequence[AnswerRow], measured: Sequence[Measured], *, most: int) -> list[Timeline]:
    """The decision's step first, then what it is compared with, then others; and what was measured."""
    first = [row for row in here if row is answer.taken]
    over = [row for row in here if row.way == answer.decision.over]
    others = [row for row in here if row not in first and row not in over]
    found = []
    for row in [*first, *over, *others][:_MOST_TIMELINES]:
        for _, spans, buckets in traced([row.prediction], answer.asked.profile):
            found.append(timeline(row.way, spans, buckets, most=most))
    for one in measured:
        found += [timeline(title, spans, buckets, most=most) for title, spans, buckets in one.traced()]
    return found


def timeline_section(answer: Answer, shown: Sequence[Timeline]) -> Section | None:
    if not shown:
        return None
    count = answer.taken.micro_batches
    stages = any(lane.startswith("stage") for one in shown for lane in one.lanes)
    merged = sum(one.merged for one in shown[:1])
    notes = [f"All {count} micro-batches of a step are drawn."] if stages and count > 1 else []
    if merged:
        notes.append(f"{merged} bars are drawn together with their neighbours; the whole timeline is in the trace.")
    views = [(one.label, draw_timeline(one)) for one in shown]
    if len(shown) > 1:
        both = (f"{shown[0].label} and {shown[1].label}", draw_two(shown[0], shown[1]))
        views = [both, *views]
    return Section(
        anchor="timeline",
        title=f"One step on {answer.taken.gpus} GPUs",
        summary="; ".join(f"{one.label} ends after {format_seconds(one.end_s)}" for one in shown),
        how="Time runs to the right. The compute lane shows one GPU: forward, backward, update. A bar in another lane "
        "is a message, darker where it is larger: a bucket of gradients, or of a sharded step one unit's gather or "
        "reduce-scatter. Messages below computation cost nothing; gaps in the compute lane are what the GPU waits. Of "
        "a pipeline each lane is one stage. Waiting for the slowest GPU is not drawn.",
        views=views,
        tables=[_bars_table(shown[0])],
        note=" ".join(notes),
    )


def _bars_table(one: Timeline) -> Table:
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
        for index, bar in enumerate(sorted(one.transfers, key=lambda bar: bar.start_s))
    ]
    return Table(f"bars of {one.label}", ["bar", "lane", "what", "count", "bytes", "starts", "ends", "takes"], rows)


def exposed_section(here: Sequence[AnswerRow]) -> Section | None:
    parts = compared.exposed_by_part(row.prediction for row in here)
    if not parts:
        return None
    rows = [
        (row.way, *(_seconds(values[index]) for values in parts.values()), _seconds(row.exposed_s))
        for index, row in enumerate(here)
    ]
    first = here[0]
    waits = ", ".join(f"{format_seconds(values[0])} {compared.CAUSES[part][0]}" for part, values in parts.items())
    return Section(
        anchor="exposed",
        title="What a step waits for",
        summary=f"With {called(first.way)}: {waits}.",
        how="What a step takes longer than its computation alone, by cause. A faster network shortens what is due to "
        "bandwidth, fewer and larger messages what is due to latency, more micro-batches a pipeline's bubble. Nothing "
        "but steadier GPUs shortens the wait for the slowest.",
        views=[("", compared.draw_exposed(here))],
        tables=[Table("waits", ["way", *parts, "exposed"], rows)],
    )


def measured_section(measured: Sequence[Measured]) -> Section | None:
    found = [one for one in measured if one.measured_s]
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
        how="The dot is what was measured, with the range of most steps; the upright tick is what was predicted "
        "before. The closer the two, the more the rest can be trusted for this kind of network.",
        views=[("", compared.draw_measured(found))],
        tables=[Table("measured", ["plan", "GPUs", "measured", "predicted", "error", "steps"], rows)],
    )


def gradients_section(profile: Profile, sent: Timeline) -> Section:
    shown = largest_gradients(profile)
    largest = sorted(profile.gradients, key=lambda gradient: -gradient.bytes)[:_MOST_ROWS]
    count = len(profile.gradients)
    return Section(
        anchor="gradients",
        title="Gradients: how large, and when they are ready",
        summary=f"{count} gradients with {format_bytes(profile.total_bytes)} in all; the largest is "
        f"{largest[0].name} with {format_bytes(largest[0].bytes)}.",
        how="Each dot is the gradient of one parameter, at the moment backward has finished it. Below, orange is how "
        "many bytes are ready to travel, green how many have arrived.",
        views=[("", draw_gradient_sizes(profile, sent))],
        tables=[
            Table(
                "gradients",
                ["gradient", "bytes", "ready"],
                [(one.name, _bytes(one.bytes), _seconds(one.ready_s)) for one in largest],
            )
        ],
        note=f"The {count - len(shown)} smallest are not drawn as dots; the lines count all."
        if len(shown) < count
        else "",
    )


def cost_section(network: Network, gpus: int) -> Section:
    data = cost_curve(network, gpus)
    per_s = "" if data.bytes_per_s == float("inf") else f" plus its bytes at {format_bytes(data.bytes_per_s)}/s"
    straight = (
        f"On {data.measured_workers} GPUs an all-reduce takes about {format_seconds(data.latency_s)}{per_s}. The bus "
        "bandwidth that tools print is higher: it counts what each GPU sends and receives."
    )
    rows = [
        (_bytes(size), _seconds(seconds), (f"{residual:+.1%}", residual))
        for (size, seconds), residual in zip(data.points, data.residuals, strict=True)
    ]
    return Section(
        anchor="network",
        title="What the network costs",
        summary=straight,
        how="How long one all-reduce takes by its size, on logarithmic axes. The flat part on the left is latency, the "
        "slope on the right bandwidth. Lines marked as computed are moved to another number of GPUs. Where points are "
        "given, the bars below say how far a straight line is from them.",
        views=[("", draw_cost_curve(data))],
        tables=[Table("all-reduce", ["bytes", "given", "straight line"], rows)] if rows else [],
        note=straight,
    )


def _number(value: int) -> Cell:
    return str(value), float(value)


def _seconds(value: float) -> Cell:
    return format_seconds(value), value


def _bytes(value: int) -> Cell:
    return format_bytes(value), float(value)
