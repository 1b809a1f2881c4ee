"""Draw the trade-off curves of docs/memory.md: peak memory against time, as measured, one file a model.

python docs/images/tradeoff.py
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "validation" / "memory"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 470, 62, 20, 64, 52
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#7f7f7f"
STYLE = """
 .bg { fill: #ffffff } text { fill: #222222; font: 12px sans-serif } .title { font: bold 14px sans-serif }
 .ink { stroke: #444444; fill: none } .grid { stroke: #dddddd } .small { font-size: 11px }
 @media (prefers-color-scheme: dark) {
  .bg { fill: #161616 } text { fill: #e0e0e0 } .ink { stroke: #bbbbbb } .grid { stroke: #333333 }
 }
"""

USUAL = {
    "plain": "plain",
    "naive top-k, residual and velocity": "naive top-k",
    "checkpoint every block (torch)": "checkpoint",
    "save_on_cpu(pin_memory=True)": "save_on_cpu",
}
"""Rows that the benchmark measured itself."""


@dataclass(frozen=True)
class Point:
    label: str
    ms: float
    gb: float
    predicted: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    name: str
    colour: str
    mark: str
    points: list[Point]
    joined: bool = False


@dataclass(frozen=True)
class Picture:
    model: str
    title: str
    ticks_ms: tuple[float, ...]
    most_gb: float
    usual: tuple[Point, ...]
    """Measured earlier on such a card, bf16, SGD with momentum, by another program than the rest."""
    places: dict[str, tuple[float, float, str]]
    """Where a label stands beside its point, where to the right of it is not the place."""


PICTURES = (
    Picture(
        "resnet152",
        "ResNet-152, batch 256",
        (200, 250, 300, 400, 500, 700, 1000, 1500),
        26,
        (
            Point("plain", 211, 22.8),
            Point("naive top-k", 318, 23.2),
            Point("checkpoint every block", 286, 8.9),
            Point("save_on_cpu", 1522, 2.7),
        ),
        {
            "save_on_cpu": (-9, 4, "end"),
            "plain": (-3, 19, "middle"),
            "no budget": (0, -10, "start"),
            "dense 5 GB": (-9, 8, "end"),
            "dense 8 GB": (-9, 10, "end"),
            "6 GB": (9, 4, "start"),
            "9 GB": (-17, 0, "end"),
            "4.5 GB": (9, 12, "start"),
            "checkpoint every block": (12, -8, "start"),
            "recompute": (10, 10, "start"),
        },
    ),
    Picture(
        "bert_large",
        "BERT-Large classifier, batch 64 × 128 tokens",
        (50, 70, 100, 150, 200, 300, 500),
        18,
        (
            Point("plain", 67, 13.8),
            Point("naive top-k", 151, 16.4),
            Point("checkpoint every block", 108, 6.1),
            Point("save_on_cpu", 523, 5.2),
        ),
        {
            "plain": (0, -10, "middle"),
            "save_on_cpu": (6, -10, "end"),
            "5.7 GB": (9, 10, "start"),
            "checkpoint": (0, 18, "middle"),
            "checkpoint every block": (9, 4, "start"),
            "no budget, dense": (-6, 19, "start"),
        },
    ),
)


def main() -> None:
    for picture in PICTURES:
        path = Path(__file__).with_name(f"tradeoff-{picture.model}.svg")
        path.write_text(draw(picture, series_of(picture)))
        print(path)


def series_of(picture: Picture) -> list[Series]:
    """The newest measurement of each row; dense budgets and uniform policies were only run first."""
    first, second, third, fourth = (
        json.loads((DATA / run / f"{picture.model}.json").read_text())["rows"]
        for run in ("first", "second", "third", "fourth")
    )
    now = {name: one for name, one in (second | third | fourth).items() if "ms" in one}
    whole = row(now, "top-k groups, updates attached", "no budget")
    sparse = [row(now, *found) for found in _budgets(now)]
    dense = [row(first, name, name) for name in first if name.startswith("dense ") and name.endswith("GB")]
    alike = [row(first, name, name.removeprefix("uniform: ")) for name in first if name.startswith("uniform: ")]
    own = [row(fourth, name, label) for name, label in USUAL.items() if name in fourth]
    found = [
        Series("top-k in a budget", BLUE, "circle", [*sparse, whole], joined=True),
        Series("dense in a budget", ORANGE, "circle", dense, joined=True)
        if dense
        else Series("dense", ORANGE, "circle", [row(now, "dense groups, no memory plan", "no budget, dense")]),
        Series("every block alike", GREEN, "diamond", alike),
        Series("the usual ways", GREEN, "square", own),
        Series("the usual ways (earlier)", GREY, "square", list(picture.usual)),
    ]
    return [one for one in found if one.points]


def _budgets(rows: dict[str, Any]) -> list[tuple[str, str]]:
    """Sparse rows and their labels, smallest budget first; with residuals on the host where it took that to fit."""
    on_host = ", residuals on the host"
    names = {name.removesuffix(on_host) for name in rows if name.startswith("sparse ")}
    return [
        (name, name[7:]) if name in rows else (name + on_host, name[7:])
        for name in sorted(names, key=lambda name: float(name.split()[1]))
    ]


def row(rows: dict[str, Any], name: str, label: str) -> Point:
    one = rows[name]
    foreseen = (one["predicted_ms"], one["predicted_peak_bytes"] / 1e9) if "predicted_ms" in one else None
    return Point(label, one["ms"], one["peak_bytes"] / 1e9, foreseen)


def draw(picture: Picture, series: list[Series]) -> str:
    low, high = picture.ticks_ms[0] * 0.93, picture.ticks_ms[-1] * 1.1
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(ms: float) -> float:
        return LEFT + width * math.log(ms / low) / math.log(high / low)

    def y(gb: float) -> float:
        return TOP + height * (1 - gb / picture.most_gb)

    parts = [
        f'<rect class="bg" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="22">{escape(picture.title)}: peak memory against time, one H200</text>',
    ]
    for tick in picture.ticks_ms:
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" y1="{TOP}" x2="{x(tick):.1f}" y2="{TOP + height}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{TOP + height + 18}" text-anchor="middle">{tick:g} ms</text>')
    for gb in range(0, int(picture.most_gb) + 1, 4):
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y(gb):.1f}" x2="{LEFT + width}" y2="{y(gb):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(gb) + 4:.1f}" text-anchor="end">{gb} GB</text>')
    parts.append(f'<rect class="ink" x="{LEFT}" y="{TOP}" width="{width}" height="{height}"/>')
    parts.append(f'<text x="{LEFT + width / 2}" y="{HEIGHT - 12}" text-anchor="middle">one iteration</text>')
    for one in series:
        if one.joined:
            places = " ".join(f"{x(point.ms):.1f},{y(point.gb):.1f}" for point in one.points)
            parts.append(f'<polyline points="{places}" fill="none" stroke="{one.colour}" stroke-opacity="0.5"/>')
        for point in one.points:
            parts += _point(point, one, picture, x, y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img"><title>{escape(picture.title)}: peak memory against time</title>\n<style>{STYLE}</style>\n'
        + "\n".join([*parts, *_legend(series)])
        + "\n</svg>\n"
    )


def _point(point: Point, series: Series, picture: Picture, x: Any, y: Any) -> list[str]:
    parts = []
    if point.predicted is not None:
        ms, gb = point.predicted
        ends = f'x1="{x(ms):.1f}" y1="{y(gb):.1f}" x2="{x(point.ms):.1f}" y2="{y(point.gb):.1f}"'
        parts.append(f'<line {ends} stroke="{series.colour}" stroke-dasharray="2 3"/>')
        parts.append(
            f'<circle cx="{x(ms):.1f}" cy="{y(gb):.1f}" r="3.5" fill="none" stroke="{series.colour}">'
            f"<title>{escape(point.label)}, predicted: {ms:.1f} ms, {gb:.2f} GB</title></circle>"
        )
    dx, dy, anchor = picture.places.get(point.label, (9, 4, "start"))
    told = f"{point.label}: {point.ms:.1f} ms, {point.gb:.2f} GB"
    parts.append(_mark(series, x(point.ms), y(point.gb), told))
    parts.append(
        f'<text class="small" x="{x(point.ms) + dx:.1f}" y="{y(point.gb) + dy:.1f}" text-anchor="{anchor}">'
        f"{escape(point.label)}</text>"
    )
    return parts


def _mark(series: Series, x: float, y: float, told: str) -> str:
    title = f"<title>{escape(told)}</title>" if told else ""
    if series.mark == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{series.colour}">{title}</circle>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if series.mark == "diamond" else ""
    box = f'x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"'
    return f'<rect {box}{turn} fill="{series.colour}">{title}</rect>'


def _legend(series: list[Series]) -> list[str]:
    parts, at = [], float(LEFT + 6)
    for one in series:
        parts.append(_mark(one, at, 44, ""))
        parts.append(f'<text class="small" x="{at + 9}" y="48">{escape(one.name)}</text>')
        at += 24 + 6.4 * len(one.name)
    colour = series[0].colour
    parts.append(f'<circle cx="{at}" cy="44" r="3.5" fill="none" stroke="{colour}"/>')
    parts.append(f'<text class="small" x="{at + 8}" y="48">predicted</text>')
    return parts


if __name__ == "__main__":
    main()
