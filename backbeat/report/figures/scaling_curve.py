"""How the job scales: one line per strategy over the number of workers, with the band and the knee."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backbeat.model import Prediction
from backbeat.report.figures import canvas
from backbeat.report.figures.canvas import COLOURS, Drawing, axis, curve, dots, drawn, translucent
from backbeat.report.words.numbers import format_number, load_range
from backbeat.simulate.predict import knee
from backbeat.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLine:
    """One strategy."""

    label: str
    points: tuple[Prediction, ...]
    """In order of their workers."""

    @property
    def workers(self) -> list[int]:
        return [point.workers for point in self.points]

    @property
    def band(self) -> list[tuple[int, float, float]]:
        """(workers, scaling at the lower edge, at the upper one): from a busy cluster to a quiet one where the network
        has a band; otherwise of a slow and a fast iteration, p90 and p10, where the profile has iteration times."""
        if self.load_band:
            return [(point.workers, *load_range(point)) for point in self.points]
        return [
            (point.workers, point.single_s / point.band.p90_s, point.single_s / point.band.p10_s)
            for point in self.points
            if point.band is not None and point.band.p10_s > 0
        ]

    @property
    def load_band(self) -> bool:
        """The band is the network's, not that of single iterations."""
        return any(point.network_band is not None for point in self.points)

    @property
    def knee(self) -> int | None:
        """Past this many workers an added one brings less than half of its own throughput; 1 where none of the curve
        pays, None where all of it does."""
        return knee(self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    lines: tuple[ScalingLine, ...]
    alone_per_s: float
    """Samples a second of one worker alone."""

    @property
    def best(self) -> ScalingLine:
        """The highest at its end. Only its band is drawn: several on top of each other say nothing."""
        return max(self.lines, key=lambda line: line.points[-1].scaling_factor)

    @property
    def counts(self) -> list[int]:
        """Every number of workers, rising."""
        return sorted({count for line in self.lines for count in line.workers})

    @property
    def range_percent(self) -> tuple[float, float]:
        """Where an axis of shares starts and ends."""
        shares = [point.scaling_factor for line in self.lines for point in line.points]
        shares += [low for _, low, _ in self.best.band if self.best.load_band]
        return max(0, 10 * math.floor(10 * min(shares) - 1.5)), max(100, 100 * max(shares)) + 3


def scaling(curves: Mapping[str, Sequence[Prediction]]) -> Scaling:
    """Curves by label; the points of each are put in order of their workers."""
    lines = tuple(
        ScalingLine(label=label, points=tuple(sorted(curve, key=lambda point: point.workers)))
        for label, curve in curves.items()
    )
    first = next(iter(curves.values()))[0]
    alone = first.samples_per_s / first.workers / first.scaling_factor if first.scaling_factor > 0 else 0.0
    return Scaling(lines=lines, alone_per_s=alone)


def draw_scaling(data: Scaling, *, view: str = "scaling") -> Drawing:
    """`view` is `scaling` (share of perfect) or `throughput` (samples a second)."""
    throughput = view == "throughput"
    traces: list[Drawing] = []
    scale = axis("share of perfect scaling", ticksuffix=" %", range=list(data.range_percent))
    if throughput:
        scale = axis("samples a second", type="log")
        perfect = [count * data.alone_per_s for count in data.counts]
        stroke = {"color": canvas.GREY, "width": 2.5, "dash": "dot"}
        traces.append(curve("perfect", data.counts, perfect, canvas.GREY, line=stroke, hoverinfo="skip"))
    for index, line in enumerate(data.lines):
        colour = COLOURS[index % len(COLOURS)]
        values = [point.samples_per_s if throughput else 100 * point.scaling_factor for point in line.points]
        best = line is data.best
        if best and len(line.band) > 1:
            traces.append(_band(line, colour, data.alone_per_s if throughput else None))
        traces.append(
            curve(
                html.escape(line.label),
                line.workers,
                values,
                colour,
                customdata=[
                    [
                        format_seconds(point.iteration_s),
                        f"{point.scaling_factor:.1%}",
                        format_number(point.samples_per_s),
                        point.bottleneck,
                        " (extrapolated)" if point.extrapolated else "",
                    ]
                    for point in line.points
                ],
                hovertemplate="<b>%{fullData.name}</b>, %{x} GPUs%{customdata[4]}<br>%{customdata[1]} of perfect "
                "scaling<br>%{customdata[0]} per iteration<br>%{customdata[2]} samples/s<br>limited by "
                "%{customdata[3]}<extra></extra>",
            )
        )
        if best and line.knee in line.workers:
            traces.append(_knee(line.knee, values[line.workers.index(line.knee)], colour))
    ticks = [str(count) for count in data.counts]
    return drawn(traces, xaxis=axis("GPUs", type="log", tickvals=data.counts, ticktext=ticks), yaxis=scale, height=420)


def _band(line: ScalingLine, colour: str, alone_per_s: float | None) -> Drawing:
    """The band as one closed outline: a busy to a quiet cluster, or slow and fast iterations."""
    outline = [(count, fast) for count, _, fast in line.band] + [(count, slow) for count, slow, _ in line.band[::-1]]
    return {
        "type": "scatter",
        "name": f"{html.escape(line.label)}: "
        + ("busy to quiet cluster" if line.load_band else "10th to 90th percentile"),
        "x": [count for count, _ in outline],
        "y": [100 * share if alone_per_s is None else share * count * alone_per_s for count, share in outline],
        "fill": "toself",
        "fillcolor": translucent(colour, 0.18),
        "line": {"width": 0},
        "mode": "lines",
        "hoverinfo": "skip",
    }


def _knee(workers: int, value: float, colour: str) -> Drawing:
    return dots(
        "knee",
        [workers],
        [value],
        {"symbol": "diamond", "size": 12, "color": colour, "line": {"width": 2, "color": "#fff"}},
        mode="markers+text",
        text=["knee"],
        textposition="top right",
        hovertemplate="knee: beyond %{x} GPUs an added one brings less than half of its own work<extra></extra>",
        showlegend=False,
    )
