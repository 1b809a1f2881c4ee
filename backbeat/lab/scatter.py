"""Measured against predicted, as one SVG file that needs nothing else."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from backbeat.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backbeat.lab.records import Outcome

_SIZE, _LEFT, _TOP, _LEGEND = 480, 70, 36, 190
_BOTTOM = 52
# Told apart by people who cannot tell red from green, on white and on black.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f7f7f", "#8b4513")
_STYLE = """
 .bg { fill: #ffffff } .ink { stroke: #444444; fill: none } text { fill: #222222; font: 12px sans-serif }
 .grid { stroke: #dddddd } .near { stroke: #999999; stroke-dasharray: 4 4 } .title { font: bold 14px sans-serif }
 @media (prefers-color-scheme: dark) {
  .bg { fill: #161616 } .ink { stroke: #bbbbbb } text { fill: #e0e0e0 } .grid { stroke: #333333 }
 }
"""
_BAND = 0.05


def scatter(outcomes: Sequence[Outcome], title: str) -> str:
    """Both axes logarithmic; filled dots repeat within the limit, hollow ones do not; the dashed lines are ± 5 %."""
    from backbeat.lab.statistics import REPEATS_WITHIN, grouped

    times = [value for one in outcomes for value in (one.measured_s, one.predicted_s)] or [0.01, 1.0]
    low, high = _limits(min(times), max(times))

    def x(seconds: float) -> float:
        return _LEFT + _SIZE * math.log(seconds / low) / math.log(high / low)

    def y(seconds: float) -> float:
        return _TOP + _SIZE - _SIZE * math.log(seconds / low) / math.log(high / low)

    parts = [
        f'<rect class="bg" width="{_LEFT + _SIZE + _LEGEND}" height="{_TOP + _SIZE + _BOTTOM}"/>',
        f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>',
    ]
    for tick in _ticks(low, high):
        parts += [
            f'<line class="grid" x1="{x(tick):.1f}" y1="{_TOP}" x2="{x(tick):.1f}" y2="{_TOP + _SIZE}"/>',
            f'<line class="grid" x1="{_LEFT}" y1="{y(tick):.1f}" x2="{_LEFT + _SIZE}" y2="{y(tick):.1f}"/>',
            f'<text x="{x(tick):.1f}" y="{_TOP + _SIZE + 18}" text-anchor="middle">{format_seconds(tick)}</text>',
            f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{format_seconds(tick)}</text>',
        ]
    parts.append(f'<line class="ink" x1="{x(low):.1f}" y1="{y(low):.1f}" x2="{x(high):.1f}" y2="{y(high):.1f}"/>')
    for share in (1 + _BAND, 1 / (1 + _BAND)):
        first, last = (low, high / share) if share > 1 else (low / share, high)
        parts.append(
            f'<line class="near" x1="{x(first):.1f}" y1="{y(first * share):.1f}" '
            f'x2="{x(last):.1f}" y2="{y(last * share):.1f}"/>'
        )
    parts.append(f'<rect class="ink" x="{_LEFT}" y="{_TOP}" width="{_SIZE}" height="{_SIZE}"/>')
    parts.append(f'<text x="{_LEFT + _SIZE / 2}" y="{_TOP + _SIZE + 42}" text-anchor="middle">measured</text>')
    middle = _TOP + _SIZE / 2
    parts.append(f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">predicted</text>')
    for place, (setting, members) in enumerate(grouped(outcomes, lambda one: one.setting).items()):
        colour = _COLOURS[place % len(_COLOURS)]
        for one in members:
            fill = colour if one.repeat <= REPEATS_WITHIN else "none"
            label = f"{one.model}, {one.plan}: {one.error:+.1%}, repeats within {one.repeat:.1%}"
            parts.append(
                f'<circle cx="{x(one.measured_s):.1f}" cy="{y(one.predicted_s):.1f}" r="3.2" fill="{fill}" '
                f'fill-opacity="0.7" stroke="{colour}"><title>{escape(label)}</title></circle>'
            )
        height = _TOP + 14 + 20 * place
        parts.append(f'<circle cx="{_LEFT + _SIZE + 18}" cy="{height - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + _SIZE + 28}" y="{height}">{escape(setting)} ({len(members)})</text>')
    width, height = _LEFT + _SIZE + _LEGEND, _TOP + _SIZE + _BOTTOM
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<style>{_STYLE}</style>\n{body}\n</svg>\n"
    )


def _limits(smallest: float, largest: float) -> tuple[float, float]:
    return smallest / 1.15, largest * 1.15


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between the limits.

    >>> _ticks(0.015, 0.3)
    [0.02, 0.05, 0.1, 0.2]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [round(digit * 10.0**power, 12) for power in range(first, last + 1) for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]
