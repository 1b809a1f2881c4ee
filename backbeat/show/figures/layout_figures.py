"""Layouts drawn: a step of the pipeline, where each layout's step goes, and its memory against the device's limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from backbeat.model import Span
from backbeat.show.figures import canvas
from backbeat.show.figures.canvas import Drawing, axis, drawn, legend, mark, stacked, upright
from backbeat.show.tables.layout_tables import PART_WORDS
from backbeat.units import format_bytes, format_seconds

_WORK = {
    "forward": canvas.BLUE,
    "backward": canvas.GREEN,
    "weight gradients": "#9a8b2f",
    "reduce gradients": canvas.ORANGE,
    "update": canvas.PURPLE,
    "gather parameters": canvas.ROSE,
}
"""What a stage does, by how its spans are named."""
_WAITS = "waits (bubble)"
_HATCHED = {"shape": "/", "fillmode": "replace", "size": 6, "solidity": 0.3}
_MOST_NUMBERED = 200
"""Bars that have their micro-batch's number inside; of more, each is too short for it."""
_SHOWN = 1e-4
"""Less than this share of a step is not drawn."""
_PART_COLOURS = (
    canvas.BLUE, "#5aa9c9", "#4f7f8b", "#a3a9b2", "#8fd0c4", canvas.ORANGE, "#d9b48b", "#9a8b2f",
    canvas.ROSE, "#e0a3b3", canvas.GREY, canvas.PURPLE, canvas.GREEN, "#b9a3c9", "#4a3d9e",
)  # fmt: skip
_KIND_COLOURS = (
    canvas.BLUE, canvas.ORANGE, canvas.GREEN, canvas.PURPLE, canvas.ROSE, "#5aa9c9", canvas.GREY,
)  # fmt: skip


def stage_timeline(one: Any) -> Drawing:
    """Stages below each other, time to the right; what no stage fills is hatched."""
    end = max(span.end_s for span in one.timeline)
    unit, scale = ("seconds", 1.0) if end >= 1 else ("milliseconds", 1e3)
    numbered = len(one.timeline) <= _MOST_NUMBERED
    named = {work: [span for span in one.timeline if span.name.startswith(work)] for work in _WORK}
    named[_WAITS] = _waits(one.timeline, end)
    traces: list[Drawing] = []
    for work, spans in named.items():
        if not spans:
            continue
        # `3 chunk 1` as a bar has room for.
        which = [span.name.removeprefix(work).strip().replace(" chunk ", "·") for span in spans]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": work,
                "base": [round(span.start_s * scale, 4) for span in spans],
                "x": [round((span.end_s - span.start_s) * scale, 4) for span in spans],
                "y": [int(span.lane.removeprefix("stage ")) for span in spans],
                "width": 0.8,
                "customdata": which,
                "hovertemplate": f"<b>stage %{{y}}: {work}</b> %{{customdata}}<br>from %{{base:.4~g}} for %{{x:.4~g}} "
                f"{unit}<extra></extra>",
                "marker": {
                    "color": _WORK.get(work, canvas.GREY),
                    "line": {"width": (0.5 if numbered else 0.2) * (work != _WAITS), "color": "rgba(255,255,255,.6)"},
                    **({"pattern": _HATCHED} if work == _WAITS else {}),
                },
                **({"text": which, "textposition": "inside", "insidetextanchor": "middle"} if numbered else {}),
            }
        )
    stages = list(range(one.layout.pp))
    return drawn(
        traces,
        barmode="overlay",
        xaxis=axis(f"{unit} from the start of the step", range=[0, end * scale * 1.01]),
        yaxis={
            "tickvals": stages,
            "ticktext": [f"stage {stage}" for stage in stages],
            "range": [len(stages) - 0.5, -0.5],
        },
        height=170 + 30 * len(stages),
        hovermode="closest",
    )


def step_bars(found: Sequence[Any]) -> Drawing:
    """Where the step of each layout goes."""
    parts = {words: [one.breakdown.parts[name] for one in found] for name, words in PART_WORDS.items()}
    least = _SHOWN * min(one.step_s for one in found)
    return _by_rank("seconds of one step", parts, _PART_COLOURS, format_seconds, least=least)


def memory_bars(found: Sequence[Any]) -> Drawing:
    """What one GPU holds under each layout, and the device's limit."""
    kinds = {name: [one.memory.by_kind[name] for one in found] for name in found[0].memory.by_kind}
    limit = found[0].device_bytes
    anchor = "right" if 2 * limit > max(one.peak_bytes for one in found) else "left"
    return _by_rank(
        "GB of one GPU, in the stage that holds most",
        kinds,
        _KIND_COLOURS,
        format_bytes,
        unit=1e9,
        shapes=[upright(limit / 1e9)],
        annotations=[mark(limit / 1e9, f"limit {format_bytes(limit)}") | {"xanchor": anchor}],
    )


def _by_rank(
    title: str,
    kinds: Mapping[str, Sequence[float]],
    colours: Sequence[str],
    words: Callable[[float], str],
    *,
    least: float = 0.0,
    unit: float = 1.0,
    **layout: Any,
) -> Drawing:
    """A bar for each layout, piled up from kinds; those that are `least` or less under every layout are left out."""
    ranks = [str(rank) for rank in range(1, len(next(iter(kinds.values()))) + 1)]
    traces = [
        stacked(name, ranks, [value / unit for value in values], [words(value) for value in values], colour)
        for (name, values), colour in zip(kinds.items(), colours, strict=False)
        if max(values) > least
    ]
    return drawn(
        traces,
        barmode="stack",
        xaxis=axis(title, rangemode="tozero"),
        yaxis=axis("rank", type="category", autorange="reversed"),
        height=270 + 26 * len(ranks),
        # Below the axis and its title, however high the bars are.
        legend=legend(0, yref="container"),
        **layout,
    )


def _waits(timeline: Sequence[Span], end: float) -> list[Span]:
    """Where a stage does nothing until the step ends."""
    found = []
    for lane in dict.fromkeys(span.lane for span in timeline):
        own = sorted((span for span in timeline if span.lane == lane), key=lambda span: span.start_s)
        ends = [Span(lane, "", 0.0, 0.0), *own, Span(lane, "", end, end)]
        found += [
            Span(lane, _WAITS, before.end_s, after.start_s)
            for before, after in pairwise(ends)
            if after.start_s - before.end_s > _SHOWN * end
        ]
    return found
