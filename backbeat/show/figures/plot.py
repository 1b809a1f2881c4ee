"""Timelines as files of their own: PNG, SVG and PDF by matplotlib."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backbeat.errors import MissingPartError
from backbeat.model.files import write
from backbeat.show.figures.canvas import GREY, shade
from backbeat.show.figures.timeline import Timeline, size_scale
from backbeat.units import format_seconds, printable

_STYLE = {
    "text.parse_math": False,  # names come from files: a $ is a $
    "svg.fonttype": "none",
    "svg.hashsalt": "backbeat",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}
_UNDATED = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_PNG_DOTS_PER_INCH = 200
_LETTER_WIDTH = 0.014
"""Of the time axis: a computation is named inside its bar where the name fits."""


def save(path: Path, draw_on: Callable[[Any], None], *, width: float = 7.2, height: float = 4.4) -> None:
    """Write what `draw_on` puts on an empty matplotlib figure of this many inches. The same figure gives the same
    bytes."""
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    ending, out = path.suffix.lower(), io.BytesIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(width, height), layout="constrained")
        draw_on(figure)
        figure.savefig(out, format=ending[1:], dpi=_PNG_DOTS_PER_INCH, metadata=_UNDATED[ending])
    write(path, out.getvalue())


def timeline(figure: Any, data: Timeline, *, end_s: float | None = None) -> None:
    """One iteration: a lane for computation and one for each communicator, buckets darker where they are larger."""
    end = end_s or data.end_s or 1.0
    axes = figure.add_subplot()
    scale = size_scale([data])
    for index, lane in enumerate(data.lanes):
        bars = [bar for bar in data.bars if bar.lane == lane]
        colours = [GREY if lane == "compute" else shade(scale.share(bar.bytes)) for bar in bars]
        spans = [(bar.start_s, bar.duration_s) for bar in bars]
        axes.broken_barh(spans, (index - 0.39, 0.78), facecolors=colours, edgecolors="white", linewidth=0.3)
        for bar in bars if lane == "compute" else ():
            if bar.duration_s > _LETTER_WIDTH * len(bar.name) * end:
                middle = (bar.start_s + bar.end_s) / 2
                axes.text(middle, index, printable(bar.name), color="white", ha="center", va="center")
    axes.set_yticks(range(len(data.lanes)), data.lanes)
    axes.set_ylim(len(data.lanes) - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.xaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def timeline_height(data: Timeline) -> float:
    """Inches that its lanes take."""
    return 0.5 + 0.3 * len(data.lanes)


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingPartError("images need matplotlib: pip install -e '.[plot]' in the checkout") from None
    return matplotlib
