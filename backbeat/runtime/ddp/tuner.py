"""`plan="auto"`: measure under DDP's buckets, plan, switch, measure the plan, and go back to DDP's buckets if it is
slower.

It times the job's own steps and changes buckets alone. `runtime/parallel/search.py` decides before training between
all kinds of plans, on copies of the model and an example.

Everything happens at the end of a step, in the same step on every rank. Decisions come from figures summed over ranks,
or from rank 0. Ranks compare a new partition before it runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgspec

from backbeat.comm.communicators import Communicators
from backbeat.errors import AgreedError, BackbeatError, where_raised
from backbeat.measure.network.calibration import calibrate
from backbeat.measure.network.case import message_sizes
from backbeat.model import Bucket, Gradient, Network, Plan, Profile
from backbeat.planners import unit_strategies
from backbeat.planners.planned import planned as make_plan
from backbeat.runtime.ddp.reducer import Reducer
from backbeat.runtime.reduce.partition import Partition, plan_partition
from backbeat.runtime.reduce.timing import TimedStep, median
from backbeat.steps.predict import predict

logger = logging.getLogger("backbeat.runtime")

SETTLE_STEPS = 3
"""Steps after a change of buckets that are not measured."""
MEASURED_STEPS = 10
TOLERANCE = 0.01
"""A plan may measure this much slower than DDP's buckets did before it, and no more."""
WORTH_TELLING = 0.03
"""Units are mentioned where they are predicted to save more than this share of an iteration."""
TELL_STEPS = 0.5
"""No further kind of units is predicted once that took as long as this share of an iteration."""
CALIBRATE_STEPS = 2.0
"""Training stands still for as long as this many iterations while the network is measured: 0.4 % of the first 500."""
CALIBRATE_S = (0.2, 2.0)
"""The least and the most seconds of that."""
CONNECT_S = 1.5
"""What NCCL takes to open communicators for measuring several at once; gloo's take next to nothing."""
FIRST_STEPS = 500
"""Measuring the network may cost at most TOLERANCE of this many steps. If it costs more, it waits until it is no more
than TOLERANCE of the steps done."""


