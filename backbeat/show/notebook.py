"""Results as notebooks show them."""

from __future__ import annotations

import html
from typing import Any

from backbeat.model import Prediction
from backbeat.show.figures import canvas
from backbeat.show.figures.timeline import draw_timeline, timeline
from backbeat.show.words.notes import worded
from backbeat.show.words.numbers import format_number
from backbeat.units import counted, format_bytes, format_seconds

_MOST_BARS = 300


def prediction_html(prediction: Prediction) -> str:
    """The numbers of a prediction, and its notes."""
    one = prediction
    rows = {"step": f"{format_seconds(one.step_s)} ({format_seconds(one.single_s)} alone)"}
    if one.range_s is not None:
        rows["the median in"] = " to ".join(map(format_seconds, one.range_s))
    rows["scaling"] = f"{one.scaling_factor:.1%}"
    rows["samples/s"] = format_number(one.samples_per_s)
    if one.tokens_per_s is not None:
        rows["tokens/s"] = format_number(one.tokens_per_s)
    if one.peak_bytes is not None:
        rows["memory"] = format_bytes(one.peak_bytes) + (f", fits: {one.fits}" if one.fits else "")
    rows["exposed"] = f"{format_seconds(one.exposed_s)}, limited by {one.bottleneck}"
    if one.bound_s:
        rows["over bound"] = f"{max(one.gap, 0.0):.1%}"
    if one.buckets:
        rows["buckets"] = f"{one.buckets} on {counted(one.communicators, 'communicator')}"
    cells = "".join(f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>" for name, text in rows.items())
    title = f"{one.way} on {counted(one.gpus, 'GPU')}"
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in worded(one.notes))
    return f"<div><b>{html.escape(title)}</b><table>{cells}</table>{f'<ul>{notes}</ul>' if notes else ''}</div>"


def prediction_figure(prediction: Prediction) -> Any:
    label = f"{prediction.way}, {counted(prediction.gpus, 'GPU')}"
    return canvas.figure(draw_timeline(timeline(label, prediction.timeline, most=_MOST_BARS)))
