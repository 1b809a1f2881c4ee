"""SimuMax's runs: models cut to a few layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables import identities

RESULTS = ("real_iteration_ms", "simumax_ms", "simumax_err_pct", "real_peak_alloc_gib", "simumax_alloc_gib")


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for name, row in zip(identities(table.name, rows, RESULTS), rows, strict=True):
        yield {
            **table.fields(row),
            "id": name,
            "identity": name,
            "accelerator": "b200",
            "model": {**table.models[row["model"]], "name": row["model"], "layers": int(row["layers"])},
            "family": row["model"],
            "global_batch": int(row["dp"]) * int(row["mbs"]) * int(row["grad_accum"]),
        }
