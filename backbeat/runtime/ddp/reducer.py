"""The reducer of a wrapper: everything of ours hangs on `model.reducer`, where torch's DDP has its own.

It builds what runs the steps on every rank together (communicators, first partition, `runner.StepRunner`), and takes it
from one partition to the next. Pickled or copied it is what the user asked for, and is built again by the first forward
that trains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module

from backbeat.comm.agreement import RankStore
from backbeat.comm.communicators import Communicators
from backbeat.comm.nccl import set_nccl_launch_order
from backbeat.errors import CommunicationError, InputError, first_line
from backbeat.model import Plan
from backbeat.runtime.compressed.compressed_exchange import CompressedExchange
from backbeat.runtime.compressed.owed import Residuals
from backbeat.runtime.ddp.comm_hooks import Hook, HookExchange
from backbeat.runtime.ddp.settings import WrapperSettings
from backbeat.runtime.ddp.together import together
from backbeat.runtime.memory.budget import BudgetCheck
from backbeat.runtime.reduce.bucket import BucketMemory
from backbeat.runtime.reduce.context import ReducerContext
from backbeat.runtime.reduce.exchange import Exchange
from backbeat.runtime.reduce.managed_parameters import ManagedParameters
from backbeat.runtime.reduce.partition import Partition, with_newcomers
from backbeat.runtime.reduce.peers import Peers
from backbeat.runtime.reduce.runner import StepRunner
from backbeat.runtime.reduce.timing import Recorder
from backbeat.runtime.running_plans import plan_of, runs
from backbeat.runtime.weak_call import WeakCall

if TYPE_CHECKING:
    from backbeat.runtime.ddp.tuner import Tuner

logger = logging.getLogger("backbeat.runtime")

SAMPLED = (8, 200)
"""So many steps at the start are timed for `report()` and the logging data, and then one in so many."""


class Reducer:
    """Settings, parameters and communicators of one wrapper, and what runs its steps."""

    def __init__(self, settings: WrapperSettings) -> None:
        self.settings = settings
        self.sampled = SAMPLED
        self.memory: Any = None
        """The handle of the memory plan in force on the model, if any."""
        self.budget_check: BudgetCheck | None = None
        self.watch: WeakCall | None = None
        """Called after each step, last: `runtime/watch.py`."""
        self._comm_hook: tuple[Any, Hook] | None = None
        self._awaited: list[torch.futures.Future[Any]] = []
        """What a backward waits for beside its buckets."""
        self._warns_of_scaling = self.compressed
        self._runner: StepRunner | None = None
        self.lost: CommunicationError | None = None
        """This rank has given up, and raises this from now on."""

    def __getstate__(self) -> dict[str, Any]:
        kept = ("settings", "sampled", "memory", "budget_check", "_comm_hook", "_warns_of_scaling")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, watch=None, _runner=None, _awaited=[], lost=None)

    def bind_model(self, module: Module, ignored: Set[str], process_group: ProcessGroup, device: torch.device) -> None:
        """Reduce this model's gradients over these ranks, once built."""
        self.managed = ManagedParameters(module, ignored)
        self.process_group = process_group
        self.device = device

    @together
    def build(self) -> StepRunner:
        """Communicators, agreement on the partition, and the runner. Every rank must come here together."""
        settings, managed = self.settings, self.managed
        self._runner = None
        set_nccl_launch_order(self.process_group, self.device)
        self.communicators = communicators = Communicators(self.process_group, self.device, 1)
        self.ranks = RankStore(communicators, "DistributedDataParallel")
        if any(managed.sparse) and communicators.backend != "gloo":
            name = managed.names[managed.sparse.index(True)]
            raise InputError(
                f"parameter {name!r} has sparse gradients, which {communicators.backend} cannot sum: "
                "use sparse=False, or the gloo backend"
            )
        choices = settings.buckets
        self.ready_order_known = choices.plan is not None or choices.find_unused
        """False until stock DDP's first buckets have been formed again in ready order; True from the start with a plan
        or `find_unused_parameters`."""
        self.first_partition = partition = choices.first(managed, communicators)
        # Before ranks agree: afterwards each has made its own.
        peers = Peers(communicators)
        self._agree(partition, "the plan")
        communicators.grow(partition.communicators)
        self._runner = runner = StepRunner(
            managed,
            communicators,
            partition,
            make_exchange=self._make_exchange,
            reduce_dtype=settings.reduce_dtype,
            strict=settings.strict,
            skip_unused=settings.skip_unused,
            peers=peers,
            after_step=self.after_step,
        )
        self.note_plan(choices.plan)
        self.recorder = Recorder(self.device)
        self.tuner: Tuner | None = None
        if settings.strategy is not None:
            from backbeat.runtime.ddp.tuner import Tuner

            self.tuner = Tuner(self, settings.strategy)
        # The first steps are timed: for the ready order, for the tuner, for the report.
        self.time_steps(True)
        return runner

    def _make_exchange(self, context: ReducerContext) -> Exchange:
        """What sends the buckets: a hook of the user's, compression, or all-reduce."""
        if self._comm_hook is not None:
            return HookExchange(context, *self._comm_hook)
        plan = self.settings.buckets.plan
        if plan is None or not plan.compressed:
            return Exchange(context)
        on_host = plan.memory is not None and plan.memory.residuals == "host"
        return CompressedExchange(context, self.settings.compression, host=on_host)

    def move_to(self, process_group: ProcessGroup) -> None:
        """Go on with another set of ranks, and with buckets as in the first step."""
        self.remove_hooks()
        self.process_group, self.lost = process_group, None
        self.build()

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
        return plan_of(self.managed.module)

    def note_plan(self, plan: Plan | None) -> None:
        """The buckets that run from now on are this plan's, or no plan's."""
        if self.managed.module is not None:
            runs(self.managed.module, plan)

    @property
    def follows_ready_order(self) -> bool:
        """The buckets are stock DDP's, formed again in ready order."""
        choices = self.settings.buckets
        return self.ready_order_known and choices.plan is None and not choices.find_unused

    @property
    def compressed(self) -> bool:
        """Some buckets of the plan travel compressed."""
        plan = self.settings.buckets.plan
        return plan is not None and plan.compressed

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
        if self.lost is not None:
            raise self.lost
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
        if timed or not runner.status.expects_regular:
            self.managed.check_known(thoroughly=timed)
        if not self.ready_order_known:
            self._form_in_ready_order()
        if self.tuner is not None and not self.tuner.settled:
            self._tune(self.tuner)
        else:
            following = runner.step.number + 1
            first, every = self.sampled
            wanted = following <= first or following % every == 0
            if wanted or timed:
                self.time_steps(wanted)
        if self.budget_check is not None:
            self.budget_check.after_step()
        if self.watch is not None:
            self.watch()
        if self._awaited:
            awaited, self._awaited = self._awaited, []
            torch.futures.wait_all(awaited)

    def time_steps(self, timed: bool) -> None:
        """Time the steps from the next one on, or stop it."""
        if timed and self.steps:
            self.recorder.mark_step_end()
        self.runner.time_steps(self.recorder if timed else None)

    @together
    def _tune(self, tuner: Tuner) -> None:
        tuner.after_step()

    @together
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

    @together
    def _form_in_ready_order(self) -> None:
        """As stock DDP does once: buckets again, in the order in which rank 0's gradients became ready."""
        steps = self.recorder.steps()
        arrived = sorted(steps[-1].ready_s, key=lambda index: steps[-1].ready_s[index]) if steps else []
        order = self.ranks.from_rank_0(arrived)
        missing = sorted(set(range(len(self.managed.names))) - set(order), reverse=True)
        self.switch(self.settings.buckets.stock([*order, *missing], self.managed, self.communicators))
        self.ready_order_known = True

    def _add_unfrozen(self) -> None:
        """Parameters that became trainable since: into trailing buckets, on every rank at this forward."""
        if any(parameter.requires_grad for _, parameter in self.managed.frozen):
            # Where the step before has failed, this raises on every rank, and the next forward tries again.
            self.runner.read_step_before()
            self._take_in(self.managed.with_unfrozen())

    @together
    def _take_in(self, grown: ManagedParameters) -> None:
        """Reduce these parameters, of which the last became trainable, once every rank does."""
        first, count = len(self.managed.names), len(grown.names)
        partition = with_newcomers(self.partition, range(first, count), grown)
        self.ranks.wait_for_all(
            f"{grown.names[first]!r} became trainable",
            "do so on every rank, before the same forward. Restart from the last checkpoint",
        )
        self._agree(partition, "the set of trainable parameters", grown)
        self.managed.become(grown)
        with torch.no_grad():
            self.runner.add_parameters(first, partition)
        self.recorder.clear()
        if self.tuner is not None:
            self.tuner.restart(f"{count - first} parameters became trainable")

    def _agree(self, partition: Partition, what: str, managed: ManagedParameters | None = None) -> None:
        """Raise on every rank unless all are about to run this partition of these parameters, or of those there are."""
        settings = self.settings
        lines = [
            *partition.lines(managed or self.managed),
            f"reduce_dtype={settings.reduce_dtype}, strict={settings.strict}, "
            f"skip_all_reduce_unused_params={settings.skip_unused}",
        ]
        if partition.compressed:
            # Options decide how much travels and from where: ranks that differ in them send messages nobody expects.
            lines.append(f"compression {settings.compression}")
        self.ranks.agree(lines, what)

    def give_up(self, error: BaseException) -> None:
        """This rank failed where ranks change together."""
        if self.lost is not None or not hasattr(self, "communicators") or self.communicators.size == 1:
            return
        why = first_line(error)
        self.lost = CommunicationError(
            f"rank {self.communicators.rank} gave up: {why}. It failed where ranks change something together, and the "
            "others may have gone on without it. Restart from the last checkpoint"
        )
        if self._runner is not None:
            self._runner.context.lose(self.lost, gave_up=why)
        if self.communicators.backend == "gloo" and (self._runner is None or self._runner.step.idle):
            # Whoever waits for this rank hears of it at once.
            self.communicators.close()

    def attach(self, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None) -> None:
        """Let compressed buckets update by this optimizer, which was checked."""
        self.compressed_exchange.attached.add(optimizer, max_grad_norm=max_grad_norm)
        # Updates that follow the last bucket wait to learn whether some rank has called the step off.
        self.runner.status.never_defer(self.settings.strict or max_grad_norm is not None)
        # Where each bucket is updated at once, decoded means need no buffers of their own.
        with torch.no_grad():
            self.runner.install(self.partition)

    @property
    def residuals(self) -> Residuals:
        """What this rank has not sent yet of compressed buckets."""
        if not self.compressed:
            raise InputError("there are no residuals: no bucket of the plan is compressed")
        return self.compressed_exchange.residuals

    def load_residuals(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Go on with what `read` finds for this rank; on every rank or on none."""
        residuals = self.residuals
        self._load(lambda: residuals.checked(read()))

    @together
    def _load(self, read: Callable[[], Mapping[str, Any]]) -> None:
        state = self.ranks.raise_on_all(read, "the residuals")
        # The density of a warm-up goes by it, and with that how much travels.
        self.ranks.agree([f"after step {state['step']}"], "the residuals")
        self.residuals.load(state)

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
        self._comm_hook = (state, hook)
        if self._runner is not None:
            self._runner.exchange_by(self._make_exchange)

    def remove_hooks(self) -> None:
        if self._runner is not None:
            self._runner.remove_hooks()

    # Torch's wrapper and frameworks call these on the reducer they find.
    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.sampled = (10, sample_rate)

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """What a hook on the buffers has begun: the next backward waits for it."""
        self._awaited.extend(futures)

    # These two have nothing to do here.
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
