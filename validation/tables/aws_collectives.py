"""Collectives of AWS' clusters: seconds from the bus bandwidth that nccl-tests prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table

INSTANCES = {
    "p5.48xlarge": ("h100", "aws-p5"),
    "p6-b200.48xlarge": ("b200", "aws-p6-b200"),
    "p6-b300.48xlarge": ("b300", "8 B300 and 16 x 400 Gbit/s EFA a node"),
}


def seconds(collective: str, size: int, gpus: int, bus: float) -> float:
    """Of one collective with so many bytes a second of bus bandwidth.

    >>> seconds("all_reduce", 8_000, 8, 1_000.0), seconds("all_gather", 8_000, 8, 1_000.0)
    (14.0, 7.0)
    """
    return (2 if collective == "all_reduce" else 1) * size * (gpus - 1) / gpus / bus


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        gpu, network = INSTANCES[row["instance"]]
        gpus, what = int(row["ranks"]), row["collective"]
        made = {
            "kind": "collective", "family": "collectives", "cluster": row["instance"], "accelerator": gpu,
            "gpus": gpus, "id": f"{row['instance']}/{gpus}/{what}",
        }  # fmt: skip
        if what.startswith("alltoall"):
            kind, size, rate = "all_to_all", 2**26, row["busbw_at_64MiB_GBps"]
        elif what.startswith("all_reduce"):
            kind, size, rate = "all_reduce", int(what.split()[1]) * 2**20, row["busbw_peak_GBps"]
        else:
            why = "the rate between nodes of tokens whose number is not stated"
            yield {**made, "collective": "all_to_all", "unasked": why}
            continue
        measured = seconds(kind, size, gpus, float(rate) * 1e9)
        yield {**made, "collective": kind, "network": network, "bytes": size, "seconds": measured}