class TunerState(Enum):
    """What the tuner does until its next decision. The values are what `report()` prints."""

    MEASURING = "measuring"
    """The buckets that run are timed, to plan from: DDP's, or once parameters became trainable those of then."""
    WAITING = "waiting"
    """The same buckets run on until measuring the network costs little enough."""
    TRYING = "trying"
    """The plan is timed."""
    SETTLED = "settled"
    """Nothing more is decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBuckets:
    """One partition: the plan that it runs, with its prediction, and what steps took under it. What is not known yet is
    None."""

    partition: Partition
    plan: Plan | None = None
    iteration_s: float | None = None
    exposed_s: float | None = None
    timed: tuple[TimedStep, ...] = ()
    """The steps measured last."""


class Tuner:
    """Takes one wrapper from DDP's buckets to a plan, and back where that is slower."""

    def __init__(self, reducer: Reducer, strategy: str) -> None:
        # The reducer holds the tuner; held back strongly, neither would go when the last user lets go.
        self._reducer: Any = weakref.proxy(reducer)
        network = reducer.settings.network
        self._auto = strategy == "auto"
        self._strategy = "best" if self._auto else strategy
        self._network = Network.load(network) if isinstance(network, (str, os.PathLike)) else network
        """As given; measured where it was not."""
        self._communicators = reducer.settings.buckets.communicators
        self._has_planned = False
        self.state = TunerState.MEASURING
        self.history: list[str] = []
        self.running = MeasuredBuckets(partition=reducer.partition)
        """What is known of the buckets that run now."""
        self._base = self.running
        """What ran before the plan."""
        # By the number of the step, which ranks have in common, not by calls: a step may break off on some of them.
        self._due = SETTLE_STEPS + MEASURED_STEPS

    @property
    def settled(self) -> bool:
        return self.state is TunerState.SETTLED

    def restart(self, why: str) -> None:
        """Measure again: the graph or the world changed."""
        self._note(MeasuredBuckets(partition=self._reducer.partition))
        self._say(f"measuring again: {why}")
        self._begin(TunerState.MEASURING)

    def after_step(self) -> None:
        reducer = self._reducer
        measuring = self._measuring()
        reducer.time_steps(measuring)
        left = self._steps_left()
        if left >= MEASURED_STEPS or not measuring:
            reducer.recorder.clear()
        # A decision is taken by every rank or by none.
        reducer.runner.status.read_next_at_once(left == 1)
        if left > 0:
            return
        # Ranks that have run out of data take part (`join`), and time nothing: their means would say nothing.
        if not self.settled and self._means([float(not reducer.recorder.steps())])[0] > 0:
            self._put_off()
            return
        if self.state is TunerState.TRYING:
            self._after_trial()
        elif not self.settled:
            self._plan_and_switch()

    def _put_off(self) -> None:
        """Decide later, by steps that every rank has timed."""
        why = "waiting for steps in which every rank has data"
        if not self.history or self.history[-1] != why:
            self._say(why)
        self._begin(self.state)

    def _steps_left(self) -> int:
        """Steps to go until the next decision."""
        return self._due - int(self._reducer.steps)

    def _measuring(self) -> bool:
        """Whether the next step is timed; of those that only wait, the ones before a decision are."""
        if self.settled:
            return False
        return self.state is not TunerState.WAITING or self._steps_left() <= MEASURED_STEPS

    def _begin(self, state: TunerState, steps: int = SETTLE_STEPS + MEASURED_STEPS) -> None:
        self.state = state
        self._due = self._reducer.steps + steps
        self._reducer.recorder.clear()

    def _plan_and_switch(self) -> None:
        reducer = self._reducer
        found = self._measured(None)
        if reducer.communicators.size == 1:
            self._settle("one worker: there is nothing to send", found)
            return
        iteration = found.iteration_s or 0.0
        measures = self._auto and self._network is None
        if measures and self.state is TunerState.MEASURING and (more := self._too_early(iteration)) > 0:
            self._note(found)
            self._say(
                f"planning in {more} steps: measuring the network takes {self._pause_s(iteration):.1f} s, which is "
                f"{TOLERANCE:.0%} of training by then"
            )
            self._begin(TunerState.WAITING, more)
            return
        profile = self._profile(found)
        network = self._measure_network(profile, iteration)
        if self._auto and not self._has_planned:
            self._tell_of_units(profile, network, iteration)
        made, error = self._make(profile, network)
        error = reducer.ranks.from_rank_0(error)
        self._has_planned = True
        if error:
            if not self._auto:
                raise AgreedError(f"planning with {self._strategy!r} failed: {error}")
            self._settle(f"staying with DDP's buckets, planning failed: {error}", found)
            return
        plan: Plan = reducer.ranks.document_from_rank_0(made, Plan)
        self._base = replace(found, plan=self._present_plan(profile, network))
        partition = plan_partition(plan, reducer.managed)
        if partition.buckets == reducer.partition.buckets:
            self._settle(f"{plan.strategy} chose the buckets that already run", self._base)
            return
        self._say(
            f"step {reducer.steps}: {self._base_words} ({len(reducer.buckets)}) took {iteration * 1e3:.2f} ms an "
            f"iteration; switching to {plan.strategy}'s {len(partition.buckets)} on {partition.communicators} "
            "communicator(s)"
        )
        self._switch(MeasuredBuckets(partition=partition, plan=plan))
        self._begin(TunerState.TRYING)

    def _too_early(self, iteration_s: float) -> int:
        """In how many steps the network may be measured."""
        steps = math.ceil(self._pause_s(iteration_s) / (TOLERANCE * max(iteration_s, 1e-6)))
        return 0 if steps <= FIRST_STEPS else max(steps - int(self._reducer.steps), 0)

    def _pause_s(self, iteration_s: float) -> float:
        """How long training stands still while the network is measured."""
        connecting = self._reducer.communicators.backend == "nccl" and self._most_communicators > 1
        return self._calibrate_s(iteration_s) + (CONNECT_S if connecting else 0.0)

    @property
    def _most_communicators(self) -> int:
        """That a plan may use: as asked for, otherwise up to two; `auto` has one where opening a second takes long."""
        communicators: Communicators = self._reducer.communicators
        unasked = 1 if self._auto and communicators.backend == "nccl" else 2
        return communicators.allowed(self._communicators or unasked)

    @staticmethod
    def _calibrate_s(iteration_s: float) -> float:
        return min(max(CALIBRATE_STEPS * iteration_s, CALIBRATE_S[0]), CALIBRATE_S[1])

    def _switch(self, to: MeasuredBuckets) -> None:
        self._reducer.switch(to.partition)
        self._note(to)

    def _note(self, running: MeasuredBuckets) -> None:
        """These are the buckets that run."""
        self.running = running
        self._reducer.note_plan(running.plan)

    @property
    def _base_words(self) -> str:
        """What ran before: DDP's buckets, or an earlier plan's."""
        strategy = self._base.partition.strategy
        return "DDP's buckets" if strategy == "ddp" else f"{strategy}'s buckets"

    def _after_trial(self) -> None:
        """Go back where the plan measured worse; a strategy asked for by name stays."""
        found = self._measured(self.running.plan)
        iteration, before = found.iteration_s or 0.0, self._base.iteration_s or 0.0
        both = f"{iteration * 1e3:.2f} ms an iteration, {self._base_words} took {before * 1e3:.2f} ms"
        if self._auto and iteration > before * (1 + TOLERANCE):
            self._switch(self._base)
            self._settle(f"going back to {self._base_words}: the plan measured {both}", self._base)
        else:
            self._settle(f"the plan runs: {both}", found)

    def _settle(self, why: str, on: MeasuredBuckets) -> None:
        self._note(on)
        self._say(why)
        self._begin(TunerState.SETTLED)
        self._reducer.time_steps(False)

    def _measured(self, plan: Plan | None) -> MeasuredBuckets:
        """The buckets that run, of this plan, by the steps just timed.

        An iteration is the median time from the end of one step to the end of the next, the mean over ranks.
        """
        timed = tuple(self._reducer.recorder.steps())
        return MeasuredBuckets(
            partition=self._reducer.partition,
            plan=plan,
            iteration_s=self._means([median(one.iteration_s for one in timed) or 0.0])[0],
            exposed_s=self._means([median(one.exposed_s for one in timed) or 0.0])[0],
            timed=timed,
        )

    def _means(self, values: Sequence[float]) -> list[float]:
        """Of each figure, over ranks."""
        communicators: Communicators = self._reducer.communicators
        return [value / communicators.size for value in communicators.sums(values)]

    def _profile(self, found: MeasuredBuckets) -> Profile:
        """What this model does, as the mean over ranks of the medians over steps."""
        reducer, timed = self._reducer, found.timed
        count = len(reducer.managed.names)
        last = statistics.median([one.computed_s for one in timed])
        ready = [statistics.median([one.ready_s.get(index, one.computed_s) for one in timed]) for index in range(count)]
        ended = statistics.median([one.ended_s for one in timed])
        forward = max((median(one.since_forward_s for one in timed) or ended) - ended, 0.0)
        *ready, last, forward = self._means([*ready, last, forward])
        iteration, exposed = found.iteration_s or 0.0, found.exposed_s or 0.0
        names, parameters = reducer.managed.names, reducer.managed.parameters
        reduce_dtype = reducer.settings.reduce_dtype
        widest = reduce_dtype.itemsize if reduce_dtype else 16
        return Profile(
            name="measured",
            model=reducer.managed.model_name,
            batch_size=1,
            precision=str(parameters[0].dtype).removeprefix("torch."),
            device=str(reducer.device),
            forward_s=forward,
            backward_s=max(last, max(ready)),
            update_s=max(iteration - forward - last - exposed, 0.0),
            gradients=tuple(
                Gradient(name=name, bytes=one.numel() * min(one.element_size(), widest), ready_s=at)
                for at, name, one in sorted(zip(ready, names, parameters, strict=True), key=lambda row: row[0])
            ),
        )

    def _measure_network(self, profile: Profile, iteration: float) -> Network:
        communicators = self._reducer.communicators
        if self._network is not None:
            fits = self._network.workers == communicators.size
            return self._network if fits else self._network.at(workers=communicators.size)
        return calibrate(
            group=communicators.process_group,
            device=communicators.device,
            budget_s=self._calibrate_s(iteration),
            sizes=message_sizes(profile.total_bytes),
            communicators=tuple(sorted({1, self._most_communicators})),
            collectives=("all_reduce",),
            brief=True,
        )

    def _make(self, profile: Profile, network: Network) -> tuple[Plan | None, str]:
        """On rank 0 a plan, or what went wrong."""
        if self._reducer.communicators.rank != 0:
            return None, ""
        try:
            most = self._most_communicators
            free = most > 1 and not self._communicators
            return make_plan(profile, network, self._strategy, communicators=None if free else most), ""
        except Exception as error:
            # Whatever it is, the others must not wait for a plan.
            return None, str(error) if isinstance(error, BackbeatError) else where_raised(error)

    def _tell_of_units(self, profile: Profile, network: Network, iteration: float) -> None:
        """What sharding may gain, which no change of buckets does; silent where it is not known or not much, and on
        gloo, where FSDP2 waits for every collective.

        The update is left out: what is measured as such here may be a data loader's, which no sharding shortens.
        Strategies that take long to plan are left out where steps are short: training waits meanwhile.
        """
        communicators = self._reducer.communicators
        if communicators.rank != 0 or communicators.backend == "gloo":
            return
        bare = msgspec.structs.replace(profile, update_s=0.0)
        began = time.monotonic()
        found: dict[str, float] = {}
        for strategy in ("ddp", *unit_strategies(network)):
            if len(found) > 1 and time.monotonic() - began > TELL_STEPS * iteration:
                break
            with contextlib.suppress(BackbeatError):
                predicted = make_plan(bare, network, strategy).predicted
                found[strategy] = (predicted.iteration_s if predicted is not None else None) or math.inf
        now_s = found.pop("ddp", 0.0)
        gain_s = now_s - min(found.values(), default=now_s)
        if gain_s > WORTH_TELLING * iteration:
            text = (
                f"sharded units are predicted to save {gain_s * 1e3:.2f} of {iteration * 1e3:.2f} ms an iteration: "
                "parallelize(model, plan='auto', example=(batch, loss)) tries them"
            )
            self.history.append(text)
            logger.warning(text)

    def _present_plan(self, profile: Profile, network: Network) -> Plan:
        """The buckets that run now as a plan, with their prediction."""
        names, partition = self._reducer.managed.names, self._reducer.partition
        plan = Plan(
            strategy=partition.strategy,
            model=profile.model,
            workers=network.workers,
            communicators=partition.communicators,
            buckets=tuple(
                Bucket(gradients=tuple(names[index] for index in bucket.members), communicator=bucket.communicator)
                for bucket in partition.buckets
            ),
        )
        return msgspec.structs.replace(plan, predicted=predict(profile, network, plan).kept(network.name))

    def _say(self, text: str) -> None:
        self.history.append(text)
        if self._reducer.communicators.rank == 0:
            logger.info(text)
