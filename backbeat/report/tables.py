"""Tables for the terminal, and the plain data behind them for `--json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import groupby
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from backbeat.model import Network, Plan, Prediction, Profile
from backbeat.model.files import Source
from backbeat.units import counted, format_bytes, format_seconds, printable

WINNER = "bold green"
"""The style of the row to take."""
SAME = 5e-4
"""Two times closer than this share are called equal: they print alike, and no measurement tells them apart."""


def gpu_hours(prediction: Prediction, samples: float) -> float:
    """Worker-hours to train on this many samples."""
    if prediction.samples_per_s <= 0:
        return float("inf")
    return samples / prediction.samples_per_s * prediction.workers / 3600


def over_bound(prediction: Prediction) -> float:
    """The gap to the bound; rounding may put a plan that meets it a hair below."""
    return max(prediction.gap, 0.0)


def load_range(prediction: Prediction) -> tuple[float, float]:
    """Scaling on a busy cluster and on a quiet one; the same twice where the network has no band."""
    band = prediction.network_band
    if band is None:
        return prediction.scaling_factor, prediction.scaling_factor
    return band.busy_scaling_factor, band.quiet_scaling_factor


def scaling_range(prediction: Prediction, digits: int = 0) -> str:
    """Scaling from a busy cluster to a quiet one; empty where the network has no band, or it does not show."""
    low, high = (f"{100 * share:.{digits}f}" for share in load_range(prediction))
    return f"{low}–{high}%" if low != high else ""


def work_range(prediction: Prediction) -> tuple[str, str]:
    """How many GPUs' work it does, on a busy cluster and on a quiet one; the same twice without a band."""
    low, high = (format_number(prediction.workers * share) for share in load_range(prediction))
    return low, high


def format_number(value: float) -> str:
    """
    >>> format_number(1234.5), format_number(12.34), format_number(1.234)
    ('1,234', '12.3', '1.23')
    """
    if value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def row(prediction: Prediction, samples: int) -> dict[str, Any]:
    """One prediction as data: what the table shows, without the timeline."""
    fields: dict[str, Any] = msgspec.to_builtins(prediction)
    del fields["timeline"]
    fields["gap"] = prediction.gap
    fields["gpu_hours"] = gpu_hours(prediction, samples)
    return fields


def fastest(predictions: Sequence[Prediction]) -> dict[int, Prediction]:
    """The best prediction for each number of workers; the first listed of those that nobody could tell apart."""
    least: dict[int, float] = {}
    for one in predictions:
        least[one.workers] = min(one.iteration_s, least.get(one.workers, one.iteration_s))
    best: dict[int, Prediction] = {}
    for one in predictions:
        if one.iteration_s <= least[one.workers] * (1 + SAME):
            best.setdefault(one.workers, one)
    return best


def scaling_tables(predictions: Sequence[Prediction], *, samples: int, width: int) -> list[Table]:
    """Every (workers, strategy) in a row, the fastest of each worker count marked; two tables of half the columns each
    where one is wider than `width`."""
    headings = ["scaling", "busy–quiet", "iteration", "p10–p90", "exposed", "over bound", f"GPU-h/{_count(samples)}"]
    headings += ["samples/s", "limited by"]
    # Strategies that print alike share a row.
    alike: _Alike = {}
    for one in predictions:
        alike.setdefault(one.workers, {}).setdefault(_cells(one, samples), []).append(one)
    half = headings.index("exposed")
    whole = _scaling_table(alike, headings)
    if natural_width(whole) <= width:
        return [whole]
    return [_scaling_table(alike, headings[:half]), _scaling_table(alike, headings[half:], half)]


_Alike = dict[int, dict[tuple[str, ...], list[Prediction]]]
"""For each number of workers the cells of a row, and those that share it."""


