"""One iteration in time: the compute lane and a lane for each communicator, with no more bars than can be looked at.

Of a sharded step each collective has a lane of its own, whichever communicator carries it, and a bar is a unit.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backbeat.model import Plan, Span
from backbeat.show.figures.canvas import GREY, Drawing, axis, drawn, shade
from backbeat.units import counted, first_few, format_bytes, format_seconds

MOST_BARS = 400
_NAMES_SHOWN = 5
_LEAST_COMPUTE = 12
"""Computations are drawn one by one up to this number, however few bars are asked for."""
SHARDED_LANES = ("all-gather", "reduce-scatter", "all-reduce")
_LABEL_WIDTH = 56
_MOST_NAMED = 12
"""Computations that have their names inside their bars; of more, each is too short for its name."""
_COMPUTE_COLOURS = {"forward": "#a3a9b2", "copy": "#4f7f8b"}
"""Of a sharded step, whose computation is one bar a unit; backward and the update are grey."""


class Bar(Span, frozen=True):
    """One piece of computation or one bucket; several buckets where they were merged to keep the figure readable."""

    gradients: int = 0
    """0 where it is not known how many."""
    buckets: int = 1

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    label: str
    lanes: tuple[str, ...]
    """`compute` first, then the communicators or the collectives of a sharded step."""
    bars: tuple[Bar, ...]
    end_s: float

    @property
    def merged(self) -> int:
        """How many buckets are drawn together with others, because there are too many to draw one by one."""
        return sum(bar.buckets for bar in self.transfers if bar.buckets > 1)

    @property
    def compute(self) -> tuple[Bar, ...]:
        return tuple(bar for bar in self.bars if bar.lane == "compute")

    @property
    def transfers(self) -> tuple[Bar, ...]:
        return tuple(bar for bar in self.bars if bar.lane != "compute")


@dataclass(frozen=True, slots=True)
class SizeScale:
    """From the smallest bucket to the largest, as powers of ten of their bytes."""

    low: float
    high: float

    def share(self, size: int) -> float:
        """How far on the way from the smallest to the largest a bucket of this many bytes is."""
        if self.high <= self.low:
            return 0.5
        return (math.log10(max(size, 1)) - self.low) / (self.high - self.low)


def size_scale(timelines: Sequence[Timeline]) -> SizeScale:
    """One scale for all of them, so that a shade means the same size in each."""
    sizes = [bar.bytes for one in timelines for bar in one.transfers if bar.bytes > 0] or [1]
    return SizeScale(math.log10(min(sizes)), math.log10(max(sizes)))


def timeline(
    label: str, spans: Sequence[Span], buckets: Sequence[Sequence[str]] = (), *, most: int = MOST_BARS
) -> Timeline:
    """The spans as bars. `buckets` names the gradients of each communication span that is not the buffers', in
    order."""
    named = []
    for span, gradients in with_gradients(spans, buckets):
        name = first_few(gradients, _NAMES_SHOWN) if gradients else span.name
        named.append(Bar(span.lane, name, span.start_s, span.end_s, span.bytes, gradients=len(gradients)))
    lanes = tuple(sorted({span.lane for span in spans}, key=lane_order))
    computing = sum(bar.lane == "compute" for bar in named)
    drawn: list[Bar] = []
    for lane in lanes:
        mine = sorted((bar for bar in named if bar.lane == lane), key=lambda bar: (bar.start_s, bar.end_s))
        count = computing if lane == "compute" else len(named) - computing
        stride = -(-count // max(most, _LEAST_COMPUTE if lane == "compute" else 1))
        for first in range(0, len(mine), max(stride, 1)):
            run = mine[first : first + stride]
            drawn.append(run[0] if len(run) == 1 else _merge(run))
    end_s = max((span.end_s for span in spans), default=0.0)
    return Timeline(label=label, lanes=lanes, bars=tuple(drawn), end_s=end_s)


def by_collective(spans: Sequence[Span], plan: Plan) -> Sequence[Span]:
    """The spans of a sharded step: each collective on its own lane, named after its unit. Others stay as they are."""
    if plan.sharding is None:
        return spans
    moved = []
    for span in spans:
        lane, _, unit = span.name.partition(" ")
        own = span.lane != "compute" and lane in SHARDED_LANES
        moved.append(Span(lane, unit, span.start_s, span.end_s, span.bytes) if own else span)
    return moved


def lane_order(lane: str) -> tuple[int, int, str]:
    """`compute` first, then the collectives of a sharded step, then communicators by number."""
    if lane == "compute":
        return 0, 0, lane
    if lane in SHARDED_LANES:
        return 1, SHARDED_LANES.index(lane), lane
    number = lane.removeprefix("communicator ")
    return 2, int(number) if number.isdecimal() else 10**6, lane


def with_gradients(spans: Sequence[Span], buckets: Sequence[Sequence[str]]) -> Iterator[tuple[Span, Sequence[str]]]:
    """Each span with the gradients it carries; with none where `buckets` are not of these spans."""
    known = len(buckets) == sum(span.carries_gradients for span in spans)
    names = iter(buckets if known else ())
    for span in spans:
        yield span, next(names, ()) if span.carries_gradients else ()


def _merge(run: Sequence[Bar]) -> Bar:
    return Bar(
        lane=run[0].lane,
        name=f"{len(run)} {'parts' if run[0].lane == 'compute' else 'buckets'}, from {run[0].name} to {run[-1].name}",
        start_s=run[0].start_s,
        end_s=max(bar.end_s for bar in run),
        bytes=sum(bar.bytes for bar in run),
        gradients=sum(bar.gradients for bar in run),
        buckets=len(run),
    )


def draw_timeline(data: Timeline) -> Drawing:
    return _drawn(_bars(data, size_scale([data])), data.lanes, data.end_s)


def draw_two(first: Timeline, second: Timeline) -> Drawing:
    """One below the other on one axis, a shade meaning the same size in both."""
    sizes, traces, lanes = size_scale([first, second]), [], list[str]()
    for place, one in enumerate((first, second)):
        own = {lane: html.escape(f"{one.label} · {lane}") for lane in one.lanes}
        lanes += own.values()
        for trace in _bars(one, sizes):
            if trace["type"] == "bar":
                traces.append(trace | {"y": [own[lane] for lane in trace["y"]]})
            elif place == 0:
                traces.append(trace)
    return _drawn(traces, lanes, max(first.end_s, second.end_s))


def _drawn(traces: list[Drawing], lanes: Sequence[str], end_s: float) -> Drawing:
    return drawn(
        traces,
        barmode="overlay",
        xaxis=axis("milliseconds into the step", range=[0, end_s * 1020]),
        yaxis={"type": "category", "categoryarray": lanes[::-1], "categoryorder": "array", "automargin": True},
        height=170 + 34 * len(lanes),
        showlegend=False,
    )


def _bars(data: Timeline, sizes: SizeScale) -> list[Drawing]:
    names = [html.escape(bar.name) for bar in data.compute] if len(data.compute) <= _MOST_NAMED else None
    inside = {"text": names, "textposition": "inside", "insidetextanchor": "middle"}
    colours = [_compute_colour(bar) for bar in data.compute]
    shades = [shade(sizes.share(bar.bytes)) for bar in data.transfers]
    return [
        _intervals(data.label, "computation", data.compute, colours) | inside,
        _intervals(data.label, "buckets", data.transfers, shades, "%{customdata[4]}<br>"),
        *([_scale(sizes.low, sizes.high)] if sizes.high > sizes.low else []),
    ]


def _compute_colour(bar: Bar) -> str:
    kind, _, unit = bar.name.partition(" ")
    return _COMPUTE_COLOURS.get(kind, GREY) if unit else GREY


def _scale(low: float, high: float) -> Drawing:
    """What the shades mean: a colour bar on a trace without points."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [None],
        "y": [None],
        "hoverinfo": "skip",
        "marker": {
            "color": [low],
            "cmin": low,
            "cmax": high,
            "colorscale": [[share, shade(share)] for share in (0.0, 0.25, 0.5, 0.75, 1.0)],
            "showscale": True,
            "colorbar": {
                "title": {"text": "bucket", "side": "top"},
                "tickvals": [low, high],
                "ticktext": [format_bytes(10**low), format_bytes(10**high)],
                "thickness": 12,
                "len": 0.9,
                "outlinewidth": 0,
            },
        },
    }


