"""Results as notebooks show them."""

from __future__ import annotations

import html
from typing import Any

from backbeat.model import Prediction
from backbeat.show.figures import canvas
from backbeat.show.figures.timeline import draw_timeline, timeline
from backbeat.show.words.notes import worded
from backbeat.show.words.numbers import format_number, over_bound, scaling_range
from backbeat.units import counted, format_seconds

_MOST_BARS = 300


def prediction_html(prediction: Prediction) -> str:
    """The numbers of a prediction, and its notes."""
    rows = {
        "iteration": f"{format_seconds(prediction.iteration_s)} ({format_seconds(prediction.single_s)} alone)",
        "scaling": f"{prediction.scaling_factor:.1%}"
        + (f", {edges} from a busy to a quiet cluster" if (edges := scaling_range(prediction)) else ""),
        "samples/s": format_number(prediction.samples_per_s),
        "exposed": f"{format_seconds(prediction.exposed_s)}, limited by {prediction.bottleneck}",
        "over bound": f"{over_bound(prediction):.1%}",
        "buckets": f"{prediction.buckets} on {counted(prediction.communicators, 'communicator')}",
    }
    cells = "".join(f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>" for name, text in rows.items())
    title = f"{prediction.strategy} on {prediction.workers} workers"
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in worded(prediction.notes))
    return f"<div><b>{html.escape(title)}</b><table>{cells}</table>{f'<ul>{notes}</ul>' if notes else ''}</div>"


def prediction_figure(prediction: Prediction) -> Any:
    label = f"{prediction.strategy}, {prediction.workers} workers"
    return canvas.figure(draw_timeline(timeline(label, prediction.timeline, most=_MOST_BARS)))
