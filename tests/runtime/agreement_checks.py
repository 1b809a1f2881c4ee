"""Every place where ranks agree, and what they do when an error strikes there, on one rank or on all.

`SITES` has each call of an agreement in `backbeat/comm` and `backbeat/runtime`, with the situations in which it is
reached. In each, the call raises before or after it has taken part. The caller catches the error and trains on; an
answer says what came of the steps after it (`test_agreements` judges them).
"""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from compressed_rig import SOME, compressed
from scenario_rig import Context, Scenario, mlp
from sharded_checks import Chain, plan_of, tokens
from torch import nn

import backbeat
from backbeat.comm.agreement import RankStore
from backbeat.comm.communicators import Communicators
from backbeat.errors import AgreedError
from backbeat.model import CollectiveTimes, Network
from backbeat.runtime import (
    DistributedDataParallel,
    Watch,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    parallelize,
)
from backbeat.runtime.ddp import tuner as tuner_module
from backbeat.runtime.parallel import choice, heartbeat, step_slowdown, trials
from backbeat.runtime.parallel import parallelize as parallelize_module
from backbeat.runtime.parallel import search as search_module
from backbeat.runtime.reduce.runner import StepRunner

PACKAGE = Path(backbeat.__file__).parent
LOOKED_AT = ("comm", "runtime")
EXCHANGES = {name for name, call in vars(RankStore).items() if callable(call) and not name.startswith("_")}
"""What ranks agree by: every public method of a `RankStore` …"""
MORE = {"sums", "same_on_all_ranks", "calibrate", "all_gather_object", "broadcast_object_list"}
"""… and these functions."""

SITES: dict[str, tuple[str, ...]] = {
    "runtime/ddp/reducer:Reducer._agree agree": ("wrap", "ready", "thaw", "tune_later", "copied", "moved"),
    "runtime/ddp/reducer:Reducer._form_in_ready_order from_rank_0": ("ready",),
    "runtime/ddp/reducer:Reducer._take_in wait_for_all": ("thaw",),
    "runtime/ddp/reducer:Reducer._load raise_on_all": ("load",),
    "runtime/ddp/reducer:Reducer._load agree": ("load",),
    "runtime/ddp/tuner:Tuner._means sums": ("tune", "tune_later"),
    "runtime/ddp/tuner:Tuner._measure_network calibrate": ("tune_measured",),
    "runtime/ddp/tuner:Tuner._plan_and_switch from_rank_0": ("tune",),
    "runtime/ddp/tuner:Tuner._plan_and_switch document_from_rank_0": ("tune",),
    "runtime/watch:Watch._sample collect_on_rank_0": ("watch",),
    "runtime/sharded/shard:_compare agree": ("units",),
    "runtime/parallel/every_kind:load_full_state_dict broadcast_object_list": ("loaded",),
    "runtime/parallel/parallelize:parallelize same_on_all_ranks": ("search",),
    "runtime/parallel/request:ParallelRequest.conditions from_rank_0": ("search",),
    "runtime/parallel/probe:message_s gather": ("search",),
    "runtime/parallel/search:ParallelSearch.run agree": ("search",),
    "runtime/parallel/search:ParallelSearch._measured_outcome from_rank_0": ("search",),
    "runtime/parallel/search:ParallelSearch._measured_outcome failure": ("search",),
    "runtime/parallel/search:ParallelSearch._measured_outcome document_from_rank_0": ("search",),
    "runtime/parallel/search:ParallelSearch._try from_rank_0": ("search_one",),
    "runtime/parallel/search:ParallelSearch._known raise_on_all": ("search",),
    "runtime/parallel/search:ParallelSearch._known document_from_rank_0": ("search",),
    "runtime/parallel/search:ParallelSearch._profile raise_on_all": ("search",),
    "runtime/parallel/search:ParallelSearch._profile gather": ("search",),
    "runtime/parallel/search:ParallelSearch._profile document_from_rank_0": ("search",),
    # On a GPU alone: what FSDP2 costs the host.
    "runtime/parallel/search:ParallelSearch._given.<locals>.largest gather": (),
    "runtime/parallel/search:ParallelSearch._calibrated calibrate": ("search",),
    "runtime/parallel/search:ParallelSearch._candidates call_on_rank_0": ("search",),
    "runtime/parallel/step_slowdown:measure_step_slowdown from_rank_0": ("search",),
    "runtime/parallel/step_slowdown:measure_step_slowdown attempt": ("search",),
    "runtime/parallel/step_slowdown:measure_step_slowdown gather": ("search",),
    "runtime/parallel/step_slowdown:_TimedSteps.seconds wait_for_others": ("search",),
    "runtime/parallel/trials:take_turns from_rank_0": ("search",),
    "runtime/parallel/trials:try_plan attempt": ("search",),
    "runtime/parallel/trials:try_plan alarm_for": ("search",),
    "runtime/parallel/trials:try_plan failure": ("search",),
    "runtime/parallel/trials:try_plan gather": ("search",),
}


