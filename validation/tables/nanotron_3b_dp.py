"""nanotron's data-parallel rows, by the names that their split has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        name = f"nanotron/{row['model']}/gpus={row['gpus']}/mbs={row['mbs']}/gbs={row['gbs']}"
        yield {**table.fields(row), "id": name, "identity": name}
