"""vTrain's runs on several nodes: a GPT shape in each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables import gpt, identities


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for name, row in zip(identities(table.name, rows, ("iteration time (ms)",)), rows, strict=True):
        size = f"gpt-{row['Parameters (billion)']}b"
        layers, hidden, heads = (int(row[key]) for key in ("# layers", "hidden size", "attention heads"))
        model = gpt(size, layers, hidden, heads, 51200)
        yield {**table.fields(row), "id": name, "identity": name, "family": size, "model": model}