def _scaling_table(alike: _Alike, headings: Sequence[str], first: int = 0) -> Table:
    """The columns under these headings, whose cells stand from `first` on, as far as they hold anything."""
    every = [cells for rows in alike.values() for cells in rows]
    indices = [index for index in range(first, first + len(headings)) if any(cells[index] for cells in every)]
    table = plain_table()
    for heading in ("GPUs", "strategy", *(headings[index - first] for index in indices)):
        left = heading in ("strategy", "limited by")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "strategy", overflow="fold")
    for count, rows in alike.items():
        best = fastest([one for ones in rows.values() for one in ones])[count]
        for row_index, (cells, ones) in enumerate(rows.items()):
            # Where all are equal nobody has won.
            winner = len(rows) > 1 and best in ones
            names = ", ".join(printable(one.strategy) for one in ones) + (" ◀" if winner else "")
            shown = (cells[index] for index in indices)
            table.add_row("" if row_index else str(count), names, *shown, style=WINNER if winner else None)
        table.add_section()
    return table


def natural_width(table: Table) -> int:
    """The columns of a terminal that it takes without wrapping."""
    # Without a height rich takes a dumb terminal's 80 columns.
    console = Console(width=1000, height=25)
    return Measurement.get(console, console.options, table).maximum


def _cells(prediction: Prediction, samples: int) -> tuple[str, ...]:
    band = prediction.band
    return (
        f"{prediction.scaling_factor:.1%}",
        scaling_range(prediction, 1),
        format_seconds(prediction.iteration_s) + ("*" if prediction.extrapolated else ""),
        f"{band.p10_s * 1e3:.1f}–{band.p90_s * 1e3:.1f} ms" if band else "",
        format_seconds(prediction.exposed_s),
        f"{over_bound(prediction):+.1%}",
        _three_figures(gpu_hours(prediction, samples)),
        format_number(prediction.samples_per_s),
        prediction.bottleneck,
    )


_SCREEN = 80
_LONG_NAME = 10
"""Headings above this many letters are broken."""


def answer_table(
    curves: Mapping[str, Sequence[Prediction]],
    *,
    stock: str,
    cost: tuple[str, Callable[[Prediction], str]] | None,
    too_big: Set[str] = frozenset(),
) -> Table:
    """One row for each number of GPUs: stock DDP or what the job runs today, the others beside it, and what limits the
    fastest.

    `best` alone is headed as planned. The gain is that of the fastest of them, and negative where `stock` is faster.
    What is `too_big` for the device's memory shows no figure. Where the network has a band, the fastest's scaling is
    shown from a busy cluster to a quiet one, too. Neighbouring rows that print alike share one.
    """
    others = [label for label in curves if label != stock]
    compared = stock not in too_big and not too_big >= set(others)
    at = {label: {point.workers: point for point in curve} for label, curve in curves.items()}
    best = fastest([point for label, curve in curves.items() for point in curve if label not in too_big])

    def cells_at(count: int) -> tuple[str, ...]:
        winner, gain = best[count], ""
        if compared:
            shortest = min(at[label][count].iteration_s for label in others if label not in too_big)
            more = at[stock][count].iteration_s / shortest - 1 if shortest > 0 else 0.0
            gain = "none" if abs(more) < SAME else f"{more:+.1%}"
        shares = (
            "too big" if label in too_big else f"{at[label][count].scaling_factor:.1%}" for label in (stock, *others)
        )
        mark = "*" if winner.extrapolated else ""
        return (mark, *shares, gain, scaling_range(winner), cost[1](winner) if cost else "", winner.bottleneck)

    rows = []
    for (mark, *cells), alike in groupby(sorted(best), key=cells_at):
        counts = list(alike)
        rows.append((("" if len(counts) == 1 else f"{counts[0]}..") + f"{counts[-1]}{mark}", *cells))
    names = ["planned"] if others == ["best"] else [_broken(printable(label)) for label in others]
    headings = ["GPUs", "DDP" if stock == "ddp" else _broken(stock), *names, "gain", "busy–quiet"]
    table = table_of([*headings, cost[0] if cost else "", "limited by"], rows, left={"limited by"})
    for column in table.columns:
        column.vertical = "bottom"
    return table


def _broken(name: str) -> str:
    """A long name over several lines."""
    return name if len(name) <= _LONG_NAME else name.replace("-", "-\n")


