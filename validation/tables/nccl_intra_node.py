"""NCCL inside a node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table

NETWORKS = {
    "a100": "dgx-a100", "h100": "dgx-h100", "h200": "dgx-h100", "b200": "dgx-b200", "b300": "dgx-b200",
    "gb200": "gb200-nvl72", "l40s": "8 L40S on PCIe 4",
}  # fmt: skip


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row["dtype"] != "half":
            continue
        gpu = row["gpu"].removesuffix("_sxm")
        yield {
            "kind": "collective",
            "collective": {"alltoall": "all_to_all"}.get(row["op"], row["op"]),
            "family": "collectives",
            "cluster": gpu,
            "accelerator": gpu,
            "network": NETWORKS[gpu],
            "gpus": row["num_gpus"],
            "bytes": 2 * int(row["message_size"]),
            "seconds": float(row["latency_ms"]) / 1e3,
        }
