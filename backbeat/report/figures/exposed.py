"""Where the exposed time comes from, for each strategy at one number of workers."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

from backbeat.model import Prediction
from backbeat.report.figures import canvas
from backbeat.report.figures.canvas import Drawing, axis, bar, drawn, ms
from backbeat.units import format_seconds

PARTS = {
    "bandwidth": ("the link is too slow for the bytes", canvas.BLUE),
    "latency": ("latency of messages", canvas.ORANGE),
    "waiting": ("held back by late gradients", canvas.PURPLE),
    "stragglers": ("waiting for the slowest worker", canvas.GREY),
    "buffers": ("broadcasting buffers", canvas.GREEN),
    "contention": ("computation slowed down by communication", canvas.ROSE),
    "gather": ("gathering updated parameters", "#9a8b2f"),
    "copies": ("copying into and out of collectives' buffers", "#4f7f8b"),
    "host": ("waiting for the host to issue work", "#5aa9c9"),
}
"""In words, and the colour of each."""


def exposed_parts(predictions: Iterable[Prediction]) -> dict[str, list[float]]:
    """Seconds of each part, one for each prediction. Parts that are nowhere present are left out."""
    rows = list(predictions)
    # The host's is negative where communication takes the place of waiting for it.
    parts = {name: [max(getattr(row.breakdown, f"{name}_s"), 0.0) for row in rows] for name in PARTS}
    return {name: values for name, values in parts.items() if any(values)}


def draw_exposed(predictions: Mapping[str, Prediction]) -> Drawing:
    """Parts piled up, a bar for each label."""
    labels = [html.escape(label) for label in predictions]
    hover = "<b>%{y}</b><br>%{fullData.name}: %{customdata}<extra></extra>"
    traces = [
        bar(
            PARTS[part][0],
            labels,
            ms(values),
            PARTS[part][1],
            customdata=[format_seconds(seconds) for seconds in values],
            hovertemplate=hover,
        )
        for part, values in exposed_parts(predictions.values()).items()
    ]
    return drawn(
        traces,
        barmode="stack",
        xaxis=axis("milliseconds added to each iteration", rangemode="tozero"),
        yaxis={"type": "category", "autorange": "reversed"},
        height=190 + 34 * len(labels),
    )
