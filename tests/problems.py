"""Profiles and networks for tests: drawn by hypothesis, or written by hand."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

from hypothesis import strategies as st

from backbeat.model import CollectiveTimes, ConcurrencyPoint, Gradient, Network, Profile


def make_profile(
    sizes: list[int], ready: list[float], *, backward: float | None = None, forward: float = 0.0, **fields: object
) -> Profile:
    """A profile with these gradients in ready order."""
    return Profile(
        name="test",
        model="test",
        batch_size=1,
        precision="fp32",
        device="test",
        forward_s=forward,
        backward_s=ready[-1] if backward is None else backward,
        update_s=0.0,
        gradients=tuple(
            Gradient(name=f"g{index}", bytes=size, ready_s=time)
            for index, (size, time) in enumerate(zip(sizes, ready, strict=True))
        ),
        **fields,  # type: ignore[arg-type]
    )


def affine(alpha: float, beta: float, workers: int = 8, **fields: object) -> Network:
    return Network(
        name="affine",
        workers=workers,
        all_reduce=CollectiveTimes(alpha_s=alpha, beta_s_per_byte=beta),
        **fields,  # type: ignore[arg-type]
    )


def curve(points: list[tuple[int, float]], workers: int = 8, **fields: object) -> Network:
    return Network(
        name="curve",
        workers=workers,
        all_reduce=CollectiveTimes(points=tuple(points)),
        **fields,  # type: ignore[arg-type]
    )


@st.composite
def profiles(draw: st.DrawFn, *, most: int = 30) -> Profile:
    """Random gradients: sizes over five decades, ready times with ties, backward that may end later."""
    count = draw(st.integers(1, most))
    sizes = draw(st.lists(st.integers(1, 10**7) | st.integers(1, 2000), min_size=count, max_size=count))
    gaps = draw(st.lists(st.sampled_from([0.0, 1e-5, 1e-4, 1e-3, 5e-3]), min_size=count, max_size=count))
    ready, now = [], 0.0
    for gap in gaps:
        now += gap
        ready.append(now)
    return make_profile(sizes, ready, backward=now + draw(st.sampled_from([0.0, 1e-3])), forward=2e-3)


@st.composite
def networks(draw: st.DrawFn, *, busy: bool | None = None) -> Network:
    """Affine or measured, with or without back-to-back and concurrent rows."""
    alpha = draw(st.sampled_from([0.0, 1e-5, 1e-4, 1e-3]))
    beta = draw(st.sampled_from([1e-11, 1e-10, 1e-9, 1e-8]))
    rows: list[ConcurrencyPoint] = []
    if draw(st.booleans()) if busy is None else busy:
        for size in (4096, 2**20):
            alone = alpha + beta * size
            ratio = draw(st.sampled_from([0.5, 0.9, 1.0, 1.3]))
            rows.append(ConcurrencyPoint(bytes=size, messages=5, communicators=1, seconds=alone * (1 + 4 * ratio)))
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.7, 1.0, 1.5]))
        size = 2**22
        rows.append(ConcurrencyPoint(bytes=size, messages=2, communicators=2, seconds=alpha + 2 * beta * size / share))
    if draw(st.booleans()):
        return affine(alpha, beta, concurrency=tuple(rows))
    sizes = [2**power for power in range(8, 27, 3)]
    noise = draw(st.lists(st.sampled_from([0.7, 1.0, 1.4]), min_size=len(sizes), max_size=len(sizes)))
    points = [(size, (alpha + beta * size) * factor) for size, factor in zip(sizes, noise, strict=True)]
    return curve(points, concurrency=tuple(rows))


def every_partition(count: int) -> list[list[int]]:
    """All ways to cut that many gradients into buckets, each by where its buckets end."""
    return [[*cuts, count] for size in range(count) for cuts in combinations(range(1, count), size)]


def put(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the field at `a.0.b` set, or removed where the value is `...`."""
    data = copy.deepcopy(data)
    *parents, last = path.split(".")
    parent: Any = data
    for part in parents:
        parent = parent[int(part)] if part.isdigit() else parent[part]
    key: Any = int(last) if last.isdigit() else last
    if value is ...:
        del parent[key]
    else:
        parent[key] = value
    return data
