"""Real training on the ranks: one model under stock DDP and under each plan, taking turns, step by step.

Sharded plans run on torch's own `fully_shard`. All variants start from the same weights and see the same batches and
the same random numbers, so that their losses can be compared; ranks see different batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from backbeat.comm.clock import clock_for
from backbeat.lab.jobs import RankResult, Turn
from backbeat.measure.model.factory import Factory, Workload, load_factory
from backbeat.measure.model.factory_profile import measure_factory
from backbeat.measure.model.inputs import MeasureOptions
from backbeat.measure.model.training_step import Training, release, tensor_cores
from backbeat.model import Plan, Profile

WARM_UP = 3
"""Stock DDP rebuilds its buckets after the first step."""
_LEARNING_RATE = 0.01


def profile_here(
    spec: str,
    device: torch.device,
    batch_size: int | None,
    seconds: float,
    precision: str = "fp32",
    *,
    sharing: int = 1,
) -> Profile:
    """This rank's own compute, measured while all other ranks measure theirs: that is how they will train. In training
    `sharing` ranks share the link to the host."""
    from backbeat.runtime.compressed.topk_speed import measure_topk
    from backbeat.runtime.memory import apply

    torch.manual_seed(0)
    options = MeasureOptions(
        batch_size=batch_size,
        device=device,
        time_limit_s=seconds,
        precision=precision,
        # Ranks that share a machine disturb each other in training as they do here.
        accept_noise=True,
        topk_speed=measure_topk,
        apply_memory=apply,
    )
    profile = measure_factory(_with_optimizer(load_factory(spec)), options).profile
    release(device)
    link = profile.host_link
    return msgspec.structs.replace(profile, host_link=link and link.shared_by(sharing))


def train(
    spec: str,
    device: torch.device,
    rank: int,
    batch_size: int | None,
    plans: Sequence[Plan | None],
    turns: Sequence[Turn],
    precision: str = "fp32",
) -> list[RankResult]:
    """Train one variant per plan (None: stock DDP), in the precision and with the optimizer that `profile_here` has."""
    release(device)
    with tensor_cores(precision, device):
        variants = (_Variant(spec, device, rank, batch_size, plan, precision) for plan in plans)
        results = _take_turns(list(variants), turns, on_gpu=device.type == "cuda")
    release(device)
    return results


def _take_turns(variants: Sequence[_Variant], turns: Sequence[Turn], *, on_gpu: bool) -> list[RankResult]:
    for variant in variants:
        for _ in range(WARM_UP):
            variant.step()
    series: list[tuple[list[float], list[float]]] = [([], []) for _ in variants]
    peaks: list[int | None] = [None for _ in variants]
    for turn in turns:
        variant = variants[turn.job]
        # Not timed: the first step after another variant's.
        variant.step()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(turn.iterations):
            series[turn.job][turn.series].append(variant.step())
        if on_gpu:
            peaks[turn.job] = max(torch.cuda.max_memory_allocated(), peaks[turn.job] or 0)
    return [
        RankResult(series=taken, losses=variant.losses, peak_bytes=peak)
        for variant, taken, peak in zip(variants, series, peaks, strict=True)
    ]


def _with_optimizer(factory: Factory) -> Factory:
    """The factory with the optimizer that training uses where it brings none: its state takes memory, its step time."""
    call: Callable[..., Any] = factory.call

    @functools.wraps(call)
    def build(**arguments: Any) -> Any:
        made = call(**arguments)
        plain = isinstance(made, (tuple, list)) and len(made) == 3 and isinstance(made[0], torch.nn.Module)
        return (*made, _optimizer(made[0])) if plain else made

    return replace(factory, call=build)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)


class _Variant:
    """A model of its own, wrapped for one plan."""

    def __init__(
        self, spec: str, device: torch.device, rank: int, batch_size: int | None, plan: Plan | None, precision: str
    ) -> None:
        factory = _with_optimizer(load_factory(spec))
        # Weights come from rank 0 when the model is wrapped; what differs is the batch.
        torch.manual_seed(rank)
        workload: Workload = factory.build(factory.batch_size(batch_size), device)
        optimizer = workload.optimizer or _optimizer(workload.model)
        self._training = Training(
            model=_wrapped(workload.model, plan, optimizer),
            batch=workload.batch,
            loss=workload.loss,
            optimizer=optimizer,
            device=device,
            precision=precision,
            clock=clock_for(device),
        )
        self._tiny = torch.zeros(1, device=device)
        self.losses: list[float] = []

    def step(self) -> float:
        """One step, from a common start."""
        training, clock = self._training, self._training.clock
        torch.manual_seed(len(self.losses))
        dist.all_reduce(self._tiny)
        clock.synchronize()
        start = clock.host_s()
        loss = training.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        training.update()
        clock.synchronize()
        seconds = clock.host_s() - start
        self.losses.append(float(loss.detach()))
        return seconds


def _wrapped(model: torch.nn.Module, plan: Plan | None, optimizer: torch.optim.Optimizer) -> Any:
    if plan is None:
        return torch.nn.parallel.DistributedDataParallel(model)
    from backbeat.runtime.parallel.apply_plan import apply_plan

    names = {parameter: name for name, parameter in model.named_parameters()}
    wrapped: Any = apply_plan(model, plan)
    if plan.sharding is None:
        wrapped.attach(optimizer, max_grad_norm=None)
        return wrapped
    # The optimizer was made with the model, before it was sharded: it is given the shards.
    shards = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [shards[names[parameter]] for parameter in group["params"]]
    return wrapped
