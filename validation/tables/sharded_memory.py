"""Peaks of one rank of FSDP2: trained on a process group that sends nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table


def cases(table: Table, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        kept = "recomputed" if row["recomputed"] else "kept"
        yield {
            **table.same,
            "id": f"{row['model']}/{row['strategy']}/{row['workers']}/{row['micro_batches']}/{kept}",
            "family": row["model"],
            "profile": f"../../sharded/memory/{row['model']}-{row['precision']}.profile.json.gz",
            "strategy": row["strategy"],
            "zero": 3,
            "gpus": row["workers"],
            "accumulation": row["micro_batches"],
            "recompute": "full" if row["recomputed"] else "none",
            "micro_batch": row["batch_size"],
            "memory_bytes": row["measured_bytes"],
        }
