"""Real training on the nodes: one model under stock DDP and under each plan, taking turns, step by step.

All variants start from the same weights and see the same batches and the same random numbers, so that their losses can
be compared; nodes see different batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from backbeat.lab.jobs import Turn
from backbeat.measure.factory import Workload, load

if TYPE_CHECKING:
    from backbeat.model import Plan

WARM_UP = 3
"""Stock DDP rebuilds its buckets after the first step."""
_LEARNING_RATE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one node saw of one variant."""

    series: tuple[list[float], list[float]]
    losses: list[float]
    """Of every step in order, the warm-up included."""


def profile_here(spec: str, device: torch.device, batch_size: int | None, seconds: float) -> bytes:
    """This node's own compute, measured while all other nodes measure theirs: that is how they will train."""
    from backbeat.measure.factory import measure_factory
    from backbeat.model.files import encode

    torch.manual_seed(0)
    return encode(measure_factory(load(spec), batch_size=batch_size, device=str(device), time_limit_s=seconds).profile)


def train(
    spec: str,
    device: torch.device,
    rank: int,
    batch_size: int | None,
    plans: Sequence[Plan | None],
    turns: Sequence[Turn],
) -> list[Trained]:
    """Train one variant per plan (None: stock DDP)."""
    variants = [_Variant(spec, device, rank, batch_size, plan) for plan in plans]
    for variant in variants:
        for _ in range(WARM_UP):
            variant.step()
    results = [Trained(series=([], []), losses=variant.losses) for variant in variants]
    for turn in turns:
        variants[turn.job].lead_in()
        for _ in range(turn.iterations):
            results[turn.job].series[turn.series].append(variants[turn.job].step())
        variants[turn.job].wind_up()
    return results


class _Variant:
    """A model of its own, wrapped for one plan."""

    def __init__(self, spec: str, device: torch.device, rank: int, batch_size: int | None, plan: Plan | None) -> None:
        factory = load(spec)
        # Weights come from node 0 when the model is wrapped; what differs is the batch.
        torch.manual_seed(rank)
        workload: Workload = factory.build(factory.batch_size(batch_size), device)
        self._device = device
        self._workload = workload
        self._optimizer = workload.optimizer or torch.optim.SGD(workload.model.parameters(), lr=_LEARNING_RATE)
        self._model = _wrapped(workload.model, plan, self._optimizer)
        self._decoupled = plan is not None and plan.decoupled
        self._ended = 0.0
        self._tiny = torch.zeros(1, device=device)
        self.losses: list[float] = []

    def lead_in(self) -> None:
        """Before a turn: an untimed step, so that a decoupled plan's gathers are under way when time is first taken."""
        self.step()

    def wind_up(self) -> None:
        """After a turn: nothing goes on behind another variant's back."""
        if self._decoupled:
            self._model.finish()
            self._settle()

    def step(self) -> float:
        """One step, from a common start. A decoupled plan's steps run into each other, so that they are timed from the
        end of one to the end of the next: any pause between would hide communication that training does not."""
        torch.manual_seed(len(self.losses))
        if not self._decoupled:
            dist.all_reduce(self._tiny)
            self._settle()
        start = self._ended if self._decoupled else time.perf_counter()
        loss = self._workload.loss(self._model, self._workload.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        if not self._decoupled:
            self._settle()
        elif self._device.type == "cuda":
            # The compute stream alone: gathers go on.
            torch.cuda.current_stream(self._device).synchronize()
        self._ended = time.perf_counter()
        seconds = self._ended - start
        self.losses.append(float(loss.detach()))
        return seconds

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _wrapped(model: torch.nn.Module, plan: Plan | None, optimizer: torch.optim.Optimizer) -> Any:
    if plan is None:
        return torch.nn.parallel.DistributedDataParallel(model)
    from backbeat.runtime import DistributedDataParallel

    wrapped = DistributedDataParallel(model, plan=plan)
    wrapped.attach(optimizer)
    return wrapped
