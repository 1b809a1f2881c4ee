"""What each half of an all-reduce costs by itself: a reduce-scatter, or an all-gather."""

from __future__ import annotations

from typing import Literal

import numpy as np

from backbeat.cost.collectives import Shape, steps, traffic
from backbeat.cost.curve import Curve
from backbeat.model import Network


def half_curve(network: Network, collective: Literal["all_gather", "reduce_scatter"]) -> Curve:
    """What this half costs. Where the network has not measured it, it is half of the all-reduce, or more where switches
    reduce: they spare the all-reduce bytes that its halves do send.

    Never less than its time on the link: an isolated message may be let through faster where a shaped link was idle,
    but most halves follow each other without a gap.
    """
    times = network.all_gather if collective == "all_gather" else network.reduce_scatter
    if times is not None:
        alone = times.curve
    else:
        whole = network.cost.isolated
        alone = whole.slower(0.5)
        if (parts := _parts(network)) is not None:
            latency, work = parts
            times_s = latency * whole.latency(whole.sizes) + work * whole.transfer(whole.sizes)
            alone = Curve(whole.sizes, times_s, work * whole.link_s_per_byte)
    return Curve(alone.sizes, np.maximum(alone.times, alone.link_s_per_byte * alone.sizes), alone.link_s_per_byte)


def _parts(network: Network) -> tuple[float, float] | None:
    """Of an all-reduce's latency and link time, what a half takes where switches reduce; None elsewhere."""
    topology, workers = network.topology, network.workers
    shape: Shape | Literal["auto", "hierarchical"] = topology.algorithm
    if shape == "hierarchical":
        shape = topology.inside_algorithm
        if workers > topology.gpus_per_node:
            shape, workers = topology.across_algorithm, network.nodes
    if (shape != "nvls" and shape != "sharp") or workers == 1:
        return None
    return (
        steps("all_gather", shape, workers) / steps("all_reduce", shape, workers),
        traffic("all_gather", shape, workers) / traffic("all_reduce", shape, workers),
    )
