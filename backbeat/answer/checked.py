"""What answers like this one were compared with: `zoo/checked.json`, which the judge writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from backbeat.model.prediction import Compared

SCALES = (8, 64, 512)
"""Last number of GPUs of each class but the largest."""


NEVER = Compared(inside=False)


def scale_of(gpus: int) -> str:
    """
    >>> scale_of(8), scale_of(9), scale_of(1024)
    ('1-8', '9-64', '513-')
    """
    low = 1
    for high in SCALES:
        if gpus <= high:
            return f"{low}-{high}"
        low = high + 1
    return f"{low}-"


def parallelism_of(mesh: Mapping[str, int], *, shards_parameters: bool) -> str:
    """In the judge's words.

    >>> parallelism_of({"tp": 8, "pp": 2}, shards_parameters=False), parallelism_of({}, shards_parameters=False)
    ('tensor+pipeline', 'none')
    """
    for name, word in (("ep", "experts"), ("cp", "context")):
        if mesh.get(name, 1) > 1:
            return word
    inside = [word for name, word in (("tp", "tensor"), ("pp", "pipeline")) if mesh.get(name, 1) > 1]
    spread = mesh.get("replicate", 1) * mesh.get("shard", 1) > 1
    return "+".join(inside) or ("sharded" if shards_parameters else "data" if spread else "none")


@cache
def _cells() -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    raw = (resources.files("backbeat.zoo") / "checked.json").read_bytes()
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in msgspec.json.decode(raw)["rows"]:
        key = (_chip(row["gpu"]), row["scale"], row["parallelism"], row["precision"], _known(row["route"]))
        found.setdefault(key, []).append(row)
    return found


def _chip(gpu: str | None) -> str | None:
    """One chip is sold with different memory, which computation does not see.

    >>> _chip("a100-40gb"), _chip("h100-pcie")
    ('a100', 'h100-pcie')
    """
    return None if gpu is None else re.sub(r"-\d+gb", "", gpu)


def _known(route: str) -> str:
    """A model computed from its shape and one computed from its recorded operators know the same."""
    return re.sub("^analytic", "shape", route)


def compared_with(
    *, gpu: str | None, gpus: int, parallelism: str, precision: str | None, framework: str | None, route: str
) -> Compared:
    """What was compared that is like this; `NEVER` where nothing was."""
    cells = _cells().get((_chip(gpu), scale_of(gpus), parallelism, precision, _known(route)), [])
    # Some rows name no framework, others one with the options of that run: megatron-deepep.
    alike = [row for row in cells if (row.get("framework") or str(framework)).split("-")[0] == str(framework)]
    count = sum(row["n"] for row in alike)
    if not count:
        return NEVER
    return Compared(inside=True, error=round(sum(row["p90"] * row["n"] for row in alike) / count, 4), rows=count)
