"""Bandwidth of three collectives by the number of nodes: a column each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables.aws_collectives import seconds

COLLECTIVES = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
SIZE = 256 * 10**6


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        collective = COLLECTIVES[row["collective"]]
        for column, rate in row.items():
            if row["metric"].startswith("mean") and column.startswith("nodes_") and rate:
                gpus = 8 * int(column.removeprefix("nodes_"))
                yield {
                    "kind": "collective", "collective": collective, "family": "collectives",
                    "cluster": "aws-p5 of Hugging Face", "accelerator": "h100", "network": "aws-p5", "gpus": gpus,
                    "bytes": SIZE, "seconds": seconds(collective, SIZE, gpus, float(rate) * 1e9),
                }  # fmt: skip
