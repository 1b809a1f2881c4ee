"""What a what-if asks for: a state of its controls, read from an address, and a network with more or less bandwidth and
latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import msgspec
import numpy as np
from msgspec.structs import replace

from backbeat.cost import Curve
from backbeat.cost.scaling import stretched
from backbeat.errors import InputError
from backbeat.model import CollectiveTimes, Network
from backbeat.model.network import COLLECTIVES


class Controls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the controls of a page say. It travels in the page's address."""

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> Self:
        """From the fields of an address. Values out of range and fields nobody defined are refused by name."""
        given = {name: text for name, text in fields.items() if text}
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            rule, _, field = str(error).partition(" - at `$.")
            name = field.rstrip("`")
            if name not in given:
                raise InputError(
                    f"{rule}: that is not a control; there are {', '.join(cls.__struct_fields__)}"
                ) from None
            allowed = rule.removeprefix("Expected ").partition(",")[0]
            raise InputError(f"{name} is {given[name][:40]!r}: it must be {allowed}") from None


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
    slope = whole.link_s_per_byte - (0.0 if pipelined else inner.link_s_per_byte)
    across = stretch(Curve(sizes, np.maximum(whole.time(sizes) - within(sizes), 0.0), max(slope, 0.0)))
    seconds = np.maximum(within(across.sizes) + across.time(across.sizes), inner.time(across.sizes))
    return CollectiveTimes.of(Curve(across.sizes, seconds, 0.0))
