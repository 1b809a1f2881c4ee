"""Draw the trade-off curves of docs/explanation/results.md: peak memory against time, as measured, one file a model.

python docs/images/tradeoff.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from backbeat.show.figures import plot

DATA = Path(__file__).parents[2] / "validation" / "memory"
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#7f7f7f"
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
    """Points right and up from its point where a label stands, and its side there; otherwise to the right of it."""


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
            "save_on_cpu": (-7, -3, "right"),
            "plain": (-2, -14, "center"),
            "no budget": (0, 8, "left"),
            "dense 5 GB": (-7, -6, "right"),
            "dense 8 GB": (-7, -8, "right"),
            "6 GB": (7, -3, "left"),
            "9 GB": (-13, 0, "right"),
            "4.5 GB": (7, -9, "left"),
            "checkpoint every block": (9, 6, "left"),
            "recompute": (8, -8, "left"),
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
            "plain": (0, 8, "center"),
            "save_on_cpu": (4, 8, "right"),
            "5.7 GB": (7, -8, "left"),
            "checkpoint": (0, -14, "center"),
            "checkpoint every block": (7, -3, "left"),
            "no budget, dense": (-4, -14, "left"),
        },
    ),
)


def main() -> None:
    for picture in PICTURES:
        path = Path(__file__).with_name(f"tradeoff-{picture.model}.svg")
        plot.save(path, partial(draw, picture=picture, series=series_of(picture)), width=7.6, height=5.0)
        print(path)


def series_of(picture: Picture) -> list[Series]:
    """The newest measurement of each row; dense budgets and uniform policies were only run with 25 MiB buckets."""
    small, large, exact, recorded = (
        json.loads((DATA / run / f"{picture.model}.json").read_text())["rows"]
        for run in ("25mib-sampled", "50mib-sampled", "exact-selection", "cuda-graphs")
    )
    now = {name: one for name, one in (large | exact | recorded).items() if "ms" in one}
    whole = row(now, "top-k buckets, updates attached", "no budget")
    within = [row(now, *found) for found in _budgets(now)]
    dense = [row(small, name, name) for name in small if name.startswith("dense ") and name.endswith("GB")]
    alike = [row(small, name, name.removeprefix("uniform: ")) for name in small if name.startswith("uniform: ")]
    own = [row(recorded, name, label) for name, label in USUAL.items() if name in recorded]
    found = [
        Series("top-k in a budget", BLUE, "o", [*within, whole], joined=True),
        Series("dense in a budget", ORANGE, "o", dense, joined=True)
        if dense
        else Series("dense", ORANGE, "o", [row(now, "dense buckets, no memory plan", "no budget, dense")]),
        Series("every block alike", GREEN, "D", alike),
        Series("the usual ways", GREEN, "s", own),
        Series("the usual ways (earlier)", GREY, "s", list(picture.usual)),
    ]
    return [one for one in found if one.points]


def _budgets(rows: dict[str, Any]) -> list[tuple[str, str]]:
    """Compressed rows and their labels, smallest budget first; with residuals on the host where it took that to fit."""
    on_host = ", residuals on the host"
    names = {name.removesuffix(on_host) for name in rows if name.startswith("compressed ")}
    return [
        (name if name in rows else name + on_host, name.removeprefix("compressed "))
        for name in sorted(names, key=lambda name: float(name.split()[1]))
    ]


def row(rows: dict[str, Any], name: str, label: str) -> Point:
    one = rows[name]
    foreseen = (one["predicted_ms"], one["predicted_peak_bytes"] / 1e9) if "predicted_ms" in one else None
    return Point(label, one["ms"], one["peak_bytes"] / 1e9, foreseen)


def draw(figure: Any, picture: Picture, series: list[Series]) -> None:
    """Filled marks are measured; a hollow one, joined to its mark by a dotted line, was predicted for it."""
    axes = figure.add_subplot(title=f"{picture.title}: peak memory against time, one H200", xlabel="one iteration")
    axes.set_xscale("log")
    axes.set_xticks(picture.ticks_ms, [f"{tick:g} ms" for tick in picture.ticks_ms])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g} GB")
    axes.set(xlim=(picture.ticks_ms[0] * 0.93, picture.ticks_ms[-1] * 1.1), ylim=(0, picture.most_gb))
    axes.grid()
    for one in series:
        axes.plot(
            [point.ms for point in one.points],
            [point.gb for point in one.points],
            color=one.colour,
            marker=one.mark,
            linestyle="-" if one.joined else "none",
            linewidth=0.7,
            label=one.name,
        )
        for point in one.points:
            right, up, side = picture.places.get(point.label, (7, -3, "left"))
            axes.annotate(
                point.label, (point.ms, point.gb), (right, up), textcoords="offset points", ha=side, fontsize=8
            )
            if point.predicted is not None:
                ms, gb = point.predicted
                axes.plot([ms, point.ms], [gb, point.gb], color=one.colour, linestyle=":", linewidth=1)
                axes.plot(ms, gb, color=one.colour, marker="o", markersize=5, markerfacecolor="none")
    axes.plot([], [], color=BLUE, marker="o", markersize=5, markerfacecolor="none", linestyle="none", label="predicted")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)


if __name__ == "__main__":
    main()
