"""The reducer of a wrapper: everything of ours hangs on `model.reducer`, where torch's DDP has its own.

It builds what runs the steps on every rank together (communicators, first partition, `runner.StepRunner`), and takes it
from one partition to the next. Pickled or copied it is what the user asked for, and is built again by the first forward
that trains.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module

from backbeat.comm.agreement import RankStore
from backbeat.comm.communicators import Communicators
from backbeat.comm.nccl import set_nccl_launch_order
from backbeat.errors import CommunicationError, InputError
from backbeat.model import Plan
from backbeat.runtime.compressed.checkpoint import Residuals
from backbeat.runtime.compressed.compressed_exchange import CompressedExchange
from backbeat.runtime.memory.budget import BudgetCheck
from backbeat.runtime.reduce.bucket import BucketMemory
from backbeat.runtime.reduce.comm_hooks import Hook
from backbeat.runtime.reduce.managed_parameters import ManagedParameters
from backbeat.runtime.reduce.partition import Partition, first_partition, stock_partition, with_newcomers
from backbeat.runtime.reduce.peers import Peers
from backbeat.runtime.reduce.runner import StepRunner
from backbeat.runtime.reduce.settings import WrapperSettings
from backbeat.runtime.reduce.timing import Recorder
from backbeat.runtime.weak_call import WeakCall

if TYPE_CHECKING:
    from backbeat.runtime.reduce.tuner import Tuner

logger = logging.getLogger("backbeat.runtime")

SAMPLED_FIRST = 8
"""Steps at the start that are timed for `report()`."""
SAMPLED_EVERY = 200
"""After these, one step in so many is timed."""


class Reducer:
    """Settings, parameters and communicators of one wrapper, and what runs its steps."""

    def __init__(self, settings: WrapperSettings) -> None:
        self.settings = settings
        self.memory: Any = None
        """The handle of the memory plan in force on the model, if any."""
        self.budget_check: BudgetCheck | None = None
        self.watch: WeakCall | None = None
        """Called after each step, last: `runtime/watch.py`."""
        self._comm_hook: tuple[Any, Hook] | None = None
        self._warns_of_scaling = self.compressed
        self._runner: StepRunner | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = ("settings", "memory", "budget_check", "_comm_hook", "_warns_of_scaling")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, watch=None, _runner=None)

    def bind_model(self, module: Module, ignored: Set[str], process_group: ProcessGroup, device: torch.device) -> None:
        """Reduce this model's gradients over these ranks, once built."""
        self.managed = ManagedParameters(module, ignored)
        self.process_group = process_group
        self.device = device

    def build(self) -> StepRunner:
        """Communicators, agreement on the partition, and the runner. Every rank must come here together."""
        settings, managed = self.settings, self.managed
        set_nccl_launch_order(self.process_group, self.device)
        self.communicators = communicators = Communicators(self.process_group, self.device, 1)
        self.ranks = RankStore(communicators, "DistributedDataParallel")
        if any(managed.sparse) and communicators.backend != "gloo":
            name = managed.names[managed.sparse.index(True)]
            raise InputError(
                f"parameter {name!r} has sparse gradients, which {communicators.backend} cannot sum: "
                "use sparse=False, or the gloo backend"
            )
        self.ready_order_known = settings.plan is not None or settings.find_unused
        """False until stock DDP's first buckets have been formed again in ready order; True from the start with a plan
        or `find_unused_parameters`."""
        partition = first_partition(settings, managed, communicators)
        # Before ranks agree: afterwards each has made its own.
        peers = Peers(communicators)
        self._agree(partition, "the plan")
        communicators.grow(partition.communicators)
        self._runner = runner = StepRunner(managed, communicators, partition, settings, peers)
        runner.after_step = WeakCall(self.after_step)
        runner.unreached = WeakCall(managed.check_known)
        self.recorder = Recorder(self.device)
        self.tuner: Tuner | None = None
        if settings.strategy is not None:
            from backbeat.runtime.reduce.tuner import Tuner

            self.tuner = Tuner(self, settings.strategy)
        # The first steps are timed: for the ready order, for the tuner, for the report.
        self.time_steps(True)
        if self._comm_hook is not None:
            runner.set_comm_hook(*self._comm_hook)
        return runner

    @property
    def built(self) -> bool:
        return self._runner is not None

    @property
    def runner(self) -> StepRunner:
        """What runs the steps; built if it is not, on every rank together."""
        return self._runner if self._runner is not None else self.build()

    @property
    def running_plan(self) -> Plan | None:
        """The plan whose buckets run now, if they are a plan's."""
        return self.tuner.running.plan if self.tuner is not None else self.settings.plan

    @property
    def compressed(self) -> bool:
        """Some buckets of the plan travel compressed."""
        return self.settings.plan is not None and self.settings.plan.compressed

    @property
    def buckets(self) -> Sequence[BucketMemory]:
        return self.runner.context.bucket_set.buckets

    @property
    def partition(self) -> Partition:
        return self.runner.context.bucket_set.partition

    @property
    def steps(self) -> int:
        """Backwards synchronised so far, the present one included."""
        return self.runner.step.number

    def forward_begins(self, sync: bool) -> None:
        """Called at the start of every forward that trains."""
        runner = self.runner
        if self._warns_of_scaling:
            self._warn_of_scaling()
        runner.forward_begins(sync)
        if self.managed.frozen:
            self._add_unfrozen()
        if sync and runner.context.recorder is not None:
            runner.context.recorder.forward_begins()

    def _warn_of_scaling(self) -> None:
        """Once: forward in fp16 mostly means that a `GradScaler` follows."""
        kind = self.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            self._warns_of_scaling = False
            logger.warning(
                "forward runs in fp16 autocast, and some buckets of the plan are compressed: use no GradScaler, since "
                "what a rank has not sent yet outlives the step and its scale; train in bf16, which needs none"
            )

    def after_step(self) -> None:
        """At the end of each synchronised backward, on every rank alike: change the buckets, sample the times."""
        runner = self.runner
        timed = runner.context.recorder is not None
        if timed or not runner.status.regular:
            self.managed.check_known(thoroughly=timed)
        if not self.ready_order_known:
            self._form_in_ready_order()
        if self.tuner is not None and not self.tuner.settled:
            self.tuner.after_step()
        else:
            following = runner.step.number + 1
            self.time_steps(following <= SAMPLED_FIRST or following % SAMPLED_EVERY == 0)
        if self.budget_check is not None:
            self.budget_check.after_step()
        if self.watch is not None:
            self.watch()

    def time_steps(self, timed: bool) -> None:
        """Time the steps from the next one on, or stop it."""
        if timed and self.steps:
            self.recorder.mark_step_end()
        self.runner.context.recorder = self.recorder if timed else None

    def switch(self, partition: Partition) -> None:
        """Run another partition from the next step on; every rank calls it at the same step with the same partition."""
        if partition.buckets == self.partition.buckets:
            return
        if partition.compressed and not isinstance(self.runner.exchange, CompressedExchange):
            raise InputError(
                "the new buckets are compressed, and training began without compressed buckets: wrap the model with "
                "that plan"
            )
        self._agree(partition, "the plan")
        self.communicators.grow(partition.communicators)
        with torch.no_grad():
            self.runner.install(partition)
        # Times of a bucket are by its number, which another bucket has now.
        self.recorder.clear()

    def _form_in_ready_order(self) -> None:
        """As stock DDP does once: buckets again, in the order in which rank 0's gradients became ready."""
        self.ready_order_known = True
        steps = self.recorder.steps()
        arrived = sorted(steps[-1].ready_s, key=lambda index: steps[-1].ready_s[index]) if steps else []
        order = self.ranks.from_rank_0(arrived)
        missing = sorted(set(range(len(self.managed.names))) - set(order), reverse=True)
        self.switch(stock_partition([*order, *missing], self.settings, self.managed, self.communicators))

    def _add_unfrozen(self) -> None:
        """Parameters that became trainable since: into trailing buckets, on every rank at this forward."""
        managed, runner = self.managed, self.runner
        if not any(parameter.requires_grad for _, parameter in managed.frozen):
            return
        # Where the step before has failed, this raises while nothing has changed yet, and the next forward tries again.
        runner.read_step_before()
        count = managed.add_unfrozen()
        first = len(managed.names) - count
        partition = with_newcomers(self.partition, range(first, len(managed.names)), managed)
        self.ranks.wait_for_all(
            f"{managed.names[first]!r} became trainable",
            "do so on every rank, before the same forward. Restart from the last checkpoint",
        )
        self._agree(partition, "the set of trainable parameters")
        with torch.no_grad():
            runner.add_parameters(managed.names[first:], managed.parameters[first:], partition)
        self.recorder.clear()
        if self.tuner is not None:
            self.tuner.restart(f"{count} parameters became trainable")

    def _agree(self, partition: Partition, what: str) -> None:
        settings = self.settings
        lines = [*partition.lines(self.managed), f"reduce_dtype={settings.reduce_dtype}, strict={settings.strict}"]
        if partition.compressed:
            # Options decide how much travels and from where: ranks that differ in them send messages nobody expects.
            lines.append(f"compression {settings.compression}")
        self.ranks.agree(lines, what)

    @property
    def residuals(self) -> Residuals:
        """What this rank has not sent yet of compressed buckets."""
        if not self.compressed:
            raise InputError("there are no residuals: no bucket of the plan is compressed")
        return self.compressed_exchange.residuals

    @property
    def compressed_exchange(self) -> CompressedExchange:
        """What sends the buckets of a plan that compresses some."""
        exchange = self.runner.exchange
        assert isinstance(exchange, CompressedExchange)  # who calls this has looked at `compressed`
        return exchange

    def set_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let a hook reduce the buckets from now on."""
        if self.compressed:
            raise InputError(
                "a communication hook reduces whole buckets, and this plan compresses some: leave the hook out, or run "
                "a plan without compression"
            )
        if self._runner is not None:
            self._runner.set_comm_hook(state, hook)
        self._comm_hook = (state, hook)

    def remove_hooks(self) -> None:
        if self._runner is not None:
            self._runner.remove_hooks()

    # Frameworks call these on the reducer they find; the first two have nothing to do here.
    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        pass

    def _rebuild_buckets(self) -> bool:
        return False

    def _check_reducer_finalized(self) -> None:
        step = self.runner.step
        if not step.idle:
            raise CommunicationError(
                f"the backward of step {step.number} has not ended: {step.arrivals.next_bucket} buckets are sent"
            )
