"""Ranks that compute more slowly than others, always or now and then, and who waits for them.

Ranks that share a layer wait for each other in every layer. These are the ranks of `tp` and `cp`, and those that
exchange experts' tokens. With ZeRO 2 and 3, where replicas communicate in every pass, they are all ranks of a stage.
Such a group is as slow as its slowest rank. Stages wait along the pipeline; replicas at the end of the step, to reduce
gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from backbeat.cost.stragglers import Straggling, straggling
from backbeat.errors import InputError
from backbeat.model.layout import Layout


def check_stragglers(stragglers: Mapping[int, float], gpus: int, per_node: int) -> None:
    for rank, slowdown in stragglers.items():
        # A node is given as its ranks.
        name = f"straggler rank {rank} (node {rank // per_node})"
        if not 0 <= rank < gpus:
            last = (gpus - 1) // per_node
            raise InputError(f"{name} is not there: ranks of {gpus} GPUs are 0 to {gpus - 1}, their nodes 0 to {last}")
        if not 1 <= slowdown < math.inf:
            raise InputError(f"{name} has slowdown {slowdown}: it is 1 or more, like 1.3")


def group_size(layout: Layout) -> int:
    """Consecutive ranks of a stage that wait for each other in every layer.

    >>> group_size(Layout(dp=4, tp=2)), group_size(Layout(dp=4, tp=2, ep=4)), group_size(Layout(dp=4, tp=2, zero=3))
    (2, 4, 8)
    """
    return layout.stage_gpus if layout.zero >= 2 else math.lcm(layout.tp * layout.cp, layout.ep)


def slow_pipelines(layout: Layout, stragglers: Mapping[int, float]) -> list[tuple[float, ...]]:
    """How many times as long each stage computes, for every pipeline that holds a slow rank, without repetitions.

    >>> slow_pipelines(Layout(dp=2, tp=2, pp=2), {5: 1.3})
    [(1.0, 1.3)]
    """
    found: dict[int, list[float]] = {}
    for rank, slowdown in stragglers.items():
        stage, within_stage = layout.place(rank)
        factors = found.setdefault(within_stage // group_size(layout), [1.0] * layout.pp)
        factors[stage] = max(factors[stage], slowdown)
    return sorted({tuple(factors) for factors in found.values()})


def step_wait(iteration_s: tuple[float, ...], layout: Layout, compute_s: float, draws: float) -> Straggling | None:
    """How long a step waits for ranks that are slow now and then. Each rank computes for `compute_s`, the time of
    `draws` iterations as they were measured. These are taken to vary alike; None where they do not say.

    In every draw a group waits for its slowest rank; at the end of the step all wait for the slowest group, whose draws
    are late and early in turn.
    """
    group = group_size(layout)
    inside = straggling(iteration_s, group)
    between = straggling(iteration_s, layout.gpus // group, draws)
    if inside is None or between is None:
        return None
    # A draw takes so many times as long here as where it was measured.
    each = compute_s / draws / statistics.fmean(iteration_s)
    always = draws * inside.wait_s
    mean, low, high = ((always + one) * each for one in (between.wait_s, between.p10_s, between.p90_s))
    return Straggling(mean, low, high, inside.extrapolated or between.extrapolated)
