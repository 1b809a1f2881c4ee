"""Candidates tried for some steps each, on copies of the model, taking turns.

One candidate lives at a time, on process groups of its own. One that fails on any rank is dropped on all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from backbeat.comm.agreement import RankStore
from backbeat.comm.clock import clock_for
from backbeat.comm.communicators import Communicators
from backbeat.errors import InputError, where_raised
from backbeat.measure.model.training_step import Loss, Training, make_optimizer, release, scaler_for
from backbeat.model import Plan
from backbeat.runtime.ddp.wrapper import DistributedDataParallel
from backbeat.runtime.parallel.apply_plan import apply_plan
from backbeat.runtime.parallel.preserve import copy_of

if TYPE_CHECKING:
    from backbeat.runtime.parallel.candidates import Candidate

TURNS = 2
WARMUP = 3
"""Steps of a turn that are not timed: DDP forms its buckets anew after the first."""
FAR_BEHIND = 1.5
ONE_TURN = 0.03
"""Repeatability, assumed where there was time for one turn only."""
LEAST_STEPS, MOST_STEPS = 3, 10
# A collective of a trial gives up after this long, or after twenty steps if these take longer: what a failure on
# another rank costs where nothing else reports it. On gloo connections that close mostly do (`TrialGroups.close`); a
# busy machine may hold a healthy rank up for seconds. On NCCL the alarm does (`RankStore.alarm_for`); without it, NCCL
# ends the process after this long.
GLOO_TIMEOUT_S, OTHER_TIMEOUT_S = 30.0, 120.0

MakeOptimizer = str | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleStep:
    batch: Any
    loss: Loss
    optimizer: MakeOptimizer
    precision: str
    device: torch.device

    def training(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
        return Training(
            model=model,
            batch=self.batch,
            loss=self.loss,
            optimizer=optimizer,
            device=self.device,
            precision=self.precision,
            scaler=scaler_for(self.precision, self.device),
            clock=clock_for(self.device),
        )

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = make_optimizer(self.optimizer, trained) if isinstance(self.optimizer, str) else self.optimizer(trained)
        if not isinstance(found, torch.optim.Optimizer):
            raise InputError(f"optimizer(parameters) returned a {type(found).__name__}: it must return an optimizer")
        return found


@dataclass(slots=True)
class Trials:
    """Results of the trials, the same on every rank."""

    turns_s: dict[str, list[float]] = field(default_factory=dict)
    """A step of each candidate, one figure a turn."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Why a candidate did not run."""

    @property
    def best_s(self) -> dict[str, float]:
        return {name: min(found) for name, found in self.turns_s.items()}

    @property
    def repeatability(self) -> float:
        """By what share two turns of one candidate differ: the median over candidates."""
        apart = [max(found) / min(found) - 1 for found in self.turns_s.values() if len(found) > 1]
        return median(apart) if apart else ONE_TURN

    def much_slower(self, candidate: Candidate) -> bool:
        """Whether another turn would change nothing: the time is better spent on the others."""
        found = self.best_s
        fastest = min(found.values(), default=0.0)
        return candidate.kind != "stock" and found.get(candidate.name, 0.0) > FAR_BEHIND * fastest


def take_turns(
    model: nn.Module,
    candidates: Sequence[Candidate],
    example: ExampleStep,
    ranks: RankStore,
    deadline_s: float,
    say: Callable[[str], None],
) -> Trials:
    """Try candidates, forwards and then backwards, as far as rank 0 has time."""
    trials = Trials()
    names, turns = ranks.from_rank_0(affordable(candidates, deadline_s - time.monotonic()))
    tried = [one for name in names for one in candidates if one.name == name]
    for turn in range(turns):
        order = [one for one in tried if one.name not in trials.dropped and not trials.much_slower(one)]
        rounds_left = len(order) * (turns - turn)
        for index, candidate in enumerate(order if turn % 2 == 0 else order[::-1]):
            left_s = deadline_s - time.monotonic()
            step_s = max(candidate.predicted_s, *trials.turns_s.get(candidate.name, [0.0]))
            steps = ranks.from_rank_0(_steps(left_s / (rounds_left - index), step_s))
            if steps == 0:
                continue
            say(f"trying {candidate.name}, turn {turn + 1} of {turns}")
            found = try_plan(model, candidate.plan, example, ranks, steps, candidate.predicted_s)
            if isinstance(found, str):
                trials.dropped[candidate.name] = found
                trials.turns_s.pop(candidate.name, None)
                say(f"{candidate.name} is dropped: {found}")
            else:
                trials.turns_s.setdefault(candidate.name, []).append(found)
    return trials


def affordable(candidates: Sequence[Candidate], seconds: float) -> tuple[list[str], int]:
    """The names of the candidates that there is time to try, in order, and the number of turns.

    All in two turns or in one; else stock DDP and the two or the one predicted to be fastest, in one; else none. Stock
    DDP comes first and the others by prediction, so that what comes last is what matters least.
    """
    ordered = sorted(candidates, key=lambda one: (one.kind != "stock", one.predicted_s))
    for tried, turns in ((ordered, TURNS), (ordered, 1), (ordered[:3], 1), (ordered[:2], 1)):
        share_s = seconds / max(len(tried) * turns, 1)
        if all(_steps(share_s, one.predicted_s) for one in tried):
            return [one.name for one in tried], turns
    return [], 0


