"""AWS' Qwen3 runs: the layout stands in one cell, TP8 PP2 EP16 DP2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        sizes = {name.lower(): int(number) for name, number in re.findall(r"([A-Z]+)(\d+)", row["parallelism"])}
        deepep = row["dispatcher"].startswith("deepep")
        yield {
            **table.fields({"global_batch": row["global_batch"], "step_s": row["step_s"]}),
            "id": "/".join(row[key] for key in ("parallelism", "micro_batch", "a2a_overlap", "dispatcher")),
            **sizes,
            "gpus": row["gpus"],
            "micro_batch": row["micro_batch"],
            "recompute": row["recompute"],
            "framework": "megatron-deepep" if deepep else "megatron",
            **(
                {"unasked": "all-to-alls behind other micro-batches have no option"}
                if row["a2a_overlap"] == "on"
                else {}
            ),
        }
