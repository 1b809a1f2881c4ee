"""Matrix products of seven GPUs: one row in twelve."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table

ONE_IN = 12


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        sizes = "/".join(row[name] for name in ("m", "n", "k"))
        if int(hashlib.sha256(sizes.encode()).hexdigest(), 16) % ONE_IN:
            continue
        gpu = row["file"].removeprefix("gemm_bf16_").partition(".")[0].removesuffix("_sxm")
        yield {
            "kind": "operator",
            "operator": "matmul",
            "family": "matmul",
            "cluster": gpu,
            "accelerator": gpu,
            **{name: row[name] for name in ("m", "n", "k")},
            "seconds": float(row["latency_ms"]) / 1e3,
        }
