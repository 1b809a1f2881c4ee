"""How much longer this job's own step takes beside communication.

Steps of a copy of the model run alone and beside all-reduces in a row, by turns, on every rank at once. What slows them
counts wherever it is: multiprocessors and memory that collectives use, and the host's cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """What is timed: `steps` steps alone, then as many beside `messages` all-reduces, `count` times over."""

    count: int
    steps: int
    messages: int

    @classmethod
    def within(cls, limit_s: float, step_s: float, message_s: float) -> Pairs | None:
        """None where even the fewest take longer.

        >>> Pairs.within(3.0, 0.1, 0.02)
        Pairs(count=9, steps=1, messages=9)
        >>> Pairs.within(3.0, 0.5, 0.01).count, Pairs.within(3.0, 0.001, 0.01).steps, Pairs.within(3.0, 0.7, 0.01)
        (2, 30, None)
        """
        steps = max(1, math.ceil(_SAMPLE_S / step_s))
        messages = messages_beside(steps * step_s, message_s, covered=_COVERED, lead_s=0.0)
        fitting = int(limit_s / (steps * step_s + messages * message_s))
        if fitting < _LEAST_PAIRS:
            return None
        return cls(count=min(fitting, _MOST_PAIRS), steps=steps, messages=messages)


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
    within = Pairs.within(limit_s, step_s, seconds_of(size))
    found = ranks.from_rank_0(within and asdict(within))
    if found is None:
        return "too slow, budget_s= gives more"
    pairs = Pairs(**found)
    ratios: list[float] = []
    timed, failed = ranks.attempt(lambda: _TimedSteps(model, example, ranks, size))
    while timed is not None and failed is None and len(ratios) < pairs.count:
        ratio, failed = ranks.attempt(partial(timed.ratio, pairs))
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

    def ratio(self, pairs: Pairs) -> float:
        alone = self.seconds(pairs.steps)
        return self.seconds(pairs.steps, [self.message] * pairs.messages) / alone

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
