"""Whether NCCL's all-gathers and reduce-scatters say what a large all-reduce takes: nothing is measured.

    python validation/training/halves.py

Every network under `validation/` that holds all three: an all-reduce's seconds a byte over theirs together. Then the
largest all-reduce, predicted from those of up to 1 MiB, by their own slope and by that of the two, up to 16 MiB.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backbeat.errors import BackbeatError
from backbeat.model import CollectiveTimes, Network

NAMES = ("all_reduce", "all_gather", "reduce_scatter")
CUT, FURTHER, LARGE = 2**20, 2**24, 30_000_000


def networks(folder: Path) -> Iterator[Network]:
    """Each once, however many files hold it."""
    seen = set()
    for path in sorted([*folder.rglob("*.json"), *folder.rglob("*.json.gz")]):
        if "published" in path.parts:
            continue
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for found in _inside(json.loads(text)):
            try:
                network = msgspec.convert({key: found[key] for key in found if key != "schema"}, Network)
            except (BackbeatError, msgspec.ValidationError):
                continue
            if network.all_reduce.points not in seen:
                seen.add(network.all_reduce.points)
                yield network


def _inside(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if all(isinstance(value.get(name), dict) and value[name].get("points") for name in NAMES):
            yield value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _inside(inner)


def cut(network: Network) -> Network | None:
    """The network with small messages alone; None where large ones are not known."""
    points = {name: getattr(network, name).points for name in NAMES}
    if points["all_reduce"][-1][0] < LARGE:
        return None
    most = {name: CUT if name == "all_reduce" else FURTHER for name in NAMES}
    kept = {name: tuple(one for one in points[name] if one[0] <= most[name]) for name in NAMES}
    times = {name: CollectiveTimes(points=some) for name, some in kept.items()}
    return msgspec.structs.replace(network, concurrency=(), **times)


def show(folder: Path) -> None:
    own, halves = [], []
    for network in networks(folder):
        slopes = [getattr(network, name).curve.link_s_per_byte for name in NAMES]
        reach = " ".join(str(getattr(network, name).points[-1][0]) for name in NAMES)
        print(f"{network.backend} {network.name}, up to {reach} bytes: {slopes[0] / (slopes[1] + slopes[2]):.2f}")
        small = cut(network) if network.backend == "nccl" else None
        if small is not None:
            size, seconds = network.all_reduce.points[-1]  # type: ignore[index]
            own.append(abs(small.all_reduce.curve.at(size) / seconds - 1))
            halves.append(abs(float(small.cost.time(size)) / seconds - 1))
    for word, off in (("its own slope", own), ("all-gather and reduce-scatter", halves)):
        print(f"{len(off)} all-reduces by {word}: off by {np.median(off):.1%} in the median, {max(off):.1%} at worst")


if __name__ == "__main__":
    show(Path(__file__).parents[1])
