"""Figures as files of their own: PNG, SVG and PDF by matplotlib, an interactive page by plotly."""

from __future__ import annotations

import html
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backbeat.errors import InputError, MissingPartError
from backbeat.model.files import write
from backbeat.model.prediction import knee
from backbeat.show.figures import canvas
from backbeat.show.figures.canvas import COLOURS, GREY, shade
from backbeat.show.figures.scaling_curve import Scaling, draw_scaling
from backbeat.show.figures.timeline import Timeline, size_scale
from backbeat.units import format_seconds, printable

IMAGES = (".png", ".svg", ".pdf")
ENDINGS = (*IMAGES, ".html")
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


def check(path: Path) -> None:
    """Refuse a name before anything is computed for it."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise InputError(f"{path}: a plot ends in {', '.join(ENDINGS)}: choose one of them")
    if ending in IMAGES:
        _matplotlib()


def save_scaling(data: Scaling, path: Path, *, title: str = "") -> None:
    if path.suffix.lower() == ".html":
        drawing = canvas.figure(draw_scaling(data)).update_layout(title=html.escape(title), margin={"t": 90})
        write(path, drawing.to_html(config={"showSendToCloud": False, "plotlyServerURL": ""}).encode())
    else:
        save(path, lambda figure: scaling(figure, data, title=title))


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


def scaling(figure: Any, data: Scaling, *, title: str = "") -> None:
    """Share of perfect scaling over the number of workers, with the best line's band and knee."""
    axes = figure.add_subplot(title=printable(title), xlabel="GPUs", ylabel="share of perfect scaling")
    axes.set_xscale("log")
    axes.set_xticks(data.counts, [str(count) for count in data.counts])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:.0f} %")
    axes.grid(axis="y")
    lines = []
    for index, (label, points) in enumerate(data.curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        workers = [point.workers for point in points]
        percent = [100 * point.scaling_factor for point in points]
        lines += axes.plot(workers, percent, color=colour, marker="o", markersize=4.5, linewidth=2)
        if label != data.best:
            continue
        counts, slow, fast = ([point[column] for point in data.band] for column in range(3))
        axes.fill_between(
            counts, [100 * one for one in slow], [100 * one for one in fast], color=colour, alpha=0.18, linewidth=0
        )
        if (bend := knee(points)) in workers:
            at = bend, percent[workers.index(bend)]
            axes.plot(*at, color=colour, marker="D", markersize=9, markeredgecolor="white", zorder=3)
            axes.annotate("knee", at, xytext=(8, 8), textcoords="offset points")
    axes.set_ylim(data.range_percent)
    # matplotlib leaves names with an underscore in front out of a legend.
    names = [f" {name}" if name.startswith("_") else name for name in map(printable, data.curves)]
    figure.legend(lines, names, loc="outside lower center", ncols=min(len(names), 4))


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
