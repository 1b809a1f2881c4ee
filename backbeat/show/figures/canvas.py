"""What all drawings share: colours; layout, lines, bars and marks as plotly takes them, in plain dictionaries.

Colours of paper, text and grid are left to whoever shows a drawing, so that it serves light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Drawing = dict[str, Any]

GREY, BLUE, ORANGE, GREEN, PURPLE, ROSE = "#7d8590", "#2f81c7", "#d9822b", "#17926b", "#a35bb5", "#c94f6d"
COLOURS = (GREY, BLUE, ORANGE, GREEN, PURPLE, ROSE, "#5aa9c9", "#9a8b2f")
"""Strategies in order; the first, stock DDP, is grey. All are readable on white and on near-black."""
SHADES = ("#8fd0c4", "#3aa0b8", "#2f62a8", "#4a3d9e")
"""Small buckets to large ones."""


def figure(drawing: Drawing) -> Any:
    import plotly.graph_objects as go

    return go.Figure(drawing)


def drawn(traces: Sequence[Drawing], **layout: Any) -> Drawing:
    """Traces on axes, with the layout that all figures share."""
    common = {"margin": {"l": 64, "r": 24, "t": 24, "b": 56}, "legend": legend(1.02), "hoverlabel": {"align": "left"}}
    return {"data": list(traces), "layout": {**common, **layout}}


def legend(y: float, **more: Any) -> Drawing:
    return {"orientation": "h", "x": 0, "y": y, "yanchor": "bottom", "traceorder": "normal", **more}


def axis(title: str, **more: Any) -> Drawing:
    return {"title": {"text": title}, **more}


def curve(name: str, x: Sequence[float], y: Sequence[float], colour: str, **more: Any) -> Drawing:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": colour, "width": 2.5},
        "marker": {"size": 7, "color": colour},
        **more,
    }


def dots(name: str, x: Sequence[float], y: Sequence[Any], marker: Drawing, **more: Any) -> Drawing:
    return {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": marker, **more}


def translucent(colour: str, opacity: float) -> str:
    return f"rgba({','.join(map(str, _rgb(colour)))},{opacity})"


def bar(name: str, labels: Sequence[str], values: Sequence[float], colour: str | Sequence[str], **more: Any) -> Drawing:
    """Lying bars, one for each label, all of a colour or each of its own."""
    marker = {"color": colour}
    return {"type": "bar", "orientation": "h", "name": name, "y": labels, "x": values, "marker": marker, **more}


def stacked(name: str, labels: Sequence[str], values: Sequence[float], words: Sequence[str], colour: str) -> Drawing:
    """One kind of what bars are piled up from, with each value in words."""
    hover = "<b>%{fullData.name}</b>: %{customdata}<extra></extra>"
    return bar(name, labels, values, colour, customdata=words, hovertemplate=hover)


def upright(x: float) -> Drawing:
    stroke = {"dash": "dash", "width": 1.5, "color": ROSE}
    return {"type": "line", "x0": x, "x1": x, "xref": "x", "y0": 0, "y1": 1, "yref": "paper", "line": stroke}


def mark(x: float, text: str) -> Drawing:
    return {"x": x, "xref": "x", "y": 1, "yref": "paper", "text": text, "showarrow": False, "yanchor": "bottom"}


def shade(share: float) -> str:
    """The colour of a bucket at this share of the way from the smallest to the largest."""
    stops = np.linspace(0, 1, len(SHADES))
    channels = zip(*map(_rgb, SHADES), strict=True)
    return "#" + "".join(f"{round(float(np.interp(share, stops, channel))):02x}" for channel in channels)


def _rgb(colour: str) -> list[int]:
    return [int(colour[index : index + 2], 16) for index in (1, 3, 5)]


def ms(seconds: Sequence[float]) -> list[float]:
    return [one * 1e3 for one in seconds]
