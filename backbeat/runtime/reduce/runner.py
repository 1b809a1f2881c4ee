"""What runs beneath one wrapper: communicators, reducer, recorder and tuner, and how buckets change in mid-training."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from backbeat.comm.agreement import agree, meet, share
from backbeat.comm.communicators import Communicators
from backbeat.comm.nccl import set_nccl_launch_order
from backbeat.errors import InputError
from backbeat.runtime.compressed.compressed_exchange import CompressedDelivery
from backbeat.runtime.reduce import first_partition as bucketing
from backbeat.runtime.reduce import partition as partitions
from backbeat.runtime.reduce.delivery import Delivery
from backbeat.runtime.reduce.reducer import Reducer
from backbeat.runtime.reduce.timing import Recorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from backbeat.runtime.auto import Tuner
    from backbeat.runtime.reduce.first_partition import WrapperSettings
    from backbeat.runtime.reduce.job import Job
    from backbeat.runtime.reduce.partition import Partition
    from backbeat.runtime.reduce.roster import Roster

# Rounds that are timed for `report()`: the first few, then a few in a thousand.
SAMPLED_FIRST = 8
SAMPLED_EVERY = 200


class Runner:
    """Builds the parts, on every rank together, and takes them from one partition to the next."""

    def __init__(
        self,
        settings: WrapperSettings,
        roster: Roster,
        process_group: ProcessGroup,
        device: torch.device,
        *,
        model: str,
    ) -> None:
        self.settings = settings
        self.roster = roster
        self.device = device
        self.model = model
        """Its class, by name."""
        set_nccl_launch_order(process_group, device)
        self.links = links = Communicators(process_group, device, 1)
        if any(roster.sparse) and links.backend != "gloo":
            name = roster.names[roster.sparse.index(True)]
            raise InputError(
                f"parameter {name!r} has sparse gradients, which {links.backend} cannot sum: "
                "use sparse=False, or the gloo backend"
            )
        self.settled = settings.plan is not None or settings.find_unused
        """The buckets are not stock DDP's of its first step, which last only until the ready order is known."""
        self._agreements = 0
        partition = bucketing.first_partition(settings, roster, links)
        self._agree(partition, "the plan")
        links.grow(partition.communicators)
        self.reducer = Reducer(
            roster.names,
            roster.parameters,
            communicators=links,
            partition=partition,
            reduce_dtype=settings.reduce_dtype,
            strict=settings.strict,
            delivery=_delivery(partition, settings),
        )
        self.reducer.after_step = weakref.WeakMethod(self.after_step)
        self.reducer.unreached = weakref.WeakMethod(self.check_roster)
        self.recorder = Recorder(device)
        self.tuner: Tuner | None = None
        if settings.strategy is not None:
            from backbeat.runtime.auto import Tuner

            self.tuner = Tuner(
                self, strategy=settings.strategy, network=settings.network, communicators=settings.communicators
            )
        # The first rounds are timed: for the ready order, for the tuner, for the report.
        self.reducer.recorder = self.recorder

    def after_step(self) -> None:
        """At the end of each synchronised backward, on every rank alike: settle the buckets, sample the times."""
        if not self.reducer.word.regular:
            self.check_roster()
        if not self.settled:
            self._settle_in_ready_order()
        if self.tuner is not None and self.tuner.state != "settled":
            self.tuner.after_step()
        else:
            following = self.reducer.step + 1
            sampled = following <= SAMPLED_FIRST or following % SAMPLED_EVERY == 0
            self.reducer.recorder = self.recorder if sampled else None

    def check_roster(self) -> None:
        """Where gradients did not come as expected: refuse a model with other parameters than were wrapped."""
        name = self.roster.stranger()
        if name is not None:
            raise InputError(
                f"parameter {name!r} came into the model after it had been wrapped (load_state_dict(assign=True), "
                "module.weight = …), and its gradients are not reduced: wrap the model again, or write into the "
                "parameters that were there (copy_)"
            )

    def _settle_in_ready_order(self) -> None:
        """As stock DDP does once: buckets again, in the order in which rank 0's gradients became ready."""
        self.settled = True
        rounds = self.recorder.rounds()
        arrived = sorted(rounds[-1].ready_s, key=lambda place: rounds[-1].ready_s[place]) if rounds else []
        text = share(self.links, "ready-order", ",".join(str(place) for place in arrived))
        order = [int(place) for place in text.split(",") if place]
        missing = sorted(set(range(len(self.roster.names))) - set(order), reverse=True)
        self.switch(bucketing.like_ddp([*order, *missing], self.settings, self.roster, self.links))

    def switch(self, partition: Partition) -> None:
        """Run another partition from the next step on; every rank calls it at the same step with the same partition."""
        if partition.buckets == self.reducer.partition.buckets:
            return
        compressed = any(group.compression is not None for group in partition.buckets)
        if compressed and not isinstance(self.reducer.delivery, CompressedDelivery):
            raise InputError(
                "the new buckets are compressed, and training began without compressed buckets: wrap the model with "
                "that plan"
            )
        self._agree(partition, "the plan")
        self.links.grow(partition.communicators)
        with torch.no_grad():
            self.reducer.install(partition)

    def wake_frozen(self) -> None:
        """Parameters that became trainable since: into trailing buckets, on every rank at this forward."""
        roster = self.roster
        if not any(parameter.requires_grad for _, parameter in roster.frozen):
            return
        # Where the step before has failed, this raises while nothing has changed yet, and the next forward tries again.
        self.reducer.absorb()
        woken = roster.wake()
        first = len(roster.names) - woken
        partition = partitions.with_newcomers(
            self.reducer.partition, range(first, len(roster.names)), roster.parameters, roster.sparse
        )
        meet(self.links, f"woken/{self._agreements}", f"{roster.names[first]!r} became trainable")
        self._agree(partition, "the set of trainable parameters")
        with torch.no_grad():
            self.reducer.add_parameters(roster.names[first:], roster.parameters[first:], partition)
        if self.tuner is not None:
            self.tuner.restart(f"{woken} parameters became trainable")

    def _agree(self, partition: Partition, what: str) -> None:
        lines = partition.lines(self.roster.names, self.roster.parameters)
        if any(group.compression is not None for group in partition.buckets):
            # Options decide how much travels and from where: ranks that differ in them send messages nobody expects.
            lines = [*lines, f"compression {self.settings.compression}"]
        agree(self.links, f"partition/{self._agreements}", lines, what)
        self._agreements += 1


def _delivery(partition: Partition, settings: WrapperSettings) -> Callable[[Job], Delivery]:
    """What this kind of partition is run by."""
    if any(group.compression is not None for group in partition.buckets):
        memory = settings.plan.memory if settings.plan is not None else None
        host = memory is not None and memory.residuals == "host"
        return functools.partial(CompressedDelivery, options=settings.compression, host=host)
    return Delivery
