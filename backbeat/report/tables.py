"""Tables for the terminal, and the plain data behind them for `--json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from backbeat.model.source import Source
from backbeat.report.figures.timeline import carries_gradients
from backbeat.units import format_bytes, format_seconds, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backbeat.model import Network, Plan, Prediction, Profile


def gpu_hours(prediction: Prediction, samples: int) -> float:
    """Worker-hours to train on this many samples."""
    if prediction.samples_per_s <= 0:
        return float("inf")
    return samples / prediction.samples_per_s * prediction.workers / 3600


def over_bound(prediction: Prediction) -> float:
    """The gap to the bound; rounding may put a plan that meets it a hair below."""
    return max(prediction.gap, 0.0)


def row(prediction: Prediction, samples: int) -> dict[str, Any]:
    """One prediction as data: what the table shows, without the timeline."""
    fields: dict[str, Any] = msgspec.to_builtins(prediction)
    del fields["timeline"]
    fields["gap"] = prediction.gap
    fields["gpu_hours"] = gpu_hours(prediction, samples)
    return fields


def fastest(predictions: Sequence[Prediction]) -> dict[int, Prediction]:
    """The best prediction for each number of workers; the first listed where two are equal."""
    best: dict[int, Prediction] = {}
    for prediction in predictions:
        known = best.get(prediction.workers)
        if known is None or prediction.iteration_s < known.iteration_s * (1 - 1e-9):
            best[prediction.workers] = prediction
    return best


def scaling_table(predictions: Sequence[Prediction], *, samples: int, title: str) -> Table:
    """Every (workers, strategy) in a row, the fastest of each worker count marked."""
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    banded = any(prediction.band for prediction in predictions)
    for heading in ("workers", "strategy", "scaling", "samples/s", f"GPU-h/{_count(samples)}", "iteration"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    if banded:
        table.add_column("p10–p90", justify="right", no_wrap=True)
    for heading in ("exposed", "over bound", "limited by"):
        table.add_column(heading, justify="left" if heading == "limited by" else "right", no_wrap=True)
    best = fastest(predictions)
    shown: int | None = None
    for prediction in predictions:
        if shown is not None and prediction.workers != shown:
            table.add_section()
        winner = prediction is best[prediction.workers]
        table.add_row(*_cells(prediction, samples, banded, winner, shown), style="bold green" if winner else None)
        shown = prediction.workers
    return table


def _cells(prediction: Prediction, samples: int, banded: bool, winner: bool, shown: int | None) -> list[str]:
    cells = [
        "" if prediction.workers == shown else str(prediction.workers),
        printable(prediction.strategy) + (" ◀" if winner else ""),
        f"{prediction.scaling_factor:.1%}",
        f"{prediction.samples_per_s:,.0f}",
        _three_figures(gpu_hours(prediction, samples)),
        format_seconds(prediction.iteration_s) + ("*" if prediction.extrapolated else ""),
    ]
    if banded:
        band = prediction.band
        cells.append(f"{band.p10_s * 1e3:.1f}–{band.p90_s * 1e3:.1f} ms" if band else "")
    cells += [format_seconds(prediction.exposed_s), f"{over_bound(prediction):+.1%}", prediction.bottleneck]
    return cells


def plan_table(plan: Plan, profile: Profile, result: Prediction) -> Table:
    """The buckets of a plan with when they travel."""
    count = len(plan.buckets)
    title = f"{count} bucket{'' if count == 1 else 's'} in launch order"
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("bucket", "communicator", "gradients", "bytes", "starts", "ends"):
        table.add_column(heading, justify="left" if heading == "gradients" else "right")
    spans = [span for span in result.timeline if carries_gradients(span)]
    for number, span in enumerate(spans):
        table.add_row(
            str(number),
            span.lane.removeprefix("communicator "),
            printable(span.name),
            format_bytes(span.bytes),
            format_seconds(span.start_s),
            format_seconds(span.end_s),
        )
    return table


def zoo_table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    for name, text in rows:
        table.add_row(printable(name), printable(text))
    return table


def describe(profile: Profile, network: Network) -> str:
    """One line on what is being predicted."""
    kind = "analytic" if profile.analytic else "measured"
    device = profile.device.removesuffix(f" ({kind})")
    return (
        f"{profile.model}, batch {profile.batch_size} per worker (weak scaling), {profile.precision} on "
        f"{device} ({kind}): {format_seconds(profile.single_s)} per iteration alone, "
        f"{len(profile.gradients)} gradients, {format_bytes(profile.total_bytes)}; network {named(network)}"
    )


def named(network: Network) -> str:
    """A network's name with its origin: what was never measured must not read as if it had been."""
    return f"{network.name} ({network.source.method})" if isinstance(network.source, Source) else network.name


def _three_figures(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def _count(samples: int) -> str:
    for scale, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if samples >= scale and samples % scale == 0:
            return f"{samples // scale}{unit}"
    return str(samples)