CHANGES = {
    "runtime/ddp/reducer:Reducer.switch install": ("ready",),
    "runtime/reduce/runner:StepRunner.add_parameters install": ("thaw",),
}
"""What follows an agreement, and may fail on a rank that has no memory left."""


def sites() -> set[str]:
    """Every call of an agreement that the sources have, but for those by which agreements are made."""
    found: set[str] = set()
    for path in (path for folder in LOOKED_AT for path in (PACKAGE / folder).rglob("*.py")):
        where = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if where != "comm/agreement":
            _look(ast.parse(path.read_text()), f"{where}:", "", found)
    return found


def _look(node: ast.AST, where: str, inside: str, found: set[str]) -> None:
    """Enter what this node calls, by the names that frames have."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        where, inside = f"{where}{inside}{node.name}", ".<locals>." if isinstance(node, ast.FunctionDef) else "."
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        receiver = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        of_ranks = "ranks" in receiver.lower().rpartition(".")[2] or receiver.startswith("RankStore(")
        if (name in EXCHANGES and of_ranks) or name in MORE:
            found.add(f"{where} {name}")
    for child in ast.iter_child_nodes(node):
        _look(child, where, inside, found)


STEPS = 2
"""How many follow the error."""


class InjectedError(RuntimeError):
    """Raised where ranks agree."""


class Injection:
    """Raises at one site, once armed: on these ranks, before or after the call that stands there."""

    def __init__(self, ctx: Context, site: str, who: str, when: str) -> None:
        self.site, self.when = site, when
        self.error = AgreedError("injected") if when == "agreed" else InjectedError("injected")
        self.mine = who == "all" or ctx.rank == (0 if who == "first" else ctx.size - 1)
        self.armed = self.reached = False
        self.unknown: set[str] = set()

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Inside, every agreement passes through `call`."""
        with contextlib.ExitStack() as stack:
            for owner, name in (
                *((RankStore, name) for name in EXCHANGES),
                (Communicators, "sums"),
                (StepRunner, "install"),
                (parallelize_module, "same_on_all_ranks"),
                (tuner_module, "calibrate"),
                (search_module, "calibrate"),
                (dist, "broadcast_object_list"),
                (dist, "all_gather_object"),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._through(getattr(owner, name), name)))
            yield

    def _through(self, plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            here = _site(name)
            if here is not None and here not in SITES and name != "install":
                self.unknown.add(here)
            strikes = here == self.site and self.armed
            if strikes:
                self.reached, self.armed = True, False
            if strikes and self.mine and self.when == "before":
                raise self.error
            found = plain(*args, **kwargs)
            if strikes and self.mine:
                if isinstance(found, contextlib.AbstractContextManager):
                    return _raises_behind(found, self.error)
                raise self.error
            return found

        return call


@contextlib.contextmanager
def _raises_behind(plain: contextlib.AbstractContextManager[Any], error: Exception) -> Iterator[Any]:
    with plain as found:
        yield found
    raise error


def _site(name: str) -> str | None:
    """Who called: in the package, and not to make an agreement."""
    frame = sys._getframe(2)
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    where = path.relative_to(PACKAGE).with_suffix("").as_posix()
    if where == "comm/agreement" or where.split("/")[0] not in LOOKED_AT:
        return None
    return f"{where}:{frame.f_code.co_qualname} {name}"


class Reversed(nn.ModuleList):
    """Gradients become ready in the order of registration, which nobody expects."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = torch.tanh(layer(x))
        return x


class Job:
    """A model, how it is made parallel, and steps whose gradients are compared with a mean made by hand."""

    def __init__(self, ctx: Context, injection: Injection, plain: Any = None, data: Callable[..., Any] | None = None):
        self.ctx, self.injection = ctx, injection
        self.plain = ctx.build(Reversed) if plain is None else plain
        self.data = data or (lambda rank: ctx.data(3, 6, step=1, rank=rank))
        self.wrapped: Any = None
        self.outcomes: list[str] = []
        self.expected: dict[str, torch.Tensor | None] | None = None

    def make(self, make: Callable[[Any], Any]) -> None:
        """Where that raises, once more, as a user might try."""
        for _ in range(2):
            with contextlib.suppress(Exception):
                self.wrapped = make(copy.deepcopy(self.plain))
                return

    def arm(self) -> None:
        self.injection.armed = True

    def step(self) -> None:
        """`right`, `wrong`, or that it raised."""
        try:
            self.wrapped.zero_grad()
            self.wrapped(self.data(self.ctx.rank)).square().mean().backward()
            if self.outcomes or self.injection.reached:
                self.outcomes.append("right" if self._right() else "wrong")
        except Exception as error:
            if not self.injection.reached:
                raise
            self.outcomes.append(f"raised {type(error).__name__}: {error}")

    def steps(self, count: int = STEPS) -> None:
        for _ in range(count):
            self.step()

    def _right(self) -> bool:
        trained = {name: one.requires_grad for name, one in self._module.named_parameters()}
        total: dict[str, torch.Tensor] = {}
        for rank in range(self.ctx.size):
            replica = copy.deepcopy(self.plain)
            for name, one in replica.named_parameters():
                one.requires_grad_(trained[name])
            replica(self.data(rank)).square().mean().backward()
            for name, one in replica.named_parameters():
                if one.grad is not None:
                    total[name] = total.get(name, 0) + one.grad / self.ctx.size
        for name, one in self._module.named_parameters():
            grad: Any = one.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            if (grad is None) != (name not in total):
                return False
            if grad is not None and not torch.allclose(grad, total[name], rtol=1e-4, atol=1e-6):
                return False
        return True

    @property
    def _module(self) -> Any:
        return getattr(self.wrapped, "module", self.wrapped)


Situation = Callable[[Context, Injection], Job]
SITUATIONS: dict[str, Situation] = {}


def situation(run: Situation) -> Situation:
    SITUATIONS[run.__name__] = run
    return run


@situation
def wrap(ctx: Context, injection: Injection) -> Job:
    job = Job(ctx, injection)
    job.arm()
    job.make(DistributedDataParallel)
    return job


@situation
def ready(ctx: Context, injection: Injection) -> Job:
    """Stock DDP's buckets are formed again after the first step, in another order here."""
    job = Job(ctx, injection)
    job.wrapped = DistributedDataParallel(copy.deepcopy(job.plain), bucket_cap_mb=0.0002)
    job.arm()
    job.step()
    return job


@situation
def thaw(ctx: Context, injection: Injection) -> Job:
    job = Job(ctx, injection)
    job.plain[0].requires_grad_(False)
    job.wrapped = DistributedDataParallel(copy.deepcopy(job.plain))
    for _ in range(2):
        job.step()
    job.wrapped.module[0].requires_grad_(True)
    job.arm()
    job.step()
    return job


@situation
def copied(ctx: Context, injection: Injection) -> Job:
    """A copy is built by its first forward that trains."""
    job = Job(ctx, injection)
    job.wrapped = copy.deepcopy(DistributedDataParallel(copy.deepcopy(job.plain)))
    job.arm()
    job.step()
    return job


@situation
def moved(ctx: Context, injection: Injection) -> Job:
    job = Job(ctx, injection)
    job.wrapped = DistributedDataParallel(copy.deepcopy(job.plain))
    job.step()
    other = dist.new_group(timeout=timedelta(seconds=5))
    job.arm()
    with contextlib.suppress(Exception):
        job.wrapped._update_process_group(other)
    return job


@situation
def load(ctx: Context, injection: Injection) -> Job:
    """While the density falls: ranks that count their steps differently would send messages of different sizes."""
    job = Job(ctx, injection)
    plan = compressed(job.plain, SOME)
    model = job.wrapped = DistributedDataParallel(copy.deepcopy(job.plain), plan=plan, compression={"warmup_steps": 12})
    state = {**model.residual_state_dict(), "step": 11}
    # What all ranks have decoded is right: that ranks have the same.
    job._right = partial(_alike, job)  # type: ignore[method-assign]
    job.step()
    job.arm()
    with contextlib.suppress(Exception):
        model.load_residual_state_dict(state)
    return job


def _alike(job: Job) -> bool:
    mine = torch.cat([one.grad.reshape(-1) for one in job.wrapped.parameters()])
    found = [torch.empty_like(mine) for _ in range(job.ctx.size)]
    dist.all_gather(found, mine)
    return all(torch.equal(found[0], other) for other in found)


def _network(ctx: Context) -> Network:
    times = CollectiveTimes(alpha_s=50e-3, beta_s_per_byte=1e-9)
    return Network(name="slow", workers=ctx.size, all_reduce=times, backend="gloo")


def _tune(ctx: Context, injection: Injection, *, steps: int, **options: Any) -> Job:
    """The tuner decides at the fourth step after any change."""
    with (
        mock.patch.object(tuner_module, "SETTLE_STEPS", 1),
        mock.patch.object(tuner_module, "MEASURED_STEPS", 3),
        mock.patch.object(tuner_module, "FIRST_STEPS", 10**9),
        mock.patch.object(tuner_module, "CALIBRATE_S", (0.2, 0.2)),
    ):
        job = Job(ctx, injection, ctx.build(partial(mlp, depth=6)))
        job.wrapped = DistributedDataParallel(copy.deepcopy(job.plain), plan="auto", bucket_cap_mb=0.0004, **options)
        for _ in range(steps):
            job.step()
        job.arm()
        job.steps(6)
    return job


@situation
def tune(ctx: Context, injection: Injection) -> Job:
    return _tune(ctx, injection, steps=1, network=_network(ctx))


@situation
def tune_measured(ctx: Context, injection: Injection) -> Job:
    return _tune(ctx, injection, steps=1)


@situation
def tune_later(ctx: Context, injection: Injection) -> Job:
    """At the switch to a plan, or at the one after it."""
    return _tune(ctx, injection, steps=3, network=_network(ctx))


@situation
def watch(ctx: Context, injection: Injection) -> Job:
    job = Job(ctx, injection)
    job.wrapped = DistributedDataParallel(copy.deepcopy(job.plain))
    seen = Watch(job.wrapped, every=6)
    job.arm()
    job.steps(13)
    assert seen is not None
    return job


@situation
def units(ctx: Context, injection: Injection) -> Job:
    job = Job(ctx, injection, ctx.build(Chain), partial(tokens, ctx, 0))
    job.arm()
    job.make(lambda model: fully_shard(model, plan_of(ctx)))
    return job


@situation
def loaded(ctx: Context, injection: Injection) -> Job:
    """Weights that are another rank's are no matter of gradients: every rank has the same ones here."""
    job = Job(ctx, injection)
    job.wrapped = DistributedDataParallel(copy.deepcopy(job.plain))
    state = full_state_dict(job.wrapped)
    job.step()
    job.arm()
    with contextlib.suppress(Exception):
        load_full_state_dict(job.wrapped, state)
    return job


@situation
def search(ctx: Context, injection: Injection, worth: Callable[[Any], Any] = list) -> Job:
    """The whole of `parallelize`, as quick as it can be."""
    job = Job(ctx, injection, ctx.build(partial(mlp, depth=6)))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "plan.json")
    given = (job.data(ctx.rank), lambda model, batch: model(batch).square().mean())
    job.arm()
    with (
        mock.patch.object(choice, "worth_trying", worth),
        # Whatever the machine does meanwhile.
        mock.patch.object(trials, "affordable", _all_affordable),
        mock.patch.object(search_module, "affordable", _all_affordable),
        mock.patch.object(trials, "_steps", return_value=3),
        mock.patch.object(step_slowdown, "pairs_within", return_value=(2, 1, 2)),
        mock.patch.object(trials, "GLOO_TIMEOUT_S", 5.0),
        mock.patch.multiple(heartbeat, BEAT_S=0.1, LOST_S=3.0, FAILED_S=1.0),
    ):
        job.make(lambda model: parallelize(model, f"auto:{path}", example=given, optimizer="sgd", budget_s=2.0))
    return job