def _intervals(label: str, kind: str, bars: Sequence[Bar], colours: Sequence[str], contents: str = "") -> Drawing:
    """Bars of one kind; `contents` is where their hover labels say what they carry, if they do."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": f"{html.escape(label)}: {kind}",
        "base": [bar.start_s * 1e3 for bar in bars],
        "x": [bar.duration_s * 1e3 for bar in bars],
        "y": [bar.lane for bar in bars],
        "width": 0.78,
        "customdata": [
            [
                _wrapped(bar.name),
                *(format_seconds(seconds) for seconds in (bar.start_s, bar.end_s, bar.duration_s)),
                _contents(bar),
                html.escape(label),
            ]
            for bar in bars
        ],
        "hovertemplate": f"<b>%{{customdata[0]}}</b> (%{{customdata[5]}})<br>{contents}%{{customdata[1]}} to "
        "%{customdata[2]}, %{customdata[3]} long<extra></extra>",
        "marker": {"line": {"width": 0.5, "color": "rgba(255,255,255,.6)"}, "color": list(colours)},
    }


def _wrapped(name: str) -> str:
    """A list of names on lines that fit a hover label."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(name, _LABEL_WIDTH)) or html.escape(name)


def _contents(bar: Bar) -> str:
    """What a bucket carries, in words."""
    parts = [f"{bar.buckets} buckets"] if bar.buckets > 1 else []
    if bar.gradients:
        parts.append(counted(bar.gradients, "gradient"))
    return ", ".join([*parts, format_bytes(bar.bytes)])
