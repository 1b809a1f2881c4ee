"""What answers like this one were compared with: `zoo/checked.json`, which the judge writes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec

SCALES = (8, 64, 512)
"""Last number of GPUs of each class but the largest."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Measured rows of the same GPU, scale, parallelism, precision, framework and route."""

    inside: bool
    error: float | None = None
    """How far off nine of ten of them were."""
    rows: int = 0


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
        key = tuple(row.get(name) for name in ("gpu", "scale", "parallelism", "precision", "route"))
        found.setdefault(key, []).append(row)
    return found


def compared_with(
    *, gpu: str | None, gpus: int, parallelism: str, precision: str | None, framework: str | None, route: str
) -> Compared:
    """What was compared that is like this; `NEVER` where nothing was."""
    cells = _cells().get((gpu, scale_of(gpus), parallelism, precision, route), [])
    # Profiles and their analytic like are measured without a framework's name.
    alike = [row for row in cells if row.get("framework") in (None, framework)]
    count = sum(row["n"] for row in alike)
    if not count:
        return NEVER
    return Compared(inside=True, error=round(sum(row["p90"] * row["n"] for row in alike) / count, 4), rows=count)
