"""Where the exposed time comes from, for each strategy at one number of workers."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass

from backbeat.model import Prediction
from backbeat.report.figures import canvas
from backbeat.report.figures.canvas import Drawing, axis, bar, drawn, ms
from backbeat.units import format_seconds

PARTS = {
    "bandwidth": "the link is too slow for the bytes",
    "latency": "latency of messages",
    "waiting": "held back by late gradients",
    "stragglers": "waiting for the slowest worker",
    "buffers": "broadcasting buffers",
    "contention": "computation slowed down by communication",
    "gather": "gathering updated parameters",
    "copies": "copying into and out of collectives' buffers",
    "host": "waiting for the host to issue work",
}
PART_COLOURS = {
    "bandwidth": canvas.BLUE,
    "latency": canvas.ORANGE,
    "waiting": canvas.PURPLE,
    "stragglers": canvas.GREY,
    "buffers": canvas.GREEN,
    "contention": canvas.ROSE,
    "gather": "#9a8b2f",
    "copies": "#4f7f8b",
    "host": "#5aa9c9",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    single_s: float
    labels: tuple[str, ...]
    parts: Mapping[str, tuple[float, ...]]
    """Seconds of each part, one for each label. Parts that are nowhere present are left out."""
    totals: tuple[float, ...]


def exposed(predictions: Mapping[str, Prediction]) -> Exposed:
    rows = list(predictions.values())
    # The host's is negative where communication takes the place of waiting for it.
    parts = {name: tuple(max(getattr(row.breakdown, f"{name}_s"), 0.0) for row in rows) for name in PARTS}
    return Exposed(
        single_s=rows[0].single_s,
        labels=tuple(predictions),
        parts={name: values for name, values in parts.items() if any(value > 0 for value in values)},
        totals=tuple(row.exposed_s for row in rows),
    )


def draw_exposed(data: Exposed) -> Drawing:
    labels = [html.escape(label) for label in data.labels]
    hover = "<b>%{y}</b><br>%{fullData.name}: %{customdata}<extra></extra>"
    traces = [
        bar(
            PARTS[part],
            labels,
            ms(values),
            PART_COLOURS[part],
            customdata=[format_seconds(seconds) for seconds in values],
            hovertemplate=hover,
        )
        for part, values in data.parts.items()
    ]
    return drawn(
        traces,
        barmode="stack",
        xaxis=axis("milliseconds added to each iteration", rangemode="tozero"),
        yaxis={"type": "category", "autorange": "reversed"},
        height=190 + 34 * len(labels),
    )
