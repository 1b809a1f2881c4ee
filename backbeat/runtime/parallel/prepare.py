"""`parallelize`: prepare a model for data-parallel training, before its optimizer is made.

from backbeat.runtime import parallelize

model = parallelize(model, plan="auto", example=(batch, loss))     # or plan="plan.json"
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)         # as always, after
"""

from __future__ import annotations

import difflib
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from backbeat.comm.agreement import agree
from backbeat.comm.communicators import Communicators
from backbeat.comm.nccl import set_nccl_launch_order
from backbeat.errors import BackbeatError, InputError
from backbeat.measure.model.batches import to_device
from backbeat.measure.model.inputs import device_of
from backbeat.measure.model.profiler import measure
from backbeat.measure.model.training_step import OutOfMemoryError, is_out_of_memory, where_raised
from backbeat.measure.network.calibration import calibrate
from backbeat.model import Bucket, Network, Plan, Profile
from backbeat.model.files import decode, encode
from backbeat.planners import STRATEGIES
from backbeat.runtime.auto import message_sizes
from backbeat.runtime.compressed.topk_speed import measure_topk
from backbeat.runtime.memory.activations import apply as apply_memory
from backbeat.runtime.memory.budget import budget_size
from backbeat.runtime.memory.room import room_for
from backbeat.runtime.parallel.apply_plan import apply_plan, check_plain, is_stock
from backbeat.runtime.parallel.candidates import (
    FARTHEST,
    Candidate,
    extrapolation,
    in_words,
    predicted_candidates,
    simplest,
    worth_trying,
)
from backbeat.runtime.parallel.remember import conditions, remembered, save, with_note
from backbeat.runtime.parallel.together import Together
from backbeat.runtime.parallel.trials import ExampleStep, MakeOptimizer, Trials, take_turns
from backbeat.runtime.parallel.untouched import copy_of, free, untouched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from backbeat.measure.model.training_step import Loss

BUDGET_S = 50.0
PREDICTED = 0.05
"""A gain that is only predicted counts beyond this: predictions of different kinds are off by so much."""
CALIBRATE_SHARE, PROFILE_SHARE = 0.12, 0.2
"""Of the budget; trials have the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What `auto` takes, the same on every rank."""

    plan: Plan
    words: str
    """The line that rank 0 prints."""
    dropped: dict[str, str]
    """Candidates that did not run, and why."""


def parallelize(
    model: nn.Module,
    plan: Plan | str | os.PathLike[str] = "auto",
    *,
    example: tuple[Any, Loss] | None = None,
    optimizer: MakeOptimizer = "adamw",
    memory: int | str | None = None,
    compression: str | None = None,
    network: Network | str | os.PathLike[str] | None = None,
    precision: str | None = None,
    budget_s: float = BUDGET_S,
) -> nn.Module:
    """The model, ready to train data-parallel on all ranks; every rank calls it, before it makes the optimizer.

    plan: a `Plan` or the path of one: buckets run in `DistributedDataParallel`, units by `fully_shard`. "auto" measures
        and takes the fastest of stock DDP, planned buckets and planned units; "auto:FILE" also writes the plan, and
        reads it next time unless the ranks, the model, the batch or the network are others.
    example: for "auto": a batch of this rank, and `loss(model, batch)`, which returns what backward starts from.
        Copies of the model are trained; where memory has no room for one, the model itself, put back from the host.
        Weights, buffers and random generators are as before afterwards.
    optimizer: for "auto": what to try with: `sgd`, `adam` or `adamw`, or a function of a list of parameters.
    memory: for "auto": what an iteration may take on the device, in bytes or like "6GB".
    compression: for "auto": "allow" lets it take compressed buckets. Then also call `model.attach(optimizer,
        max_grad_norm=…)`.
    network: for "auto": a `Network`, a name or a path to predict with; measured on the job's ranks where left out.
    precision: for "auto": `bf16` or `fp16` where training runs under autocast around `loss`; left out, the loss runs
        as it is.
    budget_s: for "auto": about how long it may take.
    """
    if not dist.is_initialized():
        raise InputError("torch.distributed is not initialised: call init_process_group first, or run under torchrun")
    check_plain(model)
    path = _auto_path(plan)
    if path is None:
        return apply_plan(model, _given(plan))
    if not budget_s > 0:
        raise InputError(f"budget_s is {budget_s}: it must be above zero, like 50")
    if compression not in (None, "allow"):
        raise InputError(f"compression is {compression!r}: it must be 'allow', or left out")
    if compression is not None and precision == "fp16":
        raise InputError(
            "compression='allow' with precision='fp16': training in fp16 scales its loss, and what a compressed bucket "
            "keeps for later steps cannot follow the scale; train in bf16, or leave compression out"
        )
    batch, loss = _checked(example)
    device = device_of(model, None)
    step = ExampleStep(
        batch=to_device(batch, device), loss=loss, optimizer=optimizer, precision=precision or _now(), device=device
    )
    search = ParallelSearch(
        model,
        step,
        path=path,
        memory_bytes=None if memory is None else budget_size(memory),
        compression=compression == "allow",
        network=Network.load(network) if isinstance(network, (str, os.PathLike)) else network,
        budget_s=budget_s,
    )
    return apply_plan(model, search.run().plan)


