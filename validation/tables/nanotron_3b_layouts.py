"""Layouts of nanotron without what is stale. Data-parallel rows keep the half that nanotron_3b_dp gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row["flags"] or row["status"] not in ("ok", "failed"):
            continue
        made = {**table.fields(row), "status": "ran" if row["status"] == "ok" else "failed"}
        if (row["tp"], row["pp"], row["zero_stage"]) == ("1", "1", "1"):
            made["identity"] = f"nanotron/{row['model']}/gpus={row['gpus']}/mbs={row['mbs']}/gbs={row['gbs']}"
        yield made
