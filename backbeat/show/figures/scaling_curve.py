"""How the job scales: one line per strategy over the number of workers, with the band and the knee."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backbeat.model import Prediction
from backbeat.model.prediction import knee
from backbeat.show.figures import canvas
from backbeat.show.figures.canvas import COLOURS, Drawing, axis, curve, dots, drawn, translucent
from backbeat.show.words.numbers import format_number, load_range
from backbeat.units import format_seconds


@dataclass(frozen=True, slots=True)
class Scaling:
    curves: Mapping[str, Sequence[Prediction]]
    """By label, each in order of its workers."""

    @property
    def best(self) -> str:
        """The highest at its end. Only its band is drawn: several on top of each other say nothing."""
        return max(self.curves, key=lambda label: self.curves[label][-1].scaling_factor)

    @property
    def band(self) -> list[tuple[int, float, float]]:
        """(workers, scaling at the lower edge, at the upper one) of the best: from a busy cluster to a quiet one where
        the network has a band; otherwise of a slow and a fast iteration, p90 and p10, where the profile has iteration
        times."""
        if self.load_band:
            return [(point.workers, *load_range(point)) for point in self.curves[self.best]]
        return [
            (point.workers, perfect_s / point.band.p90_s, perfect_s / point.band.p10_s)
            for point in self.curves[self.best]
            for perfect_s in [point.scaling_factor * point.iteration_s]
            if point.band is not None and point.band.p10_s > 0
        ]

    @property
    def load_band(self) -> bool:
        """The band is the network's, not that of single iterations."""
        return any(point.network_band is not None for point in self.curves[self.best])

    @property
    def counts(self) -> list[int]:
        """Every number of workers, rising."""
        return sorted({point.workers for points in self.curves.values() for point in points})

    @property
    def range_percent(self) -> tuple[float, float]:
        """Where an axis of shares starts and ends."""
        shares = [point.scaling_factor for points in self.curves.values() for point in points]
        shares += [low for _, low, _ in self.band if self.load_band]
        return max(0, 10 * math.floor(10 * min(shares) - 1.5)), max(100, 100 * max(shares)) + 3


def draw_scaling(data: Scaling, *, view: str = "scaling") -> Drawing:
    """`view` is `scaling` (share of perfect) or `throughput` (samples a second)."""
    throughput = view == "throughput"
    traces: list[Drawing] = []
    scale = axis("share of perfect scaling", ticksuffix=" %", range=list(data.range_percent))
    first = next(iter(data.curves.values()))[0]
    alone_per_s = first.samples_per_s / first.workers / first.scaling_factor if first.scaling_factor > 0 else 0.0
    if throughput:
        scale = axis("samples a second", type="log")
        perfect = [count * alone_per_s for count in data.counts]
        stroke = {"color": canvas.GREY, "width": 2.5, "dash": "dot"}
        traces.append(curve("perfect", data.counts, perfect, canvas.GREY, line=stroke, hoverinfo="skip"))
    for index, (label, points) in enumerate(data.curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        values = [point.samples_per_s if throughput else 100 * point.scaling_factor for point in points]
        workers = [point.workers for point in points]
        best = label == data.best
        if best and len(data.band) > 1:
            traces.append(_band(data, colour, alone_per_s if throughput else None))
        traces.append(
            curve(
                html.escape(label),
                workers,
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
                    for point in points
                ],
                hovertemplate="<b>%{fullData.name}</b>, %{x} GPUs%{customdata[4]}<br>%{customdata[1]} of perfect "
                "scaling<br>%{customdata[0]} per iteration<br>%{customdata[2]} samples/s<br>limited by "
                "%{customdata[3]}<extra></extra>",
            )
        )
        if best and (bend := knee(points)) in workers:
            traces.append(_knee(bend, values[workers.index(bend)], colour))
    ticks = [str(count) for count in data.counts]
    return drawn(traces, xaxis=axis("GPUs", type="log", tickvals=data.counts, ticktext=ticks), yaxis=scale, height=420)


def _band(data: Scaling, colour: str, alone_per_s: float | None) -> Drawing:
    """The band as one closed outline: a busy to a quiet cluster, or slow and fast iterations."""
    outline = [(count, fast) for count, _, fast in data.band] + [(count, slow) for count, slow, _ in data.band[::-1]]
    return {
        "type": "scatter",
        "name": f"{html.escape(data.best)}: "
        + ("busy to quiet cluster" if data.load_band else "10th to 90th percentile"),
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
