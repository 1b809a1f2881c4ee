"""What a what-if asks for: a state of its controls, read from an address, and a network with more or less bandwidth and
latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from functools import partial
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from backbeat.cost import Curve
from backbeat.cost.scaling import stretched
from backbeat.errors import InputError
from backbeat.model import CollectiveTimes, Network
from backbeat.model.network import COLLECTIVES

_MOST_TEXT = 300

S = TypeVar("S")


def read_state(kind: type[S], given: Mapping[str, str], limits: Mapping[str, tuple[float, float]]) -> S:
    """A dataclass of controls from the fields of an address. Those with limits are numbers, whole ones unless their
    default is a fraction; values out of range and fields nobody defined are refused by name."""
    defaults = {one.name: one.default for one in fields_of(kind)}  # type: ignore[arg-type]
    known: dict[str, Any] = {}
    for name, text in given.items():
        if name not in defaults:
            raise InputError(f"{name[:40]!r} is not a control: there are {', '.join(defaults)}")
        if name not in limits:
            known[name] = text[:_MOST_TEXT]
        elif text != "":
            value = _number(name, text, limits[name])
            if not isinstance(defaults[name], float) and value != int(value):
                raise InputError(f"{name} is {text[:40]}: it must be a whole number")
            known[name] = value if isinstance(defaults[name], float) else int(value)
    return kind(**known)


def _number(name: str, text: str, limits: tuple[float, float]) -> float:
    low, high = limits
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{name} is {text[:40]!r}: it must be a number from {low} to {high}") from None
    if not low <= value <= high:
        raise InputError(f"{name} is {text[:40]}: it must be from {low} to {high}")
    return value


def scaled_network(network: Network, *, bandwidth: float = 1.0, latency: float = 1.0) -> Network:
    """Transfer time divided by `bandwidth`, latency multiplied by `latency`.

    Where a node has an inside of its own (NVLink), only what crosses nodes changes. How messages share the link,
    and how they cost less or more back to back, is taken to stay.
    """
    if bandwidth == 1.0 and latency == 1.0:
        return network

    rows = [replace(row, **_scaled(network.at(workers=row.workers), bandwidth, latency)) for row in network.rows]
    return replace(network, rows=tuple(rows), **_scaled(network, bandwidth, latency))


def _scaled(network: Network, bandwidth: float, latency: float) -> dict[str, Any]:
    """The changed fields at the network's own number of workers."""
    topology = network.topology
    if network.nodes == 1 and not network.one_node:
        return {}
    stretch = partial(stretched, latency=latency, transfer=1 / bandwidth)
    times = {name: found for name in COLLECTIVES if (found := getattr(network, name)) is not None}
    scaled: dict[str, Any] = {name: CollectiveTimes.of(stretch(one.curve)) for name, one in times.items()}
    if topology.inside is not None:
        scaled["all_reduce"] = _stretched_across(network.all_reduce, topology.inside, topology.pipelined, stretch)
    return {**scaled, "concurrency": network.concurrency_on(scaled["all_reduce"])}


def _stretched_across(
    times: CollectiveTimes, inside: CollectiveTimes, pipelined: bool, stretch: Callable[[Curve], Curve]
) -> CollectiveTimes:
    whole, inner = times.curve, inside.curve
    sizes = np.unique(np.concatenate([whole.sizes, inner.sizes, [0.0, 2.0**20, 2.0**24, 2.0**28]]))
    within = inner.latency if pipelined else inner.time
    slope = whole.gradient_s_per_byte - (0.0 if pipelined else inner.gradient_s_per_byte)
    across = stretch(Curve(sizes, np.maximum(whole.time(sizes) - within(sizes), 0.0), max(slope, 0.0)))
    seconds = np.maximum(within(across.sizes) + across.time(across.sizes), inner.time(across.sizes))
    return CollectiveTimes.of(Curve(across.sizes, seconds, 0.0))
