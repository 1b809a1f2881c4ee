"""nccl-tests of whole clusters: what their tuned settings reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table

NETWORKS = {
    "ALCF polaris": ("4 A100 and 2 x Slingshot", "a100"),
    "ALCF sirius": ("4 A100 and 2 x Slingshot", "a100"),
    "ALCF sophia": ("dgx-a100", "a100"),
}
NAMES = {"alltoall": "all_to_all", "sendrecv": "send"}


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        alcf = row["cluster"].startswith("ALCF")
        if row["bytes"] == "0" or not row["collective"] or (alcf and row["setting"] not in ("env5", "env6")):
            continue
        network, gpu = NETWORKS.get(row["cluster"], ("dgx-h100", "h100"))
        made = {
            "kind": "collective",
            "collective": NAMES.get(row["collective"], row["collective"]),
            "family": "collectives",
            "cluster": row["cluster"],
            "accelerator": gpu,
            "gpus": row["ranks"],
            "bytes": row["bytes"],
        }
        if int(row["nodes"]) > 1 and not alcf and row["gpus_per_node"] != "8":
            yield {**made, "unasked": "some GPUs of each node: a network has those of whole nodes"}
        else:
            yield {**made, "network": network, "seconds": float(row["oop_us"]) / 1e6}
