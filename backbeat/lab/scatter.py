"""Measured against predicted, as one picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backbeat.report import plot
from backbeat.units import format_seconds, printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from backbeat.lab.records import Outcome

# Told apart by people who cannot tell red from green.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f7f7f", "#8b4513")
_BAND = 0.05


def save(outcomes: Sequence[Outcome], path: Path) -> None:
    plot.save(path, lambda figure: scatter(figure, outcomes), width=8.0, height=5.6)


def scatter(figure: Any, outcomes: Sequence[Outcome]) -> None:
    """Both axes logarithmic; filled dots repeat within the limit, hollow ones do not; the dashed lines are ± 5 %."""
    from matplotlib.ticker import LogLocator, NullLocator

    from backbeat.lab.statistics import REPEATS_WITHIN, grouped

    title = f"One iteration, {len(outcomes)} cases: predicted against measured"
    axes = figure.add_subplot(title=title, xlabel="measured", ylabel="predicted", aspect="equal")
    times = [value for one in outcomes for value in (one.measured_s, one.predicted_s)]
    ends = min(times, default=0.01) / 1.15, max(times, default=1.0) * 1.15
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
        axis.set_minor_locator(NullLocator())
    axes.grid()
    axes.plot(ends, ends, color="#444444", linewidth=1)
    for share in (1 + _BAND, 1 / (1 + _BAND)):
        axes.plot(ends, [share * end for end in ends], color="#999999", linewidth=1, linestyle="--")
    for place, (setting, members) in enumerate(grouped(outcomes, lambda one: one.setting).items()):
        colour = _COLOURS[place % len(_COLOURS)]
        axes.scatter([], [], color=colour, label=f"{printable(setting)} ({len(members)})")
        axes.scatter(
            [one.measured_s for one in members],
            [one.predicted_s for one in members],
            s=16,
            facecolors=[(colour, 0.7) if one.repeat <= REPEATS_WITHIN else "none" for one in members],
            edgecolors=colour,
        )
    axes.set(xlim=ends, ylim=ends)
    if outcomes:
        figure.legend(loc="outside right upper")
