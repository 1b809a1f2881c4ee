"""BLOOM's search for a layout: shapes by their printed size where the printed shape is one for all rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables import gpt

VOCAB = 250_880
ONE_SHAPE = "Choosing the fastest 3D Topology"


def layers_of(row: Mapping[str, str]) -> int:
    """The multiple of pp whose parameters are nearest to the printed size."""
    if row["section"] != ONE_SHAPE:
        return int(row["layers"])
    hidden, pp = int(row["hidden"]), int(row["pp"])
    exact = (float(row["size"].rstrip("B")) * 1e9 - VOCAB * hidden) / (12 * hidden**2)
    return round(exact / pp) * pp


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        layers, hidden = layers_of(row), int(row["hidden"])
        family = f"gpt-{row['size'].lower()}"
        failed = not row["sec_per_iteration"]
        yield {
            **table.fields({}),
            "family": family,
            "model": gpt(f"{family}-{layers}x{hidden}", layers, hidden, int(row["heads"]), VOCAB),
            **{key: row[key] for key in ("gpus", "dp", "tp", "pp", "micro_batch", "global_batch", "zero")},
            **({"status": "failed"} if failed else {"seconds": row["sec_per_iteration"]}),
        }