def _auto_path(plan: Plan | str | os.PathLike[str]) -> str | None:
    """The file to keep the plan in, empty for none; None where a plan is given."""
    if not isinstance(plan, str) or plan.partition(":")[0] != "auto":
        return None
    if plan == "auto:":
        raise InputError("plan is 'auto:' without a file: write plan='auto:plans/run1.json', or plan='auto'")
    return plan.partition(":")[2]


def _given(plan: Plan | str | os.PathLike[str]) -> Plan:
    if isinstance(plan, Plan):
        return plan
    text = os.fspath(plan) if isinstance(plan, (str, os.PathLike)) else ""
    if not os.path.exists(text):
        if text.partition(":")[0] in STRATEGIES:
            raise InputError(
                f"plan={text!r} is a strategy: make the plan (`backbeat plan … --strategy {text} -o plan.json`) and "
                "give its file, or plan='auto' with example=(batch, loss)"
            )
        if difflib.get_close_matches(text, ["auto"], cutoff=0.7):
            raise InputError(f"plan={text!r} is no file: did you mean 'auto'?")
    return Plan.load(plan)


def _checked(example: Any) -> tuple[Any, Loss]:
    if not isinstance(example, tuple) or len(example) != 2 or not callable(example[1]):
        raise InputError(
            "plan='auto' times steps of an example: give example=(batch, loss), where loss(model, batch) returns what "
            "backward starts from"
        )
    return example


def _now() -> str:
    """What fp32 means in this process."""
    return "tf32" if torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32 else "fp32"