def _all_affordable(found: Sequence[Any], _: float) -> tuple[list[str], int]:
    return [one.name for one in found], 1


@situation
def search_one(ctx: Context, injection: Injection) -> Job:
    """One candidate alone is worth trying."""
    return search(ctx, injection, lambda found: found[:1])


def struck(ctx: Context, name: str, site: str, who: str, when: str) -> str:
    """What came of it on this rank, as JSON."""
    # As long as a collective may take: the ranks that wait for one that raised are not the test's to wait for.
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=5))
    injection = Injection(ctx, site, who, when)
    with injection.everywhere():
        job = SITUATIONS[name](ctx, injection)
        if job.wrapped is None:
            job.outcomes = ["raised: there is no model"] * STEPS
        else:
            job.steps()
    return json.dumps({"reached": injection.reached, "unknown": sorted(injection.unknown), "steps": job.outcomes})


QUICK = {("all", "agreed"), ("last", "after")}
"""On which ranks and when, in every run of the tests; the rest, and all searches but one, are long."""
EVERY = {*product(("all", "first", "last"), ("before", "after")), ("all", "agreed")}
ONE_SEARCH = "runtime/parallel/search:ParallelSearch.run agree"


def strikes(name: str, site: str) -> list[tuple[str, str]]:
    """On which ranks and when the error strikes. A search takes seconds, and ends alike on all ranks."""
    if name.startswith("search"):
        return [("first", "before"), ("last", "after"), *([("all", "agreed")] if site == ONE_SEARCH else [])]
    return sorted(how for how in EVERY if site in SITES or how != ("all", "agreed"))


CASES = {
    f"{name}, {site}, {who}, {when}": (name, site, who, when)
    for site, names in (SITES | CHANGES).items()
    for name in names
    for who, when in strikes(name, site)
}


def is_long(case: str) -> bool:
    name, site, *how = CASES[case]
    if name.startswith("search"):
        return site != ONE_SEARCH or how != ["all", "agreed"]
    return tuple(how) not in QUICK


CHECKS = {case: Scenario(lambda ctx, how=how: struck(ctx, *how), case) for case, how in CASES.items()}
