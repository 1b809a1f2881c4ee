"""The search of `parallelize(plan="auto")`: what it measures, predicts and tries, and the plan it takes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch.distributed as dist
from torch import nn

from backbeat.comm.agreement import RankStore
from backbeat.comm.communicators import Communicators
from backbeat.comm.nccl import set_nccl_launch_order
from backbeat.cost.stragglers import between_ranks
from backbeat.errors import InputError
from backbeat.measure.model.inputs import MeasureOptions, samples_in
from backbeat.measure.model.profiler import measure
from backbeat.measure.model.training_step import OutOfMemoryError, is_out_of_memory, release
from backbeat.measure.network.calibration import calibrate, with_sharded_host
from backbeat.measure.network.case import message_sizes
from backbeat.model import Bucket, Network, Plan, Profile
from backbeat.model.files import decode, encode
from backbeat.model.plan import MadeFor
from backbeat.runtime.compressed.topk_speed import measure_topk
from backbeat.runtime.memory.activations import apply as apply_memory
from backbeat.runtime.parallel import candidates, choice, plan_file, probe
from backbeat.runtime.parallel.apply_plan import is_stock
from backbeat.runtime.parallel.candidates import Candidate
from backbeat.runtime.parallel.heartbeat import heartbeat_of
from backbeat.runtime.parallel.plan_file import digest
from backbeat.runtime.parallel.preserve import copy_of, preserved_state, room_for, without_original
from backbeat.runtime.parallel.request import ParallelRequest
from backbeat.runtime.parallel.step_slowdown import measure_step_slowdown
from backbeat.runtime.parallel.trials import LEAST_STEPS, Trials, affordable, take_turns, try_plan

CALIBRATE_SHARE, SLOWDOWN_SHARE, HOST_SHARE, PROFILE_SHARE = 0.12, 0.06, 0.012, 0.2
"""Of the budget; trials have the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOutcome:
    """The outcome of a search, the same on every rank."""

    plan: Plan
    words: str
    """The line that rank 0 prints."""


