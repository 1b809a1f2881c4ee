"""MLPerf's data-parallel models that a bundled profile stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables.mlperf import network, submission

PROFILES = {"bert": "bert-large-b64-bf16-h200", "resnet": "resnet50-b128-bf16-h200"}


def unasked(row: Mapping[str, str]) -> str | None:
    if row["benchmark"] not in PROFILES:
        return f"no profile of {row['benchmark']} is bundled"
    if row["accelerator"].startswith(("TPU", "Habana")):
        return "TPUs and Gaudi are not known"
    if not row["step_s"]:
        return "no throughput is logged"
    if network(row) is None and int(row["nodes"]) > 1:
        return "a network between nodes that nobody states"
    return None


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        made = submission(row)
        gpus = made["gpus"]
        why = unasked(row)
        if why is not None:
            yield {**made, "unasked": why}
            continue
        accumulated = max(round(float(row["grad_accum"] or 1)), 1)
        low, high, middle = (row[f"samples_per_s{which}"] for which in ("_run_min", "_run_max", ""))
        yield {
            **table.fields({}),
            **made,
            "profile": PROFILES[row["benchmark"]],
            "network": network(row) or "dgx-a100",
            "dp": gpus,
            "accumulation": accumulated,
            "micro_batch": max(int(row["global_batch"]) // (gpus * accumulated), 1),
            "global_batch": row["global_batch"],
            "seconds": row["step_s"],
            **({"repeat": (float(high) - float(low)) / 2 / float(middle)} if low and high and middle else {}),
        }
