"""Memory plans: on one GPU, and of four nodes that share one, by what each run's own profile says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from validation.cases import Table
from validation.tables.own import named, records

NOT_KEPT = "the plan of this row was not kept"


def cases(table: Table, _rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for path, record in records(table):
        folder = path.parent.name
        if isinstance(record, list):
            yield from ({**table.same, **_of_steps(row)} for row in record if "predicted_bytes" in row)
            continue
        if "models" in record:
            yield from ({**table.same, **one} for one in _of_host(record))
            continue
        for name, row in record["rows"].items():
            if row.get("predicted_ms") or row.get("predicted_s"):
                made = _of_nodes(path, record, name, row) if "network" in record else _of_one(path, record, name, row)
                yield {
                    **table.same,
                    "id": f"{folder}/{path.stem}/{name}",
                    "identity": folder,
                    "cluster": folder,
                    "system": f"{folder}/{path.stem}",
                    "strategy": name,
                    "memory_bytes": row["peak_bytes"],
                    **made,
                }


def _of_one(path: Path, record: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    plan = path.with_name(f"{path.stem}-{name.replace(' ', '-').replace(',', '')}.plan.json")
    measured = path.with_name(f"{path.stem}.profile.json")
    alike = TREATED.get(name.removeprefix("uniform: ")) if name.startswith("uniform") else None
    if alike:
        found: Any = {"segments": every_block(json.loads(measured.read_text()), alike)}
    else:
        found = _named(plan) if plan.exists() else None
    return {
        "family": record["model"],
        "profile": _named(measured),
        "strategy": "ddp" if alike else name,
        "plan": found,
        "own_network": "10gbe",
        "gpus": 1,
        "seconds": row["ms"] * 1e-3,
        # Without the wrapper there are no buckets, which a plan's peak has.
        **({"memory_bytes": None} if alike else {}),
        "unasked": None if found else NOT_KEPT,
    }


def _of_nodes(path: Path, record: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    profiles = [_named(path.with_name(f"resnet50-b{size}-bf16-h200.profile.json")) for size in (16, 64)]
    return {
        "family": "resnet50",
        "profile": {"joined": profiles, "batch": row["batch_size"], "nodes": record["nodes"], "name": "resnet50"},
        "plan": _named(path.with_name(f"{path.stem}-{name}.plan.json")),
        "own_network": named(record["network"]),
        "gpus": record["nodes"],
        "micro_batch": row["batch_size"],
        "seconds": row["iteration_s"],
        "repeat": row["repeat"],
    }


def _of_steps(row: Mapping[str, Any]) -> dict[str, Any]:
    """`budgets.py`: the peak of each step."""
    benchmark = "benchmark" if row["benchmark"] else "no benchmark"
    return {
        "id": f"budgets/{row['model']}/{row['variant']}/{benchmark}/run {row['run']}",
        "identity": "budgets",
        "cluster": "budgets",
        "family": row["model"],
        "micro_batch": row["batch"],
        "memory_bytes": max(row["peaks"]),
        "unasked": NOT_KEPT,
    }


TREATED = {
    "recompute": {"action": "recompute"},
    "fetch": {"action": "recompute", "input": "offload"},
    "recompute, inputs offloaded": {"action": "recompute", "input": "offload"},
    "offload": {"action": "offload"},
}
"""Every block alike, without the wrapper."""


def every_block(profile: Mapping[str, Any], alike: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"blocks": [one["name"]], **alike} for one in profile["blocks"] if not one.get("changes_input")]


def _of_host(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in record["models"].values():
        profile = {key: value for key, value in entry["profile"].items() if key != "schema"}
        for way, row in entry["rows"].items():
            if row.get("predicted_s"):
                segments = every_block(profile, TREATED[way]) if way in TREATED else None
                yield {
                    "id": f"host-steps/{profile['name']}/{way}",
                    "identity": "host-steps",
                    "cluster": "host-steps",
                    "family": profile["model"],
                    "profile": profile,
                    "strategy": "ddp",
                    "plan": {"segments": segments} if segments else None,
                    "own_network": "10gbe",
                    "gpus": 1,
                    "seconds": row["step_s"],
                    "unasked": "what the wrapper costs the host alone is no option" if way == "wrapped" else None,
                }


def _named(path: Path) -> str:
    """As the table's folder sees it."""
    return f"../../memory/{path.parent.name}/{path.name}"
