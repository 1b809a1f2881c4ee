"""What each parameter is owed: residuals by parameter, on their way from one plan to another or to a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from backbeat.runtime.compressed.checkpoint import SCHEMA, check
from backbeat.runtime.compressed.compressed_bucket import CompressedBucket
from backbeat.runtime.compressed.residual import Owed
from backbeat.runtime.reduce.bucket import BucketMemory
from backbeat.runtime.reduce.context import ReducerContext
from backbeat.runtime.weak_call import WeakCall
from backbeat.units import first_few

logger = logging.getLogger("backbeat.runtime")


class Residuals:
    """What this rank has not sent yet: in its compressed buckets, and here for parameters that none of these has."""

    def __init__(self, context: ReducerContext, join: Callable[[], None]) -> None:
        """join: a method after which the current stream sees what is done beside it."""
        self._context = context
        self._join = WeakCall(join)
        self._buckets: Sequence[CompressedBucket] = ()
        self._held: dict[str, Owed] = {}
        """Residual and velocity, by the parameter's name."""
        self.steps_before = 0
        """Steps of this training before its own first, where it goes on from a checkpoint."""

    def state(self) -> dict[str, Any]:
        """This rank's residuals by name, copied to the host."""
        self.take_from_buckets()
        held = {name: self._held[name] for name in self._context.managed.names if name in self._held}
        residuals = {name: values.cpu().clone() for name, (values, _) in held.items()}
        velocities = {name: velocity.cpu().clone() for name, (_, velocity) in held.items() if velocity is not None}
        for bucket in self._buckets:
            for index in bucket.members:
                self._held.pop(self._context.managed.names[index], None)
        communicators = self._context.communicators
        return {
            "schema": SCHEMA,
            "rank": communicators.rank,
            "ranks": communicators.size,
            "step": self._context.step.number + self.steps_before,
            "residuals": residuals,
            "velocities": velocities,
        }

    def checked(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state, if it is this model's."""
        named = zip(self._context.managed.names, self._context.managed.parameters, strict=True)
        check(state, {name: tuple(parameter.shape) for name, parameter in named})
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace this rank's residuals by a state that was checked."""
        self._join()
        context = self._context
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.clear()
            device = context.communicators.device
            velocities = {name: values.to(device) for name, values in state["velocities"].items()}
            residuals = state["residuals"].items()
            self._held = {name: (values.to(device), velocities.get(name)) for name, values in residuals}
            self.steps_before = int(state["step"]) - context.step.number
            self.give_to_buckets(self._buckets)
        kept = {
            context.managed.names[index]
            for bucket in self._buckets
            if bucket.momentum_of is not None
            for index in bucket.members
        }
        dropped = [name for name in velocities if name not in kept]
        if dropped and context.communicators.rank == 0:
            logger.warning(
                "momentum of %s in the checkpoint begins anew: only compressed buckets take it up, with "
                "momentum_correction and SGD",
                first_few(dropped),
            )

    def take_from_buckets(self) -> None:
        """Hold copies of every residual in the buckets, which are about to change."""
        self._join()
        with torch.no_grad():
            for bucket in self._buckets:
                for index, owed in bucket.owed().items():
                    self._held[self._context.managed.names[index]] = owed

    def give_to_buckets(self, buckets: Sequence[CompressedBucket]) -> None:
        """These buckets run from now on: give them what their members are owed."""
        self._buckets = buckets
        for bucket in buckets:
            for index in bucket.members:
                found = self._held.pop(self._context.managed.names[index], None)
                if found is not None:
                    bucket.add_owed(index, *found)

    def add_owed(self, bucket: BucketMemory, arrived: Sequence[int]) -> None:
        """What a member owes from a plan that compressed it goes with its first dense gradient."""
        if not self._held or not bucket.views:
            return
        for index, view in zip(bucket.members, bucket.views, strict=True):
            if arrived[index]:
                found = self._held.pop(self._context.managed.names[index], None)
                if found is not None:
                    view.add_(found[0].to(view))
