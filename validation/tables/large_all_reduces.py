"""Large NCCL all-reduces of calibrated networks, by what small ones and the two halves of one say of them.

Networks are cut: all-reduces of more than 1 MiB, and all-gathers and reduce-scatters of more than 16 MiB, are taken
out, and the largest all-reduce is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables.own import named, records

CUT = {"all_reduce": 2**20, "all_gather": 2**24, "reduce_scatter": 2**24}
LARGE = 30_000_000


def cases(table: Table, _rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    seen: list[Any] = []
    for path, record in records(table):
        for network in _inside(record):
            points = network["all_reduce"]["points"]
            if network.get("backend") == "nccl" and points[-1][0] >= LARGE and points not in seen:
                seen.append(points)
                yield {
                    **table.same,
                    "id": f"{path.parent.name}/{path.stem}/{len(seen)}",
                    "cluster": network["name"],
                    "gpus": network["workers"],
                    "network": _cut(network),
                    "bytes": points[-1][0],
                    "seconds": points[-1][1],
                }


def _cut(network: Mapping[str, Any]) -> dict[str, Any]:
    small = {name: [one for one in network[name]["points"] if one[0] <= most] for name, most in CUT.items()}
    return {**named(dict(network)), "concurrency": [], **{name: {"points": some} for name, some in small.items()}}


def _inside(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        if all(isinstance(value.get(name), dict) and value[name].get("points") for name in CUT):
            yield value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _inside(inner)
