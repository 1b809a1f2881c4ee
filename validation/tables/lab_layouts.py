"""Layouts run in the lab by torch's schedules and DTensor, asked with the transfers that were timed beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables.own import in_series, records


def cases(table: Table, _rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for _, record in records(table):
        for session in record["sessions"]:
            for row in session["rows"]:
                told = row["case"]
                ways = dict(part.split("=") for part in told["text"].split(","))
                waits = round(told["waiting_wanted"] * 100)
                yield {
                    **table.same,
                    "id": f"{session['setting']}/{told['text']}/{waits}",
                    "cluster": session["setting"],
                    "system": f"{session['setting']}/{told['dilation']}",
                    "model": {"name": "lab transformer", "hidden": told["hidden"]},
                    "plan": told["text"],
                    "tp": ways.get("tp", 1),
                    "pp": ways.get("pp", 1),
                    "schedule": ways.get("schedule"),
                    "dilation": told["dilation"],
                    "global_batch": told["batch"],
                    "sequence": told["sequence"],
                    "gpus": session["nodes"],
                    "own_network": {**session, "rows": []},
                    **in_series(row["series_s"]),
                }
