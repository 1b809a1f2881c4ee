"""What all drawings share: colours; layout, lines and marks as plotly takes them, in plain dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Drawing = dict[str, Any]

COLOURS = ("#7d8590", "#2f81c7", "#d9822b", "#17926b", "#a35bb5", "#c94f6d", "#5aa9c9", "#9a8b2f")
"""Strategies in order; the first, stock DDP, is grey. All are readable on white and on near-black."""
COMPUTE = "#7d8590"
SIZES = ("#8fd0c4", "#3aa0b8", "#2f62a8", "#4a3d9e")
"""Small buckets to large ones."""


def figure(drawing: Drawing) -> Any:
    """The drawing as a plotly figure."""
    from backbeat.errors import MissingPartError

    try:
        import plotly.graph_objects as go
    except ImportError:
        raise MissingPartError("figures need plotly: pip install plotly") from None
    return go.Figure(drawing)


def axes(**more: Any) -> Drawing:
    return {
        "margin": {"l": 64, "r": 24, "t": 24, "b": 56},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {"align": "left"},
        "dragmode": "zoom",
        **more,
    }


def curve(name: str, x: Sequence[float], y: Sequence[float], colour: str, **more: Any) -> Drawing:
    stroke = {"color": colour, "width": 2.5}
    if "dash" in more:
        stroke["dash"] = more.pop("dash")
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": stroke,
        "marker": {"size": 7, "color": colour},
        **more,
    }


def upright(x: float) -> Drawing:
    stroke = {"dash": "dash", "width": 1.5, "color": "#c94f6d"}
    return {"type": "line", "x0": x, "x1": x, "xref": "x", "y0": 0, "y1": 1, "yref": "paper", "line": stroke}


def mark(x: float, text: str) -> Drawing:
    return {"x": x, "xref": "x", "y": 1, "yref": "paper", "text": text, "showarrow": False, "yanchor": "bottom"}


def shade(share: float) -> str:
    """The colour of a bucket at this share of the way from the smallest to the largest."""
    place = min(max(share, 0.0), 1.0) * (len(SIZES) - 1)
    below = min(int(place), len(SIZES) - 2)
    part = place - below
    mixed = [round(one + part * (two - one)) for one, two in zip(rgb(SIZES[below]), rgb(SIZES[below + 1]), strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def rgb(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
