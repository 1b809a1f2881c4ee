"""Figures as plain SVG, for papers and notebooks: no plotly, no browser, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from backbeat.report.draw import COLOURS, shade
from backbeat.report.figures import Scaling, Timeline
from backbeat.units import format_bytes, format_seconds

_FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="13"'
_INK, _RULE, _COMPUTE = "#333333", "#dddddd", "#7d8590"


def scaling(data: Scaling, *, title: str = "", width: int = 720, height: int = 440) -> str:
    """Share of perfect scaling over the number of workers, with the best line's band and knee."""
    left, right, top, bottom = 70, width - 20, 46 if title else 24, height - 86
    counts = sorted({count for line in data.lines for count in line.workers})
    low, high = math.log(counts[0]), math.log(counts[-1])
    least = min(share for line in data.lines for share in line.scaling)
    floor = max(0, 10 * math.floor(10 * least - 1.5))
    ceiling = max(100.0, *(100 * share for line in data.lines for share in line.scaling)) + 2

    def x(count: int) -> float:
        return left + (right - left) * ((math.log(count) - low) / (high - low) if high > low else 0.5)

    def y(share: float) -> float:
        return bottom - (bottom - top) * (100 * share - floor) / (ceiling - floor)

    parts = [_text(width / 2, 24, title, anchor="middle", size=15)] if title else []
    step = 10 if ceiling - floor <= 60 else 20
    for percent in range(floor, 101, step):
        parts.append(_rule(left, y(percent / 100), right, y(percent / 100), _RULE))
        parts.append(_text(left - 8, y(percent / 100) + 4, f"{percent} %", anchor="end"))
    for count in counts:
        parts.append(_rule(x(count), bottom, x(count), bottom + 5, _INK))
        parts.append(_text(x(count), bottom + 20, str(count), anchor="middle"))
    parts.append(_text((left + right) / 2, bottom + 42, "GPUs", anchor="middle"))
    parts.append(
        f'<text x="16" y="{(top + bottom) / 2:.1f}" fill="{_INK}" text-anchor="middle" '
        f'transform="rotate(-90 16 {(top + bottom) / 2:.1f})">share of perfect scaling</text>'
    )
    widest = max(data.lines, key=lambda line: line.scaling[-1])
    for place, line in enumerate(data.lines):
        colour = COLOURS[place % len(COLOURS)]
        if line is widest:
            known = [(count, band) for count, band in zip(line.workers, line.band, strict=True) if band]
            outline = [(x(count), y(band[1])) for count, band in known]
            outline += [(x(count), y(band[0])) for count, band in reversed(known)]
            if len(known) > 1:
                parts.append(f'<polygon points="{_points(outline)}" fill="{colour}" fill-opacity=".18"/>')
        dots = [(x(count), y(share)) for count, share in zip(line.workers, line.scaling, strict=True)]
        parts.append(f'<polyline points="{_points(dots)}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3.5" fill="{colour}"/>' for across, up in dots]
        if line is widest and line.knee is not None:
            across, up = dots[line.workers.index(line.knee)]
            corners = [(across, up - 8), (across + 8, up), (across, up + 8), (across - 8, up)]
            parts.append(f'<polygon points="{_points(corners)}" fill="{colour}" stroke="white" stroke-width="2"/>')
            parts.append(_text(across + 10, up - 10, "knee"))
    parts += _legend([line.label for line in data.lines], left, height - 22, right)
    return _svg(width, height, parts, title or "Scaling")


def timeline(data: Timeline, *, width: int = 720) -> str:
    """One iteration, with what each bar is in its tooltip."""
    left, right, lane_height, top = 92, width - 16, 26, 8
    bottom = top + lane_height * len(data.lanes)
    height = bottom + 40
    end = data.end_s or 1.0
    sizes = [math.log10(bar.bytes) for bar in data.transfers if bar.bytes > 0]
    low, high = (min(sizes), max(sizes)) if sizes else (0.0, 1.0)

    def x(seconds: float) -> float:
        return left + (right - left) * seconds / end

    parts = []
    for place, lane in enumerate(data.lanes):
        parts.append(_text(left - 8, top + lane_height * place + 17, lane, anchor="end"))
    for bar in data.bars:
        up = top + lane_height * data.lanes.index(bar.lane) + 3
        share = (math.log10(max(bar.bytes, 1)) - low) / (high - low) if high > low else 0.5
        fill = _COMPUTE if bar.lane == "compute" else shade(share)
        size = "" if bar.lane == "compute" else f", {format_bytes(bar.bytes)}"
        tip = f"{bar.name}{size}: {format_seconds(bar.start_s)} to {format_seconds(bar.end_s)}"
        across = max(x(bar.end_s) - x(bar.start_s), 0.8)
        parts.append(
            f'<rect x="{x(bar.start_s):.1f}" y="{up}" width="{across:.1f}" height="{lane_height - 6}" fill="{fill}">'
            f"<title>{escape(tip)}</title></rect>"
        )
        if bar.lane == "compute" and across > 60:
            middle = x(bar.start_s) + across / 2
            parts.append(_text(middle, up + 14, bar.name, anchor="middle", colour="white"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(_rule(x(share * end), bottom, x(share * end), bottom + 5, _INK))
        anchor = "end" if share == 1 else "middle"
        parts.append(_text(x(share * end), bottom + 20, format_seconds(share * end), anchor=anchor))
    return _svg(width, height, parts, f"One iteration with {data.label}")


def _legend(labels: Sequence[str], left: float, baseline: float, right: float) -> list[str]:
    parts = []
    each = min((right - left) / max(len(labels), 1), 150)
    for place, label in enumerate(labels):
        start = left + place * each
        parts.append(_rule(start, baseline - 4, start + 18, baseline - 4, COLOURS[place % len(COLOURS)], 3))
        parts.append(_text(start + 24, baseline, label if len(label) < 20 else label[:18] + "…"))
    return parts


def _svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" {_FONT}><title>{escape(title)}</title><rect width="100%" height="100%" fill="white"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, colour: str = _INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _rule(x: float, y: float, x2: float, y2: float, colour: str, thick: float = 1) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{thick}"/>'


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)
