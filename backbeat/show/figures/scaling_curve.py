"""How the job scales: one line for each way over the number of GPUs, with the range of the best and the knee."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backbeat.answer.answer import Answer
from backbeat.model.prediction import Prediction
from backbeat.show.figures import canvas
from backbeat.show.figures.canvas import COLOURS, Drawing, axis, curve, dots, drawn, translucent
from backbeat.show.words.numbers import format_number
from backbeat.units import format_seconds

HAND_CURVE = "best by hand"
MOST_CURVES = 6
"""More are hard to tell apart; the page's first table has every way."""


@dataclass(frozen=True, slots=True)
class Scaling:
    curves: Mapping[str, Sequence[Prediction]]
    """By label, each in order of its GPUs."""
    best: str
    """Only its range is drawn: several on top of each other say nothing."""
    knee: int | None = None

    @classmethod
    def of(cls, answer: Answer) -> Scaling:
        """The best that people write by hand on sizes of the answer's own, and the best ways that stand at several."""
        curves: dict[str, list[Prediction]] = {HAND_CURVE: [one for _, one in sorted(answer.curve.items())]}
        # The best at the size taken come first.
        for row in sorted(answer.rows, key=lambda row: row.gpus != answer.taken.gpus):
            if row.possible:
                curves.setdefault(row.way, []).append(row.prediction)
        kept = {label: sorted(points, key=lambda one: one.gpus) for label, points in curves.items() if len(points) > 1}
        kept = dict(list(kept.items())[: MOST_CURVES + 1])
        return cls(
            kept or {HAND_CURVE: curves[HAND_CURVE]}, HAND_CURVE if HAND_CURVE in kept or not kept else next(iter(kept))
        )

    @property
    def range(self) -> list[tuple[int, float, float]]:
        """(GPUs, scaling where steps are long, where they are short) of the best."""
        return [
            (
                one.gpus,
                one.scaling_factor * one.step_s / one.range_s[1],
                one.scaling_factor * one.step_s / one.range_s[0],
            )
            for one in self.curves[self.best]
            if one.range_s is not None and one.range_s[0] > 0
        ]

    @property
    def counts(self) -> list[int]:
        """Every number of GPUs, rising."""
        return sorted({one.gpus for points in self.curves.values() for one in points})

    @property
    def top_percent(self) -> float:
        """Where an axis of shares ends; it starts at nothing."""
        return max(100.0, *(100 * one.scaling_factor for points in self.curves.values() for one in points)) + 3


def draw_scaling(data: Scaling, *, view: str = "scaling") -> Drawing:
    """`view` is `scaling` (share of perfect) or `throughput` (samples a second)."""
    throughput = view == "throughput"
    traces: list[Drawing] = []
    scale = axis("share of perfect scaling", ticksuffix=" %", range=[0, data.top_percent])
    first = next(iter(data.curves.values()))[0]
    alone_per_s = first.samples_per_s / first.gpus / first.scaling_factor if first.scaling_factor > 0 else 0.0
    if throughput:
        scale = axis("samples a second", type="log")
        perfect = [count * alone_per_s for count in data.counts]
        stroke = {"color": canvas.GREY, "width": 2.5, "dash": "dot"}
        traces.append(curve("perfect", data.counts, perfect, canvas.GREY, line=stroke, hoverinfo="skip"))
    for index, (label, points) in enumerate(data.curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        values = [one.samples_per_s if throughput else 100 * one.scaling_factor for one in points]
        gpus = [one.gpus for one in points]
        if label == data.best and len(data.range) > 1 and not throughput:
            traces.append(_band(data, colour))
        words = [
            [
                format_seconds(one.step_s),
                f"{one.scaling_factor:.1%}",
                format_number(one.samples_per_s),
                html.escape(one.way),
                " (extrapolated)" if one.extrapolated else "",
            ]
            for one in points
        ]
        hover = (
            "<b>%{customdata[3]}</b>, %{x} GPUs%{customdata[4]}<br>%{customdata[1]} of perfect scaling<br>"
            "%{customdata[0]} a step<br>%{customdata[2]} samples/s<extra></extra>"
        )
        traces.append(curve(html.escape(label), gpus, values, colour, customdata=words, hovertemplate=hover))
        if label == data.best and data.knee in gpus:
            traces.append(_knee(data.knee, values[gpus.index(data.knee)], colour))
    ticks = [str(count) for count in data.counts]
    return drawn(traces, xaxis=axis("GPUs", type="log", tickvals=data.counts, ticktext=ticks), yaxis=scale, height=420)


def _band(data: Scaling, colour: str) -> Drawing:
    """The range as one closed outline."""
    outline = [(count, fast) for count, _, fast in data.range] + [(count, slow) for count, slow, _ in data.range[::-1]]
    return {
        "type": "scatter",
        "name": f"{html.escape(data.best)}: 10th to 90th percentile of the median step",
        "x": [count for count, _ in outline],
        "y": [100 * share for _, share in outline],
        "fill": "toself",
        "fillcolor": translucent(colour, 0.18),
        "line": {"width": 0},
        "mode": "lines",
        "hoverinfo": "skip",
    }


def _knee(gpus: int | None, value: float, colour: str) -> Drawing:
    return dots(
        "knee",
        [float(gpus or 1)],
        [value],
        {"symbol": "diamond", "size": 12, "color": colour, "line": {"width": 2, "color": "#fff"}},
        mode="markers+text",
        text=["knee"],
        textposition="top right",
        hovertemplate="knee: beyond %{x} GPUs an added one brings less than half of its own work<extra></extra>",
        showlegend=False,
    )