class ParallelSearch:
    """One search for the fastest way to train a model. Every rank makes the same calls."""

    def __init__(
        self,
        model: nn.Module,
        example: ExampleStep,
        *,
        path: str,
        memory_bytes: int | None,
        compression: bool,
        network: Network | None,
        budget_s: float,
    ) -> None:
        world: Any = dist.group.WORLD
        self.model, self.example, self.path, self.network = model, example, path, network
        self.memory_bytes, self.compression, self.budget_s = memory_bytes, compression, budget_s
        # Before the first of them exists: a plan on two communicators may be taken.
        set_nccl_launch_order(world, example.device)
        communicators = Communicators(world, example.device, 1)
        self.together = Together(communicators)
        self._began = time.monotonic()

    def run(self) -> Taken:
        if self.together.size == 1:
            return self._alone()
        with untouched(self.example.device):
            taken = self._run()
        agree(self.together.communicators, "taken", [encode(taken.plan).decode()], "the plan taken")
        self.together.communicators.close()
        if self.together.rank == 0:
            self._say(taken.words, last=True)
            if taken.plan.compressed:
                self._say("call model.attach(optimizer, max_grad_norm=…): some buckets are compressed", last=True)
        return taken

    def _run(self) -> Taken:
        options = {
            "memory": self.memory_bytes,
            "compression": self.compression,
            "precision": self.example.precision,
            "optimizer": self.example.optimizer if isinstance(self.example.optimizer, str) else "given",
        }
        now = conditions(self.model, self.example, self.together, self.network, options)
        if self.path and (known := self._known(now)) is not None:
            return known
        profile = self._profile()
        network = self._network(profile)
        candidates = self._candidates(profile, network, now)
        # A prediction that rests on small messages alone excludes nothing.
        beyond = self.together.first(extrapolation(network, profile))
        tried = worth_trying(candidates) if beyond <= FARTHEST else candidates
        trials, short = Trials(), None
        if len(tried) > 1:
            short = self.together.failure(room_for(profile, self.example.device))
            if short is None:
                deadline_s = self._began + self.budget_s
                trials = take_turns(self.model, tried, self.example, self.together, deadline_s, self._say)
        taken = self.together.first(decide(tried, trials, short, self.together.communicators.backend, beyond))
        if "error" in taken:
            raise InputError(taken["error"])
        plan = decode(taken["plan"].encode(), Plan, where="rank 0's plan")
        if self.path and self.together.rank == 0:
            save(plan, self.path)
        return Taken(plan=plan, words=taken["words"], dropped=trials.dropped)

    def _alone(self) -> Taken:
        if self.memory_bytes is not None:
            raise InputError(
                "there is one rank, and memory= plans for several: use DistributedDataParallel(model, memory_budget=…, "
                "profile=…)"
            )
        names = tuple(name for name, one in self.model.named_parameters() if one.requires_grad)
        one = Plan(
            strategy="ddp",
            model=type(self.model).__name__,
            workers=1,
            communicators=1,
            buckets=(Bucket(gradients=names, communicator=0),),
        )
        self._say("stock DDP: there is one rank, and nothing to send", last=True)
        return Taken(plan=with_note(one, {"ranks": 1}), words="", dropped={})

    def _known(self, now: dict[str, Any]) -> Taken | None:
        """The plan in the file, if it still holds."""
        plan, why, error = None, "", None
        if self.together.rank == 0:
            try:
                plan, why = remembered(self.path, now)
            except InputError as raised:
                error = str(raised)
        self.together.raise_if_any(error, "the plan's file")
        if why:
            self._say(f"planning anew: {why}")
        text = self.together.first("" if plan is None else encode(plan).decode())
        if not text:
            return None
        found = decode(text.encode(), Plan, where="rank 0's plan")
        name = Candidate(kind="stock" if is_stock(found) else "buckets", plan=found).name
        return Taken(plan=found, words=f"{name}, as {self.path} has it", dropped={})

    def _profile(self) -> Profile:
        """Rank 0's; what goes wrong on any rank is raised on all."""
        self._say("timing steps of the example")
        profile, error = None, None
        try:
            profile = self._measured()
        except BackbeatError as raised:
            error = str(raised)
        except Exception as raised:
            error = where_raised(raised)
        self.together.raise_if_any(error, "a step of the example did not run")
        text = self.together.first(encode(profile).decode() if profile is not None else "")
        return decode(text.encode(), Profile, where="rank 0's profile")

    def _measured(self) -> Profile:
        try:
            return self._measured_of(copy_of(self.model), keep=False)
        except Exception as error:
            if not isinstance(error, OutOfMemoryError) and not is_out_of_memory(error):
                raise
        free(self.example.device)
        # No room for a copy: the model itself, put back afterwards from the host.
        return self._measured_of(self.model, keep=True)

    def _measured_of(self, model: nn.Module, *, keep: bool) -> Profile:
        return measure(
            model,
            self.example.batch,
            self.example.loss,
            self.example.make_optimizer(model),
            precision=self.example.precision,
            iterations=10,
            warmup=3,
            time_limit_s=self.budget_s * PROFILE_SHARE,
            accept_noise=True,
            keep=keep,
            command="backbeat.runtime.parallelize",
            topk_speed=measure_topk if self.compression else None,
            apply_memory=apply_memory if self.memory_bytes is not None else None,
        ).profile

    def _network(self, profile: Profile) -> Network:
        size = self.together.size
        if self.network is not None:
            return self.network if self.network.workers == size else self.network.at(workers=size)
        self._say("measuring the network")
        links = self.together.communicators
        return calibrate(
            group=links.process_group,
            device=links.device,
            budget_s=self.budget_s * CALIBRATE_SHARE,
            sizes=message_sizes(profile.total_bytes),
            collectives=(
                "all_reduce",
                "all_gather",
                "reduce_scatter",
                *(("broadcast",) if profile.buffer_bytes else ()),
            ),
            communicators=tuple(sorted({1, links.allowed(2)})),
            sharded=True,
            slowdown=links.device.type == "cuda",
            brief=True,
        )

    def _candidates(self, profile: Profile, network: Network, now: dict[str, Any]) -> list[Candidate]:
        """Rank 0's, each saying what it was made for."""
        found: list[Candidate] = []
        error = None
        if self.together.rank == 0:
            try:
                found = predicted_candidates(
                    profile,
                    network,
                    memory_bytes=self.memory_bytes,
                    compression=self.compression,
                    communicators=1 if self.together.communicators.limit == 1 else None,
                )
            except BackbeatError as raised:
                error = str(raised)
        self.together.raise_if_any(error, "planning failed")
        shared = self.together.first(
            [Candidate(kind=one.kind, plan=with_note(one.plan, now)).to_text() for one in found]
        )
        return [Candidate.from_text(one) for one in shared]

    def _say(self, text: str, last: bool = False) -> None:
        """One line on rank 0's stderr, which progress writes over where somebody watches."""
        if self.together.rank != 0:
            return
        over = sys.stderr.isatty()
        lead, end = ("\r\x1b[K", "\n" if last else "") if over else ("", "\n")
        print(f"{lead}parallelize: {text}", end=end, file=sys.stderr, flush=True)


