"""How large the gradients are, when backward finishes them, and how their bytes pile up."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbeat.model import Gradient, Profile
from backbeat.report.figures import canvas
from backbeat.report.figures.canvas import Drawing, axis, curve, dots, drawn, mark, ms, upright
from backbeat.report.figures.timeline import Timeline
from backbeat.units import format_bytes, format_seconds

MOST_POINTS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSizes:
    drawn: tuple[Gradient, ...]
    """The largest, in ready order; the smallest are only counted in the sums."""
    left_out: int
    left_out_bytes: int
    ready: tuple[tuple[float, float], ...]
    """(seconds from the start of backward, bytes whose gradients are ready then)."""
    sent: tuple[tuple[float, float], ...]
    """The same for bytes whose bucket has arrived, under the timeline that was given; empty without one."""
    sent_label: str
    backward_s: float


def gradient_sizes(profile: Profile, sent: Timeline | None = None, *, most: int = MOST_POINTS) -> GradientSizes:
    """`sent` is the iteration whose buckets say when bytes have arrived."""
    count, sums = len(profile.gradients), np.cumsum(profile.sizes)
    largest = np.sort(np.argsort(-profile.sizes, kind="stable")[:most])
    drawn = tuple(profile.gradients[index] for index in largest.tolist())
    stairs = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
    return GradientSizes(
        drawn=drawn,
        left_out=count - len(drawn),
        left_out_bytes=profile.total_bytes - sum(gradient.bytes for gradient in drawn),
        ready=((0.0, 0.0), *zip(profile.ready[stairs].tolist(), sums[stairs].tolist(), strict=True)),
        sent=_arrivals(sent) if sent else (),
        sent_label=sent.label if sent else "",
        backward_s=profile.backward_s,
    )


def _arrivals(sent: Timeline) -> tuple[tuple[float, float], ...]:
    begins = [bar.start_s for bar in sent.compute if bar.name == "backward"]
    bars = sorted((bar for bar in sent.transfers if bar.name != "buffers"), key=lambda bar: bar.end_s)
    if not begins or not bars:
        return ()
    sums = np.cumsum([float(bar.bytes) for bar in bars]).tolist()
    return ((0.0, 0.0), *((bar.end_s - begins[-1], total) for bar, total in zip(bars, sums, strict=True)))


def draw_gradient_sizes(data: GradientSizes) -> Drawing:
    def bytes_over_time(name: str, points: Sequence[tuple[float, float]], colour: str, did: str) -> Drawing:
        seconds, sizes = zip(*points, strict=True)
        stroke = {"color": colour, "width": 2, "shape": "hv"}
        hover = f"%{{y:.3s}}B {did} after %{{x:.1f}} ms<extra></extra>"
        return curve(name, ms(seconds), sizes, colour, mode="lines", line=stroke, yaxis="y2", hovertemplate=hover)

    traces = [
        dots(
            "one gradient",
            ms([one.ready_s for one in data.drawn]),
            [one.bytes for one in data.drawn],
            {"color": canvas.BLUE, "size": 6, "opacity": 0.7},
            customdata=[
                [html.escape(one.name), format_bytes(one.bytes), format_seconds(one.ready_s)] for one in data.drawn
            ],
            hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}, ready after %{customdata[2]}<extra></extra>",
        ),
        bytes_over_time("bytes ready", data.ready, canvas.ORANGE, "ready"),
    ]
    if data.sent:
        name = f"bytes arrived with {html.escape(data.sent_label)}"
        traces.append(bytes_over_time(name, data.sent, canvas.GREEN, "arrived"))
    return drawn(
        traces,
        xaxis=axis("milliseconds from the start of backward", anchor="y2"),
        yaxis=axis("bytes each", type="log", domain=[0.54, 1], exponentformat="SI"),
        yaxis2=axis("bytes in all", domain=[0, 0.46], exponentformat="SI"),
        height=520,
        shapes=[upright(data.backward_s * 1e3)],
        annotations=[mark(data.backward_s * 1e3, "backward ends")],
    )
