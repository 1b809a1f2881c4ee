"""What it would gain if scatters of a plan in halves could overtake each other and large ones were sent in parts.

    python validation/planners/overtaking.py

Plans of `halves` scatter in ready order and gather in the order of forward. Here the link instead takes the bucket
that became ready last, in parts of up to a cap where that helps; once backward has ended, each gather in the order of
forward follows what of it has not been scattered yet. That serves due times in their order, and is the best that
priorities can do. Every bundled bf16 profile, every bundled network, 8 to 512 workers, and again with forward made
longer than it is. Under the model: nothing here is a measurement of a cluster. Writes overtaking.json beside this file.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

import backbeat as bb
from backbeat.cost import Curve
from backbeat.model.files import bundled
from backbeat.planners.halves import gather_programme
from backbeat.planners.optimal import queue_programme
from backbeat.simulate.gather_scatter import Halves
from backbeat.simulate.halves_step import Layers
from backbeat.simulate.schedule import capped

WORKERS = (8, 64, 512)
STRETCHED = (1, 2, 4, 8)
CAPS = tuple(2**power for power in range(20, 28))
MOST_PARTS = 64
STEPS = 30


class Chunk(NamedTuple):
    """One scatter: gradients first to last - 1 in ready order, or one of several equal parts of them."""

    first: int
    last: int
    parts: int


def chunkings(sizes: list[float], ends: list[int]) -> Iterator[list[Chunk]]:
    """These buckets, or buckets of up to a cap, each in parts of up to a cap."""
    sums = np.concatenate([[0.0], np.cumsum(sizes)])
    for cap in (None, *CAPS):
        for buckets in (ends,) if cap is None else (ends, capped(sizes, [float(cap)], sums)):
            yield [
                Chunk(first, last, parts)
                for first, last in pairwise([0, *buckets])
                for parts in [1 if cap is None else min(max(round((sums[last] - sums[first]) / cap), 1), MOST_PARTS)]
                for _ in range(parts)
            ]


def latest_first(ready: list[float], chunks: list[Chunk], seconds: list[float]) -> tuple[float, list[int]]:
    """When the bucket that became ready last has been sent, and what is left over then."""
    waiting: list[int] = []
    coming, now, last = 0, 0.0, len(chunks) - chunks[-1].parts
    while coming < len(chunks) or any(index >= last for index in waiting):
        if not waiting:
            now = max(now, ready[chunks[coming].last - 1])
        while coming < len(chunks) and ready[chunks[coming].last - 1] <= now:
            waiting += range(coming + chunks[coming].parts - 1, coming - 1, -1)
            coming += chunks[coming].parts
        now += seconds[waiting.pop()]
    return now, waiting


def meets(layers: Layers, cost: Curve, free_s: float, first_s: np.ndarray, end_s: float) -> bool:
    """Whether forward can end by then, if so much else must travel before the first j layers are gathered."""
    count = len(layers.sizes)
    sums = np.concatenate([[0.0], np.cumsum(layers.sizes)])
    due = end_s - np.cumsum(layers.compute_s[::-1])[::-1]
    finish = np.full(count + 1, np.inf)
    finish[0] = free_s
    for j in range(1, count + 1):
        times = finish[:j] + (first_s[j] - first_s[:j]) + cost.time(sums[j] - sums[:j])
        finish[j] = np.where(times <= due[:j], times, np.inf).min()
    return bool(np.isfinite(finish[count]))


def forward_end(profile: bb.Profile, halves: Halves, chunks: list[Chunk], below_s: float) -> float:
    """When forward ends after backward, if these chunks overtake each other; `below_s` if no sooner than that."""
    layers = Layers.of(profile)
    count = len(profile.gradients)
    sums = np.concatenate([[0.0], np.cumsum(profile.sizes)])
    seconds = [float(halves.scatter.time((sums[one.last] - sums[one.first]) / one.parts)) for one in chunks]
    free, left = latest_first(profile.ready.tolist(), chunks, seconds)
    first_s = np.zeros(count + 1)
    for index in left:
        first_s[count - chunks[index].last + 1 :] += seconds[index]
    low, high = float(layers.compute_s.sum()), below_s * (1 - 1e-5)
    if not meets(layers, halves.gather, free - profile.backward_s, first_s, high):
        return below_s
    for _ in range(STEPS):
        middle = (low + high) / 2
        if meets(layers, halves.gather, free - profile.backward_s, first_s, middle):
            high = middle
        else:
            low = middle
    return high


def gain(profile: bb.Profile, network: bb.Network) -> float:
    """Of the best order over the plain one, as a share of the iteration."""
    halves, layers = Halves.of(network), Layers.of(profile)
    ready, sizes = profile.ready.tolist(), profile.sizes.tolist()
    ends = queue_programme(ready, sizes, halves.scatter)
    free = 0.0
    for first, last in pairwise([0, *ends]):
        free = max(ready[last - 1], free) + float(halves.scatter.time(sum(sizes[first:last])))
    if free <= profile.backward_s:
        return 0.0
    plan = gather_programme(layers, halves.gather, free - profile.backward_s)
    arrived, plain = free - profile.backward_s, 0.0
    index = 0
    for end in plan:
        arrived += float(halves.gather.time(layers.sizes[index:end].sum()))
        plain = max(plain, arrived) + float(layers.compute_s[index:end].sum())
        index = end
    found = plain
    for chunks in chunkings(sizes, ends):
        found = forward_end(profile, halves, chunks, found)
    return (profile.backward_s + plain) / (profile.backward_s + found) - 1


def stretched(profile: bb.Profile, factor: float) -> bb.Profile:
    gradients = tuple(
        msgspec.structs.replace(one, forward_s=None if one.forward_s is None else one.forward_s * factor)
        for one in profile.gradients
    )
    return msgspec.structs.replace(profile, forward_s=profile.forward_s * factor, gradients=gradients)


def main() -> None:
    profiles = [bb.Profile.load(name) for name in bundled(bb.Profile) if "-bf16-" in name]
    networks = [bb.Network.load(name).at(workers=workers) for name in bundled(bb.Network) for workers in WORKERS]
    cases = [(profile, network) for profile in profiles for network in networks]
    rows = {}
    for factor in STRETCHED:
        # All of them as they are, every tenth with a longer forward.
        some = cases if factor == 1 else cases[::10]
        gains = [gain(stretched(profile, factor), network) for profile, network in some]
        longest = max(profile.forward_s / profile.backward_s for profile in profiles) * factor
        rows[str(factor)] = {
            "cases": len(gains),
            "forward over backward, at most": round(longest, 2),
            "gain over 0.1 %": sum(one > 1e-3 for one in gains),
            "gain_mean": round(statistics.mean(gains), 5),
            "gain_most": round(max(gains), 5),
        }
        print(factor, rows[str(factor)], flush=True)
    data = {
        "command": "python validation/planners/overtaking.py",
        "date": datetime.date.today().isoformat(),
        "what": "iteration without overtaking over the best with it, less one, by how much longer forward was made",
        "forward": rows,
    }
    Path(__file__).with_name("overtaking.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