def plan_table(plan: Plan, result: Prediction) -> Table:
    """The buckets of a plan with when they travel."""
    spans = [span for span in result.timeline if span.carries_gradients]
    rows = [
        (
            str(number),
            span.lane.removeprefix("communicator ") if plan.communicators > 1 else "",
            printable(span.name),
            format_bytes(span.bytes),
            format_seconds(span.start_s),
            format_seconds(span.end_s),
        )
        for number, span in enumerate(spans)
    ]
    headings = ("bucket", "communicator", "gradients", "bytes", "starts", "ends")
    return table_of(headings, rows, f"{counted(len(plan.buckets), 'bucket')} in launch order", left={"gradients"})


def network_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What an all-reduce does at each number of GPUs."""
    cells = [
        (str(row["workers"]), str(row["nodes"]), format_seconds(row["latency_s"]), *bus_rates(row)) for row in rows
    ]
    return table_of(("GPUs", "nodes", "latency", "bus GB/s", "busy–quiet"), cells, "all-reduce of 256 MiB")


def bus_rates(row: Mapping[str, Any]) -> tuple[str, str]:
    """Bus bandwidth in GB/s on a typical day, and from a busy cluster to a quiet one where these print apart."""
    low, typical, high = (
        f"{row[key] / 1e9:.3g}" for key in ("busy_bus_bytes_per_s", "bus_bytes_per_s", "quiet_bus_bytes_per_s")
    )
    return typical, f"{low}–{high}" if low != high else ""


def zoo_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    left = set(headings) - {"tokens", "a node", "GB/s", "busy–quiet"}
    table = table_of(headings, [list(map(printable, row)) for row in rows], title, left=left)
    # The name is what one copies.
    table.columns[0].no_wrap = True
    table.width = min(natural_width(table), _SCREEN)
    return table


def describe(
    profile: Profile,
    network: Network | None = None,
    *,
    accumulation: int | None = None,
    reduce_dtype: str | None = None,
    global_batch: int | None = None,
) -> str:
    """One line on what is being predicted."""
    device = profile.device.removesuffix(f" ({profile.origin})")
    micro_batches = accumulation or profile.accumulation
    tokens = "" if profile.sequence_length is None else f" of {profile.sequence_length} tokens"
    batch, scaling = f"batch {profile.batch_size}{tokens} per GPU", "weak"
    alone_s = micro_batches * (profile.forward_s + profile.backward_s) + profile.update_s
    alone = f"{format_seconds(alone_s)} per iteration alone, "
    if global_batch is not None:
        batch, scaling, alone = f"global batch {global_batch}{tokens} shared by the workers", "strong", ""
    if micro_batches > 1:
        batch += f", {micro_batches} micro-batches a step"
    kind = f" ({scaling} scaling)" if network is not None else ""
    sent = f" sent as {reduce_dtype}" if reduce_dtype is not None else ""
    text = (
        f"{profile.model}, {batch}{kind}, {profile.precision} on {device} ({profile.origin}): {alone}"
        f"{len(profile.gradients)} gradients, {format_bytes(profile.total_bytes)}{sent}"
    )
    return text if network is None else f"{text}; network {named(network)}{_nodes(network)}"


def _nodes(network: Network) -> str:
    if network.one_node:
        return ""
    gpus = network.topology.gpus_per_node
    return ", one GPU a node" if gpus == 1 else f", {gpus} GPUs a node"


def named(network: Network) -> str:
    """A network's name with its origin: what was never measured must not read as if it had been."""
    name = f"{network.name} ({network.source.method})" if isinstance(network.source, Source) else network.name
    return f"{name}, inside one node" if network.one_node else name


def table_of(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str | None = None,
    *,
    left: Set[str] = frozenset(),
) -> Table:
    """Figures stand to the right, what is in `left` to the left. A column with nothing in it is left out."""
    table = plain_table(title)
    shown = [index for index, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
    for index in shown:
        table.add_column(headings[index], justify="left" if headings[index] in left else "right")
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    return table


def plain_table(title: str | None = None) -> Table:
    return Table(
        title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )


def _three_figures(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def _count(samples: int) -> str:
    for scale, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if samples >= scale and samples % scale == 0:
            return f"{samples // scale}{unit}"
    return str(samples)
