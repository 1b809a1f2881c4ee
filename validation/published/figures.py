"""The published figures, read from the data files beside this module."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import msgspec

from backbeat import __version__
from backbeat.model import CollectiveTimes, ConcurrencyPoint, Network
from backbeat.model.files import write
from backbeat.model.topology import Topology

HERE = Path(__file__).resolve().parent


def figures(name: str) -> Any:
    """One data file: all_reduce, contention, asc_wfbp, mg_wfbp_k80 or headlines."""
    return msgspec.json.decode((HERE / f"{name}.json").read_bytes())


def series(name: str) -> Any:
    """One (a, b) series of all_reduce.json."""
    return next(one for one in figures("all_reduce")["series"] if one["name"] == name)


def affine_network(
    name: str,
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    *,
    algorithm: Any = "ring",
    pair: float | None = None,
) -> Network:
    """A network from published (a, b); `pair` is e(2), the efficiency of two all-reduces at once."""
    rows: tuple[ConcurrencyPoint, ...] = ()
    if pair is not None:
        size = 10**8
        both = alpha_s + 2 * beta_s_per_byte * size / pair
        rows = (ConcurrencyPoint(bytes=size, messages=2, communicators=2, seconds=both),)
    return Network(
        name=name,
        workers=workers,
        all_reduce=CollectiveTimes(alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte),
        topology=Topology(algorithm=algorithm),
        concurrency=rows,
    )


def provenance(command: str) -> dict[str, str]:
    """What a result file says about how it was made."""
    return {
        "command": command,
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} CPUs",
        "date": datetime.date.today().isoformat(),
        "versions": f"backbeat {__version__}, Python {platform.python_version()}",
    }


def save(path: Path, data: Any) -> None:
    write(path, msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same keys as aligned text; figures with four significant digits."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
