"""Collectives on the hosts of MG-WFBP and ASC-WFBP, and on PCIe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table

NETWORKS = {
    "10GbE TCP + PCIe 3.0 shared memory in node": "4 x PCIe 3 and 10 GbE",
    "100Gb InfiniBand RDMA + PCIe 3.0 shared memory in node": "4 x PCIe 3 and 100 Gb InfiniBand",
    "10GbE TCP, one GPU per node": "10 GbE, one GPU a node",
    "100Gb InfiniBand RDMA, one GPU per node": "100 Gb InfiniBand, one GPU a node",
    "PCIe 3.0 x16 under one switch (PIX), P2P not supported": "PCIe 3",
    "PCIe, no P2P (host not described)": "PCIe 4",
}
COLLECTIVES = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "all_gather": "all_gather", "alltoall": "all_to_all",
}  # fmt: skip


def unasked(row: Mapping[str, str]) -> str | None:
    if "none" in row["gpu"]:
        return "collectives of host buffers"
    if row["collective"].split()[0] not in COLLECTIVES:
        return "broadcast and reduce: a network has neither"
    return None


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if "SUSPECT" in row["note"] or not row["time_us"]:
            continue
        made = {
            "kind": "collective",
            "family": "collectives",
            "collective": COLLECTIVES.get(row["collective"].split()[0], row["collective"].split()[0]),
            "cluster": row["source_id"],
            "accelerator": row["gpu"].partition(" (")[0].lower().replace(" ", "-"),
            "gpus": row["gpus"],
            "bytes": row["bytes"],
        }
        why = unasked(row)
        told = {"unasked": why} if why else {"network": NETWORKS[row["interconnect"]]}
        yield {**made, **told, **({} if why else {"seconds": float(row["time_us"]) / 1e6})}
