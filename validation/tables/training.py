"""Real training on the lab's links: each side's step and peak, from the profile and the network that `auto` measured.

Equal plans of one model and lab are one case, with the turns of all. A side that had a profile of its own (memory
plans, options of `auto`) cannot be asked again: what was predicted then is in kept.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from validation.cases import Table
from validation.tables.own import named, records

OWN_PROFILE = "the profile that this side's own search measured was not kept"


def cases(table: Table, _rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for path, record in records(table):
        for case in record["cases"]:
            sides = [side for side in case.get("sides", ()) if side["turns_s"]]
            alike: dict[str, list[Mapping[str, Any]]] = {}
            for side in sides:
                alike.setdefault(runs(side), []).append(side)
            for same in alike.values():
                yield {**table.same, **_case(path, record, case, same)}


def _case(
    path: Path, record: Mapping[str, Any], case: Mapping[str, Any], same: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    side, folder = same[0], "/".join(path.parts[path.parts.index("training") + 1 : -1])
    plan, turns = side.get("plan"), [turn for one in same for turn in one["turns_s"]]
    file = path.parent / "profiles" / f"{case['profile']}.json.gz"
    own = kind_of(plan) == "memory" or "options" in side or not file.exists()
    return {
        "id": f"{folder}/{record['lab']}/{case['model']}/{side['side']}/{kind_of(plan)}",
        "identity": folder,
        "cluster": record["lab"],
        "system": f"{folder}/{record['lab']}",
        "family": case["model"],
        "accelerator": "h200" if folder.startswith("nccl") else "cpu",
        "precision": case["precision"],
        "micro_batch": case["batch_size"],
        "gpus": record["nodes"],
        "profile": f"../../training/{folder}/profiles/{file.name}",
        "strategy": side["side"],
        "plan": plan,
        "framework": "torch" if plan and plan["strategy"] == "ddp" else None,
        "zero": 3 if plan and plan.get("sharding") else 0,
        "own_network": named(case["network"]),
        "seconds": median(turns),
        "repeat": _apart(turns),
        "memory_bytes": next((one["peak_bytes"] for one in same if one.get("peak_bytes")), None),
        "unasked": "no plan: it runs by itself" if plan is None else OWN_PROFILE if own else None,
    }


def _apart(turns: Sequence[float]) -> float:
    """The even turns and the odd ones."""
    return abs(median(turns[::2]) - median(turns[1::2])) / median(turns) if len(turns) > 1 else 0.0


def kind_of(plan: Mapping[str, Any] | None) -> str:
    """What a plan is judged with."""
    if plan is None:
        return "none"
    if any(segment["action"] != "keep" for segment in (plan.get("memory") or {}).get("segments", ())):
        return "memory"
    return "units" if plan.get("sharding") is not None else "buckets"


def runs(side: Mapping[str, Any]) -> str:
    """What equal plans have in common, whichever strategy made them; torch's own DDP runs by itself."""
    plan = side.get("plan")
    if plan is None:
        return str(side["side"])
    parts = {name: plan.get(name) for name in ("buckets", "communicators", "sharding", "memory")}
    return json.dumps([plan["strategy"] == "ddp", parts], sort_keys=True)
