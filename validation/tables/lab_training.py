"""Training in the lab by `backbeat lab --train`. Profiles of these runs were not kept; what was predicted then was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables.own import in_series, records


def cases(table: Table, _rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for path, record in records(table):
        for row in record["rows"]:
            yield {
                **table.same,
                "id": f"{path.parent.name}/{path.stem}/{row['strategy']}",
                "identity": path.parent.name,
                "cluster": record["network"]["name"],
                "family": record["profile"],
                "strategy": row["strategy"],
                "gpus": record["nodes"],
                "unasked": "the profile that this run measured was not kept",
                **in_series(row["series_s"]),
            }