class ParallelSearch:
    """One search for the fastest way to train a model. Every rank makes the same calls."""

    def __init__(self, model: nn.Module, path: str, request: ParallelRequest) -> None:
        world: Any = dist.group.WORLD
        self.model, self.path, self.request, self.example = model, path, request, request.example
        # Before the first of them exists: a plan on two communicators may be taken.
        set_nccl_launch_order(world, self.example.device)
        communicators = Communicators(world, self.example.device, 1)
        self.ranks = RankStore(communicators, "parallelize")
        self._began = time.monotonic()
        self._left_out = ""
        """What was not measured, for the line that rank 0 prints."""

    def run(self) -> SearchOutcome:
        if self.ranks.size == 1:
            taken = self._alone()
        else:
            with heartbeat_of(self.ranks):
                taken = self._run()
                self.ranks.agree([encode(taken.plan).decode()], "the plan taken")
            self.ranks.communicators.close()
        if self.ranks.rank == 0:
            self._say(taken.words, last=True)
            if taken.plan.compressed:
                self._say("call model.attach(optimizer, max_grad_norm=…): some buckets are compressed", last=True)
        return taken

    def _run(self) -> SearchOutcome:
        now = self.request.conditions(self.model, self.ranks, kept=bool(self.path))
        if self.path and (known := self._known(now)) is not None:
            return known
        with self._preserved_state():
            return self._measured_outcome(now)

    def _measured_outcome(self, now: MadeFor) -> SearchOutcome:
        profile, unused, alike = self._profile()
        network = self._network(profile)
        if not alike:
            self._left_out += (
                "; units were left out: ranks use different parameters, and FSDP2 must gather the same units on all"
            )
        found = self._candidates(profile, network, msgspec.structs.replace(now, unused=unused), units=alike)
        # A prediction that rests on small messages alone excludes nothing.
        extrapolated = self.ranks.from_rank_0(choice.extrapolation(network, profile))
        tried = choice.worth_trying(found) if extrapolated <= choice.MOST_EXTRAPOLATION else found
        trials, no_memory = Trials(), self.ranks.failure(room_for(profile, self.example.device))
        if no_memory is None:
            tried, trials = self._try(tried, found)
        excluded = [one for one in found if one not in tried]
        taken, words = choice.decide(tried, trials, no_memory, extrapolated, excluded)
        plan = self.ranks.document_from_rank_0(taken.plan, Plan)
        if self.path and self.ranks.rank == 0:
            plan_file.save(plan, self.path)
        return SearchOutcome(plan=plan, words=words + self._left_out)

    def _try(self, tried: list[Candidate], every: list[Candidate]) -> tuple[list[Candidate], Trials]:
        """The candidates tried, and their trials. A single candidate needs no comparison, but must run; if it does not,
        all are tried."""
        deadline_s, dropped = self._began + self.request.budget_s, {}
        if len(tried) == 1:
            if not self.ranks.from_rank_0(affordable(tried, deadline_s - time.monotonic()))[0]:
                return tried, Trials()
            (one,) = tried
            found = try_plan(self.model, one.plan, self.example, self.ranks, LEAST_STEPS, one.predicted_s)
            if not isinstance(found, str):
                return tried, Trials(turns_s={one.name: [found]})
            tried, dropped = every, {one.name: found}
        left = [one for one in tried if one.name not in dropped]
        trials = take_turns(self.model, left, self.example, self.ranks, deadline_s, self._say)
        trials.dropped = {**dropped, **trials.dropped}
        return tried, trials

    def _alone(self) -> SearchOutcome:
        if self.request.memory_bytes is not None:
            raise InputError(
                "there is one rank, and memory= plans for several: use DistributedDataParallel(model, memory_budget=…, "
                "profile=…)"
            )
        with self._preserved_state():
            _, unused, _ = self._profile()
        names = tuple(name for name, one in self.model.named_parameters() if one.requires_grad)
        one = Plan(
            strategy="ddp",
            model=type(self.model).__name__,
            workers=1,
            communicators=1,
            buckets=(Bucket(gradients=names, communicator=0),),
            made_for=MadeFor(ranks=1, unused=unused),
        )
        return SearchOutcome(plan=one, words="stock DDP: there is one rank, and nothing to send")

    @contextlib.contextmanager
    def _preserved_state(self) -> Iterator[None]:
        example = self.example
        with preserved_state(self.model, example.loss, example.batch, example.device) as loss:
            self.example = replace(example, loss=loss)
            yield

    def _known(self, now: MadeFor) -> SearchOutcome | None:
        """The plan in the file, if it still holds."""

        def read() -> tuple[Plan | None, str]:
            return plan_file.kept_plan(self.path, now) if self.ranks.rank == 0 else (None, "")

        found, why = self.ranks.raise_on_all(read, "the plan's file")
        if why:
            self._say(f"planning anew: {why}")
        found = self.ranks.document_from_rank_0(found, Plan)
        if found is None:
            return None
        name = Candidate(kind="stock" if is_stock(found) else "buckets", plan=found).name
        return SearchOutcome(plan=found, words=f"{name}, as {self.path} has it")

    def _profile(self) -> tuple[Profile, bool, bool]:
        """Rank 0's profile with the spread of all ranks; whether some rank's step leaves parameters without gradients;
        and whether the same have gradients on all. Errors are raised on all ranks."""
        self._say("timing steps of the example")
        profile = self.ranks.raise_on_all(self._measured, "a step of the example did not run")
        came = {gradient.name for gradient in profile.gradients}
        trained = {name for name, one in self.model.named_parameters() if one.requires_grad}
        unused = any(self.ranks.gather(bool(trained - came)))
        alike = len(set(self.ranks.gather(digest(sorted(came))))) == 1
        times = self.ranks.gather(profile.iteration_s)
        # A rank of which an iteration took longer at first may have timed fewer.
        if len({len(one) for one in times}) == 1:
            profile = msgspec.structs.replace(profile, iteration_s=between_ranks(times))
        return self.ranks.document_from_rank_0(profile, Profile), unused, alike

    def _measured(self) -> Profile:
        try:
            return without_original(self._measured_of(copy_of(self.model), keep=False), self.model)
        except Exception as error:
            if not isinstance(error, OutOfMemoryError) and not is_out_of_memory(error):
                raise
        release(self.example.device)
        # No room for a copy: the model itself, put back afterwards from the host.
        return self._measured_of(self.model, keep=True)

    def _measured_of(self, model: nn.Module, *, keep: bool) -> Profile:
        options = MeasureOptions(
            optimizer=self.example.make_optimizer(model),
            precision=self.example.precision,
            # Of a batch that is no tensor nobody need know how many samples it has.
            batch_size=samples_in(self.example.batch) or 1,
            iterations=10,
            warmup=3,
            time_limit_s=self.request.budget_s * PROFILE_SHARE,
            accept_noise=True,
            keep=keep,
            command="backbeat.runtime.parallelize",
            topk_speed=measure_topk if self.request.compression else None,
            apply_memory=apply_memory if self.request.memory_bytes is not None else None,
            ranks=self.ranks,
            brief=True,
        )
        return measure(model, self.example.batch, self.example.loss, options).profile

    def _network(self, profile: Profile) -> Network:
        """The network given, or as measured; with what the model's steps and the host add, unless it says so."""
        network = self._calibrated(profile) if self.request.network is None else self._given(self.request.network)
        if network.slowdown is not None:
            return network
        # The job's own link may be another than the one given.
        seconds_of = network.all_reduce.curve.at if self.request.network is None else self._link()
        self._say("timing steps beside communication")
        step_s, limit_s = max(profile.forward_s + profile.backward_s, 1e-4), self.request.budget_s * SLOWDOWN_SHARE
        slowdown = measure_step_slowdown(self.model, self.example, self.ranks, seconds_of, step_s, limit_s)
        if isinstance(slowdown, str):
            self._left_out += f"; steps were not timed beside communication: {slowdown}"
            return network
        return msgspec.structs.replace(network, slowdown=slowdown)

    def _link(self) -> Callable[[int], float]:
        """What messages take on the job's link, about."""
        size = probe.probe_bytes(self.ranks, self.model)
        s_per_byte = probe.message_s(self.ranks, size, 0.0) / size
        return lambda sent: sent * s_per_byte

    def _given(self, network: Network) -> Network:
        """For as many ranks; on GPUs with what FSDP2 costs the host."""
        network = network if network.workers == self.ranks.size else network.at(workers=self.ranks.size)
        known = network.sharded is not None and network.sharded.host is not None
        if known or self.example.device.type != "cuda":
            return network
        self._say("timing what FSDP2 costs the host")

        def largest(values: Sequence[float]) -> list[float]:
            return [max(column) for column in zip(*self.ranks.gather(list(values)), strict=True)]

        return with_sharded_host(network, self.ranks.communicators, largest, self.request.budget_s * HOST_SHARE)

    def _calibrated(self, profile: Profile) -> Network:
        self._say("measuring the network")
        opened = self.ranks.communicators
        broadcast = ("broadcast",) if profile.buffer_bytes else ()
        return calibrate(
            group=opened.process_group,
            device=opened.device,
            budget_s=self.request.budget_s * CALIBRATE_SHARE,
            sizes=message_sizes(profile.total_bytes),
            collectives=("all_reduce", "all_gather", "reduce_scatter", *broadcast),
            communicators=tuple(sorted({1, opened.allowed(2)})),
            sharded=True,
            brief=True,
        )

    def _candidates(self, profile: Profile, network: Network, now: MadeFor, *, units: bool = True) -> list[Candidate]:
        """Rank 0's candidates, each with what it was made for."""

        def planned() -> list[tuple[str, str]]:
            found = candidates.predicted_candidates(
                profile,
                network,
                memory_bytes=self.request.memory_bytes,
                compression=self.request.compression,
                communicators=1 if self.ranks.communicators.limit == 1 else None,
                units=units,
            )
            return [(one.kind, encode(msgspec.structs.replace(one.plan, made_for=now)).decode()) for one in found]

        return [
            Candidate(kind=kind, plan=decode(plan.encode(), Plan, where="rank 0's plan"))
            for kind, plan in self.ranks.call_on_rank_0(planned, "planning failed")
        ]

    def _say(self, text: str, last: bool = False) -> None:
        """One line on rank 0's stderr. On a terminal the next line writes over it, unless it is the `last`."""
        if self.ranks.rank != 0:
            return
        over = sys.stderr.isatty()
        lead, end = ("\r\x1b[K", "\n" if last else "") if over else ("", "\n")
        print(f"{lead}parallelize: {text}", end=end, file=sys.stderr, flush=True)
