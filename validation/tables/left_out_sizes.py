"""All-reduces of sizes that a calibration of the lab left out, by the curve of the same session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables.own import named, records


def cases(table: Table, _rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for path, record in records(table):
        for place, session in enumerate(record["sessions"], start=1):
            known = {size for size, _ in session["network"]["all_reduce"]["points"]}
            for timing in session.get("timings", ()):
                alone = timing["messages"] == timing["communicators"] == 1 and timing["collective"] == "all_reduce"
                if alone and timing["bytes"] not in known:
                    yield {
                        **table.same,
                        "id": f"{path.parent.name}/{record['setting']}/{place}/{timing['bytes']}",
                        "cluster": record["setting"],
                        "gpus": record["nodes"],
                        "own_network": named(session["network"]),
                        "bytes": timing["bytes"],
                        "seconds": timing["median_s"],
                    }