def _steps(seconds: float, step_s: float) -> int:
    """How many steps fit after warming up; 0 where too few do. Preparing a copy is counted as two more.

    >>> _steps(10.0, 0.1), _steps(1.2, 0.1), _steps(0.1, 0.1)
    (10, 7, 0)
    """
    fitting = int(seconds / max(step_s, 1e-6) + 1e-9) - WARMUP - 2
    return min(fitting, MOST_STEPS) if fitting >= LEAST_STEPS else 0


def try_plan(
    model: nn.Module, plan: Plan, example: ExampleStep, ranks: RankStore, steps: int, step_s: float = 0.0
) -> float | str:
    """Seconds of a step under the plan, on the slowest rank; or, as text, why some rank could not run it.

    `step_s` is what a step was predicted to take.
    """
    copied: Any
    copied, found = ranks.attempt(lambda: copy_of(model))
    error: str | None = None
    seconds, order = 0.0, 0
    if found is None:
        least_s = GLOO_TIMEOUT_S if ranks.communicators.backend == "gloo" else OTHER_TIMEOUT_S
        timeout_s = max(least_s, 20 * step_s)
        groups = TrialGroups(plan, ranks.device, timedelta(seconds=timeout_s))
        with ranks.alarm_for(groups.backends) as alarm:
            try:
                copied, seconds = _train(copied, plan, example, steps, groups)
            except Exception as raised:
                error, order = where_raised(raised), alarm()
                # What was raised holds the frames, and these the wrapper with its connections.
                raised.__traceback__ = None
            if error is not None:
                # Its connections end, and so do the collectives in which the other ranks wait.
                copied = None
                groups.close()
                release(ranks.device)
            # A rank that is done keeps its connections until all are.
            found = ranks.failure(error, order)
        copied = None
        groups.close()
    copied = None
    release(ranks.device)
    return found if found is not None else float(max(ranks.gather(seconds)))


def _train(model: nn.Module, plan: Plan, example: ExampleStep, steps: int, groups: TrialGroups) -> tuple[Any, float]:
    """The model as it was trained, and seconds of a step."""
    wrapped: Any = apply_plan(model, plan, group=groups.world_group, mesh=groups.mesh)
    if isinstance(wrapped, DistributedDataParallel):
        groups.communicators = wrapped.reducer.communicators
        groups.backends += groups.communicators.backends()
    optimizer = example.make_optimizer(wrapped)
    if plan.compressed:
        wrapped.attach(optimizer, max_grad_norm=None)
    training = example.training(wrapped, optimizer)
    for _ in range(WARMUP):
        training.iterate()
    clock = training.clock
    clock.reserve(5 * steps + 1)
    marks = [*(training.iterate().begin for _ in range(steps)), clock.mark()]
    clock.synchronize()
    return wrapped, median(clock.between(*pair) for pair in pairwise(marks))


class TrialGroups:
    """The process groups of one trial: a failure ends them, and not the job's."""

    def __init__(self, plan: Plan, device: torch.device, timeout: timedelta) -> None:
        self.world_group: Any = None
        self.mesh: DeviceMesh | None = None
        mesh = plan.sharding.mesh if plan.sharding is not None else None
        if mesh is not None and mesh.replicate > 1:
            ranks = torch.arange(mesh.replicate * mesh.shard, device="cpu").view(mesh.replicate, mesh.shard)
            self._groups = [
                dist.new_subgroups_by_enumeration(one.tolist(), timeout=timeout)[0] for one in (ranks.t(), ranks)
            ]
            self.mesh = DeviceMesh.from_group(
                self._groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard")
            )
        else:
            self.world_group = dist.new_group(timeout=timeout)
            self._groups = [self.world_group]
            if mesh is not None:
                self.mesh = DeviceMesh.from_group(self.world_group, device.type, mesh_dim_names=("shard",))
        self.backends: list[Any] = [group._get_backend(device) for group in self._groups]
        """The libraries' own objects."""
        self.communicators: Communicators | None = None
        """What the wrapper made."""

    def close(self) -> None:
        """Take the groups down, once; on gloo, ranks that still use them then raise."""
        # Connections end with the last that holds them.
        self.backends.clear()
        if self.communicators is not None:
            self.communicators.close()
        if self.mesh is not None:
            _forget_meshes()
        self.world_group = self.mesh = self.communicators = None
        while self._groups:
            dist.destroy_process_group(self._groups.pop())


def _forget_meshes() -> None:
    """Empty torch's caches for operators on sharded tensors and for their redistribution: they hold meshes, and so
    connections. Versions of torch differ in which caches they have."""
    for module, name in (
        ("debug", "_clear_sharding_prop_cache"),
        ("_redistribute", "clear_redistribute_planner_cache"),
        ("_redistribute", "_gen_transform_infos.cache_clear"),
        ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
    ):
        with contextlib.suppress(ImportError, AttributeError):
            attrgetter(name)(import_module(f"torch.distributed.tensor.{module}"))()
