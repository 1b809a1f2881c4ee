"""Replays of the lab: buckets of many plans with spun computation, by the calibration of the same session.

Those on more nodes are asked with the calibration of the fewest, too: what it says of more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables.own import in_series, records

IN_ORDER = {"nccl-8n-10.0gbit": 4, "nccl-8n-25.0gbit": 3}
"""From this session on packets stay in order, as on the 4 nodes of `simultaneous/` in its last session."""


def cases(table: Table, _rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    every = [(path.parent.name, record) for path, record in records(table)]
    for folder, record in every:
        models = {model["name"]: model for model in record["models"]}
        for case in record["cases"]:
            session = case["session"]
            in_order = session >= IN_ORDER.get(record["setting"], session + 1)
            near = [one for name, one in every if _link(one) == _link(record) and (name == "simultaneous") == in_order]
            fewest = min(near, key=lambda one: int(one["nodes"]), default=record)
            several = "several" if case["communicators"] > 1 else "one"
            yield {
                **table.same,
                "id": f"{folder}/{record['setting']}/{session + 1}/{case['model']}/{case['plan']}/{several}",
                "cluster": record["setting"],
                "system": f"{folder}/{record['setting']}/{session + 1}",
                "family": case["model"],
                "profile": models[case["model"]],
                "dilation": record["dilation"],
                "strategy": case["plan"],
                "plan": {"launches": case["buckets"], "communicators": case["communicators"], "name": case["plan"]},
                "gpus": record["nodes"],
                "network": fewest["sessions"][-1]["network"] if fewest["nodes"] < record["nodes"] else None,
                "own_network": record["sessions"][session]["network"],
                **in_series(case["series_s"]),
            }


def _link(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["backend"], record["bandwidth_bits"]