def decide(
    tried: Sequence[Candidate], trials: Trials, short: str | None, backend: str = "", beyond: float = 1.0
) -> dict[str, str]:
    """By what was measured; by prediction where fewer than two were tried, for want of time or, as `short` says, of
    memory.

    `beyond` is how many times as large as any measured message those are that predictions stand on.

    On gloo FSDP2 communicates while nothing computes, which predictions do not know: units are not taken by prediction
    where anything else runs.
    """
    left = [one for one in tried if one.name not in trials.dropped]
    if not left:
        return {"error": "parallelize: nothing ran: " + "; ".join(f"{k}: {v}" for k, v in trials.dropped.items())}
    seconds, tolerance, how = trials.measured, trials.repeatability, "measured"
    untried = [one.name for one in left if one.name not in seconds]
    if untried and len(seconds) > 1:
        left = [one for one in left if one.name in seconds]
    elif untried:
        if backend == "gloo":
            left = [one for one in left if one.kind != "units"] or left
        seconds, tolerance = {one.name: one.predicted_s for one in left}, PREDICTED
        why = "" if len(tried) == 1 else f" ({short or 'no time was left to try all; budget_s= gives more'})"
        how = f"predicted{why}"
    taken = simplest(left, seconds, tolerance)
    words = in_words(taken, seconds, tolerance, how)
    if how == "measured" and untried:
        words += f"; no time was left to try {' and '.join(untried)}; budget_s= gives more"
    if beyond > FARTHEST:
        words += (
            f"; predictions are extrapolated to messages {beyond:.0f} times as large as measured, budget_s= gives more"
        )
    for name, why in trials.dropped.items():
        words += f"; {name} was dropped, {why}"
    return {"plan": encode(taken.plan).decode(), "words": words}
