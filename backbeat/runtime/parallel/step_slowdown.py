"""How much longer this job's own step takes beside communication.

Steps of a copy of the model run alone and beside all-reduces in a row, by turns, on every rank at once. What slows them
counts wherever it is: multiprocessors and memory that collectives use, and the host's cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median

import torch
from torch import nn

from backbeat.comm.agreement import RankStore
from backbeat.measure.model.training_step import release
from backbeat.measure.network.beside_compute import beside_bytes, messages_beside
from backbeat.model import Slowdown
from backbeat.runtime.parallel.preserve import copy_of
from backbeat.runtime.parallel.trials import ExampleStep

_WARMUP = 2
_SAMPLE_S = 0.03
"""Short steps are timed several at once."""
_COVERED = 1.5
"""All-reduces last for this many times what the steps take alone."""
_LEAST_PAIRS, _MOST_PAIRS = 2, 9


def pairs_within(limit_s: float, step_s: float, message_s: float) -> tuple[int, int, int] | None:
    """How often to time so many steps alone and then beside so many all-reduces; None where even twice takes longer.

    >>> pairs_within(3.0, 0.1, 0.02), pairs_within(3.0, 0.5, 0.01), pairs_within(3.0, 0.7, 0.01)
    ((9, 1, 9), (2, 1, 76), None)
    """
    steps = max(1, math.ceil(_SAMPLE_S / step_s))
    messages = messages_beside(steps * step_s, message_s, covered=_COVERED, lead_s=0.0)
    fitting = int(limit_s / (steps * step_s + messages * message_s))
    return (min(fitting, _MOST_PAIRS), steps, messages) if fitting >= _LEAST_PAIRS else None


def measure_step_slowdown(
    model: nn.Module,
    example: ExampleStep,
    ranks: RankStore,
    seconds_of: Callable[[int], float],
    step_s: float,
    limit_s: float,
) -> Slowdown | str:
    """The same on every rank, which all call it; or, as text, why it was not measured: it would take longer than
    `limit_s`, or some rank cannot train another copy.

    `seconds_of` says what an all-reduce of so many bytes takes on the job's link, `step_s` what a step takes alone.
    """
    size = ranks.from_rank_0(beside_bytes(seconds_of))
    pairs = ranks.from_rank_0(pairs_within(limit_s, step_s, seconds_of(size)))
    if pairs is None:
        return "too slow, budget_s= gives more"
    count, steps, messages = pairs
    ratios: list[float] = []
    timed, failed = ranks.attempt(lambda: _TimedSteps(model, example, ranks, size))
    while timed is not None and failed is None and len(ratios) < count:
        ratio, failed = ranks.attempt(partial(timed.ratio, steps, messages))
        ratios.append(ratio or 0.0)
    timed = None
    release(ranks.device)
    if failed is not None:
        return failed
    factor = max(mean(ranks.gather(median(ratios))), 1.0)
    return Slowdown(matmul=factor, attention=factor, memory=factor)


class _TimedSteps:
    """Steps of a copy of the model, beside all-reduces of so many bytes."""

    def __init__(self, model: nn.Module, example: ExampleStep, ranks: RankStore, size: int) -> None:
        copied = copy_of(model)
        self.training, self.ranks = example.training(copied, example.make_optimizer(copied)), ranks
        self.message = torch.zeros(size // 4, device=ranks.device)
        self.seconds(_WARMUP)

    def ratio(self, steps: int, messages: int) -> float:
        alone = self.seconds(steps)
        return self.seconds(steps, [self.message] * messages) / alone

    def seconds(self, steps: int, messages: Sequence[torch.Tensor] = ()) -> float:
        """From the beginning of the first step to the end of the last, while these are reduced."""
        clock = self.training.clock
        clock.reserve(5 * steps)
        self.ranks.wait_for_others()
        sent = [self.ranks.communicators[0].all_reduce(one) for one in messages]
        marks = [self.training.iterate() for _ in range(steps)]
        for one in sent:
            one.wait()
        clock.synchronize()
        return clock.between(marks[0].begin, marks[-1].end)
