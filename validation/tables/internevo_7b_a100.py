"""InternEvo's 7B: tokens a second of each GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        gpus, tokens = int(row["gpus"]), int(row["seq"]) * int(row["micro_batch"]) * int(row["micro_num"])
        groups = row["zero1"] not in ("-1", row["gpus"])
        yield {
            **table.fields({}),
            "gpus": gpus,
            "dp": gpus,
            "micro_batch": row["micro_batch"],
            "global_batch": gpus * int(row["micro_batch"]) * int(row["micro_num"]),
            "sequence": row["seq"],
            "shard": row["zero1"] if groups else 0,
            "seconds": tokens / float(row["tgs"]),
            **({"unasked": "ZeRO-1 inside groups of GPUs has no option"} if groups else {}),
        }
