"""Tables of networks, and of what is bundled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from backbeat.cost.collectives import bus_bandwidth
from backbeat.model import Network
from backbeat.show.tables.terminal_table import natural_width, table_of
from backbeat.units import SCREEN, format_seconds, printable

_SHOWN_BYTES = 2**28
_LATENCY_BYTES = 8


def every_row(network: Network) -> list[dict[str, Any]]:
    """`row_at` each number of GPUs that the network's file has."""
    return [row_at(network, count) for count in sorted([network.workers, *(row.workers for row in network.rows)])]


def row_at(network: Network, workers: int) -> dict[str, Any]:
    """What an all-reduce does on this many GPUs."""
    there = network.at(workers=workers)
    quiet, busy = there.edges or (there, there)
    quiet_rate, rate, busy_rate = (
        bus_bandwidth("all_reduce", workers, _SHOWN_BYTES, float(one.cost.time(_SHOWN_BYTES))) / 8
        for one in (quiet, there, busy)
    )
    return {
        "workers": workers,
        "nodes": there.nodes,
        "latency_s": float(there.cost.time(_LATENCY_BYTES)),
        "bus_bytes_per_s": rate,
        "busy_bus_bytes_per_s": busy_rate,
        "quiet_bus_bytes_per_s": quiet_rate,
    }


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
    table.width = min(natural_width(table), SCREEN)
    return table
