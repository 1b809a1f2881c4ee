"""Layouts drawn: a step of the pipeline, where each layout's step goes, and its memory against the device's limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from backbeat.layouts import LayoutPrediction
from backbeat.model import Span
from backbeat.report.figures import canvas
from backbeat.report.figures.canvas import Drawing, axis, bar, drawn, mark, upright
from backbeat.report.tables.layout_tables import PART_WORDS
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


def stage_timeline(one: LayoutPrediction) -> Drawing:
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
                "base": [_short(span.start_s * scale) for span in spans],
                "x": [_short((span.end_s - span.start_s) * scale) for span in spans],
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


def step_bars(found: Sequence[LayoutPrediction]) -> Drawing:
    """Where the step of each layout goes."""
    parts = {PART_WORDS[name]: [one.breakdown.parts[name] for one in found] for name in PART_WORDS}
    least = _SHOWN * min(one.step_s for one in found)
    shown = {words: seconds for words, seconds in parts.items() if max(seconds) > least}
    words = {name: [format_seconds(each) for each in seconds] for name, seconds in shown.items()}
    colours = {name: colour for name, colour in zip(parts, _PART_COLOURS, strict=True) if name in shown}
    return drawn(_stacked(shown, words, colours), **_ranked(found, "seconds of one step"))


def memory_bars(found: Sequence[LayoutPrediction]) -> Drawing:
    """What one GPU holds under each layout, and the device's limit."""
    kinds = {
        name: [float(getattr(one.memory, name)) for one in found] for name in type(found[0].memory).__struct_fields__
    }
    shown = {name: [size / 1e9 for size in sizes] for name, sizes in kinds.items() if max(sizes) > 0}
    words = {name: [format_bytes(size) for size in kinds[name]] for name in shown}
    limit = found[0].limit_bytes
    colours = {name: colour for name, colour in zip(kinds, _KIND_COLOURS, strict=True) if name in shown}
    anchor = "right" if 2 * limit > max(one.memory_bytes for one in found) else "left"
    return drawn(
        _stacked(shown, words, colours),
        **_ranked(found, "GB of one GPU, in the stage that holds most"),
        shapes=[upright(limit / 1e9)],
        annotations=[mark(limit / 1e9, f"limit {format_bytes(limit)}") | {"xanchor": anchor}],
    )


def _stacked(
    shown: Mapping[str, Sequence[float]], words: Mapping[str, Sequence[str]], colours: Mapping[str, str]
) -> list[Drawing]:
    hover = "<b>%{fullData.name}</b>: %{customdata}<extra></extra>"
    return [
        bar(name, [str(index) for index in range(1, len(values) + 1)], values, colours[name], customdata=words[name],
            hovertemplate=hover)
        for name, values in shown.items()
    ]  # fmt: skip


def _ranked(found: Sequence[LayoutPrediction], title: str) -> Drawing:
    return {
        "barmode": "stack",
        "xaxis": axis(title, rangemode="tozero"),
        "yaxis": axis("rank", type="category", autorange="reversed"),
        "height": 270 + 26 * len(found),
        # Below the axis and its title, however high the bars are.
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "traceorder": "normal",
        },
    }


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


def _short(value: float) -> float:
    return round(value, 4)
