"""FSDP2 steps in the lab: on real parameters with spun computation, by the calibration of the same session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables.own import in_series, named, records


def cases(table: Table, _rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for path, record in records(table):
        for one in _of_lab(record) if "rows" in record else _of_script(record):
            model = one.pop("named")
            yield {
                **table.same,
                "id": f"{path.parent.name}/{one['cluster']}/{model}/{one['strategy']}",
                "family": model,
                "dilation": record["dilation"],
                "zero": 0 if one["strategy"] == "ddp" else 3,
                **one,
            }


def _of_script(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for case in record["cases"]:
        yield {
            "named": case["model"],
            "cluster": record["lab"],
            "profile": f"../../sharded/spun/profiles/{case['model']}.json.gz",
            "strategy": case["setting"],
            "plan": case["plan"],
            "gpus": case["plan"]["workers"],
            "own_network": record["sessions"][case["session"]]["network"],
            **in_series(case["series_s"]),
        }


def _of_lab(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`backbeat lab`: what units it chose stands in their messages. Those of zero2, by another strategy, are zero2."""
    launches = {row["strategy"]: row["launches"] for row in record["rows"]}
    for row in record["rows"]:
        name = row["strategy"]
        buckets = {"launches": row["launches"], "communicators": row["communicators"], "name": name}
        same = name not in ("ddp", "zero2") and row["launches"] == launches.get("zero2")
        yield {
            "id": f"gloo/{record['profile']}/{name}",
            "named": record["profile"],
            "cluster": f"{record['backend']}-{record['nodes']}n-200mbit",
            "profile": record["profile"],
            "strategy": "zero2" if same else name,
            "plan": buckets if name == "ddp" else None,
            "gpus": record["nodes"],
            "own_network": named(record["network"]),
            **in_series(row["series_s"]),
        }
